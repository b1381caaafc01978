"""The numbers of audiences, laid on lines so that neighbours are seen by nearly the same principals.

A principal's audiences are kept as ranges. So a new audience should get a number at which the existing ranges already say
nearly the right thing, and only the principals for whom it differs have to be written. Numbers lie on lines:

* The main line follows the room's current state: ``UNIT[0]``, ``2 * UNIT[0]``, … Whoever is in the audience of the current
  state has a range without an upper end, and so is in the next one by default.
* Between two numbers of the main line there is room for ``2^16 - 1`` branch lines (forks, and history that was backfilled),
  each of 4,096 numbers; off each of those for 63 more lines of 64 numbers. By default a branch line is seen by whoever sees
  the number it leaves from, and each number on it by whoever sees the one before.

The bits of a number, from high to low: main (23), branch (16), step (12), sub-branch (6), sub-step (6).

Where a place is full, the new audience takes a number of the main line for itself alone; that is always right, and costs a
row for each principal that differs from the current state.
"""

from typing import Final, NamedTuple

UNIT: Final = (1 << 40, 1 << 12, 1)  # distance of neighbours on a line, by depth of the line
LINE: Final = (None, 1 << 24, 1 << 6)  # length of a line, by depth; the main line has no end
FIRST: Final = UNIT[0]  # the first audience of a room
NOTHING: Final = 0  # an audience that nobody is in; no range ever covers it


class AudienceNumber(NamedTuple):
    """A number for a new audience: exceptions are written for ``[number, end)``; ``end`` None is the end of the main line."""

    number: int
    end: int | None


def main(number: int) -> int:
    """The number of the main line that this one is, or branches off."""
    return number - number % UNIT[0]


def depth(number: int) -> int:
    """Which kind of line the number lies on: 0 main, 1 branch, 2 sub-branch."""
    if number % UNIT[0] == 0:
        return 0
    return 1 if number % UNIT[1] == 0 else 2


def line_end(number: int) -> int | None:
    """Where the line of this number ends (exclusive); None for the main line."""
    length = LINE[depth(number)]
    return None if length is None else number - number % length + length


def following(number: int) -> AudienceNumber | None:
    """The next number on the same line, or None if the line is full."""
    end = line_end(number)
    new = number + UNIT[depth(number)]
    return None if end is not None and new >= end else AudienceNumber(new, end)


def branching(number: int, branches: int) -> AudienceNumber | None:
    """The first number of a new line that leaves from here, where ``branches`` lines have left already; None if there is no room."""
    level = depth(number)
    length = LINE[level + 1] if level < 2 else None
    if length is None or (branches + 2) * length > UNIT[level]:
        return None
    start = number + (branches + 1) * length
    return AudienceNumber(start, start + length)
