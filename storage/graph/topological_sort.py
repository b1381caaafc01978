"""Topological sort of items that wait for others: of a batch, or of a whole archive."""

import heapq
from collections.abc import Sequence


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
