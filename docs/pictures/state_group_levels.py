"""State groups on levels: the worked example of storage/state/paths.py, computed by it."""

from typing import Final, NamedTuple
from unittest.mock import patch

from docs.pictures.canvas import AMBER, BLUE, TEAL, Canvas
from storage.state import paths

RADIX: Final = 3
ENTRIES: Final = 9
"""Entries of the state: with the radix 3, two levels."""

CHANGES: Final = "abcdefgh"


class Placed(NamedTuple):
    """A group: its counters, and the rows that a read folds, each with the changes in it."""

    runs: tuple[int, ...]
    path: tuple[str, ...]


def groups() -> list[Placed]:
    """Return a root and one group for each change, placed with the radix 3."""
    with patch.object(paths, "RADIX", RADIX):
        placed = [Placed(paths.root(ENTRIES).runs, ("R",))]
        for change in CHANGES:
            placed.append(_child(placed[-1], change))
    return placed


def _child(parent: Placed, change: str) -> Placed:
    """Return the group after a change: it keeps rows of its parent, and writes the rest anew."""
    place = paths.candidates(parent.runs, ENTRIES)[0]
    if place.keep == 0:
        return Placed(place.runs, ("R'",))
    return Placed(
        place.runs, (*parent.path[: place.keep], "".join(parent.path[place.keep :]) + change)
    )


def draw() -> Canvas:
    """Return a line for each group: its counters, the rows it keeps, and the row it writes."""
    placed = groups()
    canvas = Canvas(760, 130 + 42 * len(placed), "State groups on two levels, with the radix 3")
    for x, title in ((20, "change"), (100, "level 2, 1"), (220, "rows that a read folds")):
        canvas.text(x, 36, title, bold=True)
    for number, group in enumerate(placed):
        y = 54 + number * 42
        canvas.text(40, y + 22, "-" if number == 0 else CHANGES[number - 1], mono=True, size=15)
        canvas.text(120, y + 22, ", ".join(map(str, group.runs)), mono=True)
        for at, row in enumerate(group.path):
            last = at == len(group.path) - 1
            tone = BLUE if row[0] == "R" else AMBER if len(row) > 1 else TEAL
            box = canvas.box(
                220 + at * 100, y, 84, 32, row if last else "", () if last else [row], tone=tone
            )
            if at:
                canvas.line((box.x - 16, y + 16), (box.x, y + 16))
    y = 78 + 42 * len(placed)
    canvas.caption(
        y, "Bold: the row that the group writes. The rows before it are shared with its parent."
    )
    canvas.caption(
        y + 20,
        "A full level (2 rows) is folded into the next one, as c and f do. After h comes a root.",
    )
    return canvas
