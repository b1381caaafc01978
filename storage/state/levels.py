"""Levelled deltas: which ancestors a new state group keeps, and what it has to write itself.

A group is read by folding the rows of its path: one root that holds a whole state, then deltas. The
deltas stand at levels, each holding at most ``RADIX - 1`` of them. A new group is put at the lowest
level that has room; when a level is full, the new group takes over everything at that level and
below (it is promoted) and drops those rows from its path. So a path has at most ``levels * (RADIX -
1) + 1`` rows, and an entry is written again once per level, not once per group. The counters are
derived from the parent's own path, so that forks share nothing that could be contended.

Worked example with radix 3 and two levels, one key changed at a time (root R; runs high, low)::

    R          (0, 0)
    R a        (0, 1)
    R a b      (0, 2)
    R c        (1, 0)      c = a and b folded, and its own change
    R c d      (1, 1)

The idea is that of a radix-RADIX counter, as log-structured merge trees use it.
"""

from typing import Final, NamedTuple

RADIX: Final = 8
LEVELS_MAX: Final = 10  # more than any room needs: 8 ** 10 entries
FACTOR: Final = 1.0  # how much a reader may fold besides the root, as a share of the state


class DeltaPlacement(NamedTuple):
    """Where a new group goes: it keeps ``keep`` rows of the parent's path (0: it is a root) and has these ``runs``."""

    keep: int
    runs: tuple[int, ...]


def level_count(size: int) -> int:
    """How many levels a state of this many entries deserves: the smallest with ``RADIX ** levels >= size``, 1 to `LEVELS_MAX`."""
    levels = 1
    while RADIX**levels < size and levels < LEVELS_MAX:
        levels += 1
    return levels


def root(size: int) -> DeltaPlacement:
    """The place of a group that holds its whole state."""
    return DeltaPlacement(0, (0,) * level_count(size))


def candidates(runs: tuple[int, ...], size: int) -> list[DeltaPlacement]:
    """The places a child of a group with these runs may take, best first; the last is always a root.

    ``size`` is the entry count of the child's state. The first place that is affordable is to be taken: see `affordable`.
    """
    runs = (0,) * (level_count(size) - len(runs)) + runs
    for level in range(len(runs) - 1, -1, -1):
        if runs[level] < RADIX - 1:
            kept = runs[: level + 1]
            after = (*kept[:-1], kept[-1] + 1, *(0,) * (len(runs) - level - 1))
            return [DeltaPlacement(1 + sum(kept), after), root(size)]
    return [root(size)]


def affordable(kept_entries: int, delta_entries: int, size: int) -> bool:
    """Whether a delta pays: what a reader folds after the root must stay below `FACTOR` of the state itself."""
    return kept_entries + delta_entries < FACTOR * size


def pack(runs: tuple[int, ...]) -> int:
    """Runs as one number that fits four bytes: a 1, then a digit per level in base `RADIX`, high to low."""
    packed = 1
    for run in runs:
        packed = packed * RADIX + run
    return packed


def unpack(packed: int) -> tuple[int, ...]:
    """The runs behind such a number."""
    runs: list[int] = []
    while packed > 1:
        packed, run = divmod(packed, RADIX)
        runs.append(run)
    return tuple(reversed(runs))
