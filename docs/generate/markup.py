"""Small pieces of Markdown."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without its empty columns, or "" if it has no rows."""
    listed = list(rows)
    used = [number for number in range(len(header)) if any(row[number] for row in listed)]
    lines = [_row([row[number] for number in used]) for row in [header, *listed]]
    return "\n".join([lines[0], _row(["---"] * len(used)), *lines[1:], ""]) if listed else ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def code(text: object) -> str:
    """Return inline code, or "" for nothing."""
    shown = str(text)
    return f"`{shown}`" if shown else ""


def one_line(text: str) -> str:
    """Return text for a cell of a table: paragraphs follow each other."""
    return " ".join(text.split())


def page(*parts: str) -> str:
    """Join the parts of a page that are not empty."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"
