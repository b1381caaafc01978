"""Which comes when, where some have to wait for others: of a batch, or of a whole archive."""

import heapq
from collections.abc import Sequence


def topological_sort(waits: Sequence[set[int]]) -> list[int]:
    """All positions, each after those that it waits for: of the ones that wait for nothing (more), always the first.

    ``waits[n]``: the positions that position n waits for. Where they wait for each other in a circle, the first that is left goes ahead.
    Kahn's algorithm with a heap, so O((n + waits) log n).
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
            continue  # was let go ahead in a circle
        del waiting[index]
        ordered.append(index)
        for follower in followers.get(index, ()):
            left[follower] -= 1
            if left[follower] == 0:
                heapq.heappush(free, follower)
    return ordered
