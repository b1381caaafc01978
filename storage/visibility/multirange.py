"""Multiranges of integers as tuples of half-open pairs, sorted and never touching.

They correspond to int8multirange in Postgres. ``None`` as an upper end means that the range has no
end.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

Range = tuple[int, int | None]
Ranges = tuple[Range, ...]

EMPTY: Final[Ranges] = ()
_PAIR: Final = re.compile(r"\[(-?\d+),(-?\d*)\)")
_END: Final = 1 << 63  # larger than any number in use; represents "no end" in comparisons


def contains(ranges: Ranges, number: int) -> bool:
    index = _ending_after(ranges, number)
    return index < len(ranges) and ranges[index][0] <= number


def unending(ranges: Ranges) -> bool:
    """Return whether the last range has no end."""
    return bool(ranges) and ranges[-1][1] is None


def add(ranges: Ranges, low: int, high: int | None) -> Ranges:
    """Return the ranges with ``[low, high)`` added.

    The time grows with the logarithm of their number, because additions are mostly at the end.
    """
    top = _top(high)
    first, end = _ending_after(ranges, low - 1), _beginning_after(ranges, top)
    if first < end:  # the ranges that it touches
        low, top = min(low, ranges[first][0]), max(top, _top(ranges[end - 1][1]))
    return (*ranges[:first], (low, None if top == _END else top), *ranges[end:])


def remove(ranges: Ranges, low: int, high: int | None) -> Ranges:
    """Return the ranges without ``[low, high)``. As fast as `add`."""
    top = _top(high)
    first, end = _ending_after(ranges, low), _beginning_after(ranges, top - 1)
    if first >= end or low >= top:
        return ranges
    (start, _), (_, stop) = ranges[first], ranges[end - 1]
    rest = [*([(start, low)] if start < low else ()), *([(top, stop)] if _top(stop) > top else ())]
    return (*ranges[:first], *rest, *ranges[end:])


def union(parts: Iterable[Range]) -> Ranges:
    """Return the union of these ranges, which may overlap."""
    merged = EMPTY
    for low, high in parts:
        merged = add(merged, low, high)
    return merged


def coarser(ranges: Ranges, most: int) -> Ranges:
    """Close the smallest gaps between the ranges until at most ``most`` remain."""
    while len(ranges) > most:
        gaps = [
            (after[0] - _top(before[1]), index)
            for index, (before, after) in enumerate(pairwise(ranges))
        ]
        index = min(gaps)[1]
        ranges = (*ranges[:index], (ranges[index][0], ranges[index + 1][1]), *ranges[index + 2 :])
    return ranges


def to_text(ranges: Ranges) -> str:
    """Return the text that Postgres reads as an int8multirange."""
    return "{" + ",".join(f"[{low},{'' if high is None else high})" for low, high in ranges) + "}"


def from_text(text: str) -> Ranges:
    """Read the canonical text of an int8multirange from Postgres."""
    return tuple((int(low), int(high) if high else None) for low, high in _PAIR.findall(text))


def _ending_after(ranges: Ranges, number: int) -> int:
    """Return the index of the first range that ends after a number."""
    if not ranges or _top(ranges[-1][1]) <= number:
        return len(ranges)
    return bisect_right(ranges, number, key=_end_of)


def _beginning_after(ranges: Ranges, number: int) -> int:
    """Return the index of the first range that begins after a number."""
    if not ranges or ranges[-1][0] <= number:
        return len(ranges)
    return bisect_right(ranges, number, key=itemgetter(0))


def _end_of(pair: Range) -> int:
    return _top(pair[1])


def _top(high: int | None) -> int:
    return _END if high is None else high


# --------------------------------------------------------------------------------------------------
# Numbers of audiences, on lines so that neighbours have nearly the same members.
#
# A principal's audiences are stored as ranges. So a new audience should get a number for which the
# existing ranges are nearly right. Then rows are written only for the principals that differ.
# Numbers
# lie on lines:
# * The main line follows the room's current state: ``UNIT[0]``, ``2 * UNIT[0]``, … A member of the
#   audience of the current state has a range without an upper end, and so is in the next one by
#   default.
# * Between two numbers of the main line there is room for ``2^16 - 1`` branch lines (forks, and
#   backfilled history), each of 4,096 numbers. Each of those numbers has room for 63 more lines of
#   64 numbers. By default a branch line has the audience of the number it leaves from, and each
#   number on it that of the one before.
#
# The bits of a number, from high to low: main (23), branch (16), step (12), sub-branch (6),
# sub-step (6).
#
# Where there is no room, the new audience takes a number of the main line for itself alone. That is
# always right, and costs a row for each principal that differs from the current state.

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


# --------------------------------------------------------------------------------------------------
# The topological ranges of a room's audiences, so that reads skip hidden events.
#
# A number of the main line stores the maximum of the topological order before the event that opened
# it. That grows with the numbers. So the events of a range of numbers lie between the stored
# maximum of its first number and that of the number after its last. A reader's ranges thus become
# topological ranges (`topological_ranges_of` in the schema), found by two probes each. Nothing has
# to be written when an audience closes, or for a message.
#
#     opened       0          40         90
#     number       1          2          3 (current)
#     order        1 … 40     41 … 90    91 …        a reader of number 2 alone: 41 … 90
#
# Forks cross these bounds. They cross them by a little where servers send at the same time, which
# `SLACK` allows for. They sometimes cross them by much, as where a server was cut off, or where
# history is backfilled. Such events are out of range: the room's row stores the range around them,
# and every reader scans it. These ranges only say where to scan; the audience alone decides
# visibility. Events that no local user may ever see are not marked: their server is not in the
# audience, and the history is neither shared nor world readable. So history that was hidden from
# the start costs no reader anything, however long it is.

SLACK: Final = 100  # as order_slack() in the schema
# an out-of-range event marks the whole aligned range of this length, so that similar ones are
# mostly marked already
AROUND: Final = 256
OUT_OF_RANGE_MAX: Final = (
    64  # out-of-range ranges in a room; above that, the nearest ones are joined
)


def expected(order: int, opened: int, closed: int | None) -> bool:
    """Return whether reads scan this topological position for an audience with these bounds.

    ``closed`` None means that the audience is current.
    """
    return opened - SLACK <= order and (closed is None or order <= closed + SLACK)


def with_out_of_range(out_of_range: Ranges, order: int) -> Ranges:
    """Return the out-of-range ranges of a room with this position added."""
    if contains(out_of_range, order):
        return out_of_range
    low = order - order % AROUND
    return coarser(add(out_of_range, low, low + AROUND), OUT_OF_RANGE_MAX)
