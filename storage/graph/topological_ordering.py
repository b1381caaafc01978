"""Topological order: a child sorts after its parents, whatever depth its sender claimed.

An event's topological ordering is 1 + the largest of its parents'. Where parents are missing, the
claimed depth is a hint. It is kept above the stored parents and below the stored children. When
history arrives below such events and finds no room, only the events above it that must move are
moved up (`raised_orderings`).

Reason for not trusting depths: the forged depths of advisory GHSA-v56r-hwv5-mxg6.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

FIRST: Final = 1
HINT_SLACK: Final = 1_000_000  # how far a hint may put an event above all known events of its room
HINT_CEILING: Final = 1 << 62  # leaves 2^62 positions for events after the largest forged depth


def next_after(parents: Iterable[int]) -> int:
    """Return the topological ordering of an event whose parents are all stored and have these."""
    return max(parents, default=0) + 1


def ordering(
    parents: Iterable[int], *, complete: bool, depth: int, children: Iterable[int], room_max: int
) -> int:
    """Return the topological ordering of a new event.

    ``parents`` and ``children`` are orderings of the stored ones. ``complete`` means that no parent
    is missing. ``room_max`` is the largest ordering in the room, 0 for a room without events.
    """
    low = next_after(parents)
    if complete:
        return low
    high = min(
        children,
        default=HINT_CEILING if room_max == 0 else min(room_max + HINT_SLACK, HINT_CEILING),
    )
    return max(low, min(depth, high - 1))


def raised_orderings(
    start: Mapping[int, int], rows: Sequence[tuple[int, int, Sequence[int]]]
) -> tuple[dict[int, int], bool]:
    """Return the events that have to move so that children stay above their parents.

    ``start`` has new orderings, by nid, of events whose ordering is decided. ``rows`` are (nid,
    ordering, parents) of the events of the room in ascending order, from the lowest ordering in
    ``start`` on, perhaps not to the end. The result is the new orderings of the other events that
    move, and whether the rows reached far enough to know.
    """
    orderings = dict(start)
    highest = max(orderings.values(), default=0)
    for nid, order, parents in rows:
        if order > highest:
            return _others(orderings, start), True
        needed = (
            max((orderings[parent] for parent in parents if parent in orderings), default=0) + 1
        )
        if nid not in start and needed > order:
            orderings[nid] = needed
            highest = max(highest, needed)
    return _others(orderings, start), False


def _others(orderings: Mapping[int, int], start: Mapping[int, int]) -> dict[int, int]:
    return {nid: order for nid, order in orderings.items() if nid not in start}


# --------------------------------------------------------------------------------------------------
# Topological sort of items that wait for others: of a batch, or of a whole archive.


def topological_sort(waits: Sequence[set[int]]) -> list[int]:
    """Return all positions, each after those that it waits for; the smallest free one is next.

    ``waits[n]`` has the positions that position n waits for. Where they wait for each other in a
    circle, the first remaining one is next. Kahn's algorithm with a heap, so O((n + waits) log n).
    """
    followers: dict[int, list[int]] = {}
    for index, befores in enumerate(waits):
        for before in befores:
            followers.setdefault(before, []).append(index)
    left = [len(befores) for befores in waits]
    free = [index for index, count in enumerate(left) if count == 0]
    waiting = dict.fromkeys(range(len(waits)))
    ordered: list[int] = []
    while waiting:
        index = heapq.heappop(free) if free else next(iter(waiting))
        if index not in waiting:
            continue  # a circle: it was already returned
        del waiting[index]
        ordered.append(index)
        for follower in followers.get(index, ()):
            left[follower] -= 1
            if left[follower] == 0:
                heapq.heappush(free, follower)
    return ordered
