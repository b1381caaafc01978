"""Numbers of audiences, on lines so that neighbours have nearly the same members.

A principal's audiences are stored as ranges. So a new audience should get a number for which the
existing ranges are nearly right. Then rows are written only for the principals that differ. Numbers
lie on lines:
* The main line follows the room's current state: ``UNIT[0]``, ``2 * UNIT[0]``, … A member of the
  audience of the current state has a range without an upper end, and so is in the next one by
  default.
* Between two numbers of the main line there is room for ``2^16 - 1`` branch lines (forks, and
  backfilled history), each of 4,096 numbers. Each of those numbers has room for 63 more lines of
  64 numbers. By default a branch line has the audience of the number it leaves from, and each
  number on it that of the one before.

The bits of a number, from high to low: main (23), branch (16), step (12), sub-branch (6), sub-step
(6).

Where there is no room, the new audience takes a number of the main line for itself alone. That is
always right, and costs a row for each principal that differs from the current state.
"""

from typing import Final, NamedTuple

UNIT: Final = (1 << 40, 1 << 12, 1)  # distance of neighbours on a line, by depth of the line
LINE: Final = (None, 1 << 24, 1 << 6)  # length of a line, by depth; the main line has no end
FIRST: Final = UNIT[0]  # the first audience of a room
NOTHING: Final = 0  # an audience without members; no range contains it


class AudienceNumber(NamedTuple):
    """A number for a new audience.

    Exceptions are written for ``[number, end)``; ``end`` None is the end of the main line.
    """

    number: int
    end: int | None


def main(number: int) -> int:
    """Return the number of the main line that this one is, or branches off."""
    return number - number % UNIT[0]


def depth(number: int) -> int:
    """Return the depth of the number's line: 0 main, 1 branch, 2 sub-branch."""
    if number % UNIT[0] == 0:
        return 0
    return 1 if number % UNIT[1] == 0 else 2


def line_end(number: int) -> int | None:
    """Return where the line of this number ends (exclusive); None for the main line."""
    length = LINE[depth(number)]
    return None if length is None else number - number % length + length


def following(number: int) -> AudienceNumber | None:
    """Return the next number on the same line, or None if the line is full."""
    end = line_end(number)
    new = number + UNIT[depth(number)]
    return None if end is not None and new >= end else AudienceNumber(new, end)


def branching(number: int, branches: int) -> AudienceNumber | None:
    """Return the first number of a new line that leaves from here; None if there is no room.

    ``branches`` lines have left from here already.
    """
    level = depth(number)
    length = LINE[level + 1] if level < 2 else None
    if length is None or (branches + 2) * length > UNIT[level]:
        return None
    start = number + (branches + 1) * length
    return AudienceNumber(start, start + length)
