"""Multiranges of integers as tuples of half-open pairs, sorted and never touching.

They correspond to int8multirange in Postgres. ``None`` as an upper end means that the range has no
end.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter
from typing import Final

Range = tuple[int, int | None]
Ranges = tuple[Range, ...]

EMPTY: Final[Ranges] = ()
_PAIR: Final = re.compile(r"\[(-?\d+),(-?\d*)\)")
_END: Final = 1 << 63  # larger than any number in use; represents "no end" in comparisons


def contains(ranges: Ranges, number: int) -> bool:
    place = _ending_after(ranges, number)
    return place < len(ranges) and ranges[place][0] <= number


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
    found = EMPTY
    for low, high in parts:
        found = add(found, low, high)
    return found


def coarser(ranges: Ranges, most: int) -> Ranges:
    """Close the smallest gaps between the ranges until at most ``most`` remain."""
    while len(ranges) > most:
        gaps = [
            (after[0] - _top(before[1]), place)
            for place, (before, after) in enumerate(pairwise(ranges))
        ]
        place = min(gaps)[1]
        ranges = (*ranges[:place], (ranges[place][0], ranges[place + 1][1]), *ranges[place + 2 :])
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
