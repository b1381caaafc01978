"""Multiranges of integers as tuples of half-open pairs, sorted and never touching: what int8multirange is in Postgres.

``None`` as an upper end means that the range has no end.
"""

import re
from itertools import pairwise
from typing import Final

Range = tuple[int, int | None]
Ranges = tuple[Range, ...]

EMPTY: Final[Ranges] = ()
_PAIR: Final = re.compile(r"\[(-?\d+),(-?\d*)\)")
_END: Final = 1 << 63  # larger than any number in use; stands for "no end" while comparing


def contains(ranges: Ranges, number: int) -> bool:
    """Whether a number lies in one of the ranges."""
    return any(low <= number and (high is None or number < high) for low, high in reversed(ranges))


def unending(ranges: Ranges) -> bool:
    """Whether the last range has no end."""
    return bool(ranges) and ranges[-1][1] is None


def add(ranges: Ranges, low: int, high: int | None) -> Ranges:
    """The ranges with ``[low, high)`` added."""
    top = _top(high)
    before = [pair for pair in ranges if _top(pair[1]) < low]
    after = [pair for pair in ranges if pair[0] > top]
    touching = [pair for pair in ranges if _top(pair[1]) >= low and pair[0] <= top]
    start = min([low, *(pair[0] for pair in touching)])
    end = max([top, *(_top(pair[1]) for pair in touching)])
    return (*before, (start, None if end == _END else end), *after)


def remove(ranges: Ranges, low: int, high: int | None) -> Ranges:
    """The ranges with ``[low, high)`` taken away."""
    top = _top(high)
    rest: list[Range] = []
    for start, end in ranges:
        if start < low:
            rest.append((start, min(_top(end), low)))
        if _top(end) > top:
            rest.append((max(start, top), end))
    return tuple((start, end) for start, end in rest if start < _top(end))


def coarser(ranges: Ranges, most: int) -> Ranges:
    """The ranges with the smallest gaps between them closed, until there are at most so many."""
    while len(ranges) > most:
        gaps = [(after[0] - _top(before[1]), place) for place, (before, after) in enumerate(pairwise(ranges))]
        place = min(gaps)[1]
        ranges = (*ranges[:place], (ranges[place][0], ranges[place + 1][1]), *ranges[place + 2 :])
    return ranges


def to_text(ranges: Ranges) -> str:
    """As Postgres reads an int8multirange."""
    return "{" + ",".join(f"[{low},{'' if high is None else high})" for low, high in ranges) + "}"


def from_text(text: str) -> Ranges:
    """As Postgres writes an int8multirange, in its canonical form."""
    return tuple((int(low), int(high) if high else None) for low, high in _PAIR.findall(text))


def _top(high: int | None) -> int:
    return _END if high is None else high
