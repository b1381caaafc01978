"""The code blocks and the prose of a Markdown page."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]

FENCE: Final = re.compile(r"(?P<indent> *)(?P<mark>```+|~~~+) *(?P<info>[^`]*)$")
MARKED: Final = re.compile(r"\{ *\.(?P<language>\w+)(?P<classes>(?: +\.[\w-]+)*)(?P<rest>.*)\}$")
REASON: Final = re.compile(r'data-reason="([^"]+)"')
CONTAINER: Final = re.compile(r"( *)([*+-] |\d+[.)] |!!! |\?\?\?|=== |\[\^\w+\]:)")


class CodeBlock(NamedTuple):
    """A fenced block. `language` is "" if it has none; a hidden one stands in an HTML comment."""

    line: int
    language: str
    is_run: bool
    reason: str
    code: str
    hidden: bool


README_LINES_MAX: Final = 200


def pages() -> list[Path]:
    """Return the README, and each page below docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the fenced blocks of a page, in order."""
    opened: re.Match[str] | None = None
    first, code, hidden = 0, [""], False
    for number, line in enumerate(text.splitlines(), 1):
        if opened is None:
            hidden = "-->" not in line if "<!--" in line else hidden and "-->" not in line
            if opened := FENCE.match(line):
                first, code = number, []
        elif line.strip() == opened["mark"]:
            yield _block(first, opened["info"].strip(), "\n".join([*code, ""]), hidden=hidden)
            opened = None
        else:
            code.append(line.removeprefix(opened["indent"]))
    if opened:
        yield CodeBlock(first, "", True, "", "the block has no end", hidden)


def _block(line: int, info: str, code: str, *, hidden: bool) -> CodeBlock:
    marked = MARKED.match(info)
    if marked is None:
        language, _, rest = info.partition(" ")
        return CodeBlock(line, language if not rest else "", True, "", code, hidden)
    said = REASON.search(marked["rest"])
    is_run = ".norun" not in marked["classes"].split()
    return CodeBlock(line, marked["language"], is_run, said[1] if said else "", code, hidden)


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines outside fenced blocks and HTML comments; the others are empty."""
    opened: re.Match[str] | None = None
    hidden = False
    for number, line in enumerate(text.splitlines(), 1):
        if opened is None:
            starts, hidden = hidden or "<!--" in line, "<!--" in line or hidden
            hidden = hidden and "-->" not in line
            opened = FENCE.match(line)
            yield number, "" if opened or starts else line
        else:
            opened = None if line.strip() == opened["mark"] else opened
            yield number, ""


def indented_code(text: str) -> list[int]:
    """Return the lines at which a block of code begins that is indented, and not fenced."""
    found, before, level = [], "", 0
    for number, line in prose_lines(text):
        indent = len(line) - len(line.lstrip())
        if container := CONTAINER.match(line):
            level = max(level, 4 * (len(container[1]) // 4 + 1)) if indent else 4
        elif line.strip() and not indent:
            level = 0
        elif line.strip() and not before.strip() and indent >= level + 4:
            found.append(number)
        before = line
    return found


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and list items of a page, without code, tables and headings."""
    first, parts = 0, [""]
    for number, line in [*prose_lines(text), (0, "")]:
        item = re.match(r"\s*(?:[*+-]|\d+[.)])\s+", line)
        ends = not line.strip() or item or re.match(r"\s*(\||#|!!! |\?\?\?|=== )", line)
        if ends and any(parts):
            yield first, re.sub(r"`[^`]*`", "`code`", " ".join(filter(None, parts)))
            parts = []
        if item or (line.strip() and not ends):
            first = first if any(parts) else number
            parts.append(line[item.end() :].strip() if item else line.strip())
