"""Levelled deltas: the ancestors that a new state group keeps, and the entries it writes itself.

A group is read by folding the rows of its path: one root that holds a whole state, then deltas. The
deltas are on levels, each holding at most ``RADIX - 1`` of them. A new group is put on the lowest
level that has room. When a level is full, the new group takes over everything on that level and
below (it is promoted) and drops those rows from its path. So a path has at most ``levels * (RADIX -
1) + 1`` rows, and an entry is written again once per level, not once per group. The counters are
derived from the parent's own path, so forks share nothing that could be contended.

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
FACTOR: Final = 1.0  # the share of the state that a reader may fold besides the root


class DeltaPlacement(NamedTuple):
    """The position of a new group.

    It keeps ``keep`` rows of the parent's path (0: it is a root) and has these ``runs``.
    """

    keep: int
    runs: tuple[int, ...]


def level_count(size: int) -> int:
    """Return the number of levels for a state of this many entries.

    The smallest with ``RADIX ** levels >= size``, 1 to `LEVELS_MAX`.
    """
    levels = 1
    while RADIX**levels < size and levels < LEVELS_MAX:
        levels += 1
    return levels


def root(size: int) -> DeltaPlacement:
    """Return the position of a group that holds its whole state."""
    return DeltaPlacement(0, (0,) * level_count(size))


def candidates(runs: tuple[int, ...], size: int) -> list[DeltaPlacement]:
    """Return the positions for a child of a group with these runs, best first; the last is a root.

    ``size`` is the entry count of the child's state. The caller uses the first one that is
    affordable: see `affordable`.
    """
    runs = (0,) * (level_count(size) - len(runs)) + runs
    for level in range(len(runs) - 1, -1, -1):
        if runs[level] < RADIX - 1:
            kept = runs[: level + 1]
            after = (*kept[:-1], kept[-1] + 1, *(0,) * (len(runs) - level - 1))
            return [DeltaPlacement(1 + sum(kept), after), root(size)]
    return [root(size)]


def affordable(kept_entries: int, delta_entries: int, size: int) -> bool:
    """Return whether a delta is cheap enough.

    The entries that a reader folds after the root must stay below `FACTOR` of the state itself.
    """
    return kept_entries + delta_entries < FACTOR * size


def pack(runs: tuple[int, ...]) -> int:
    """Pack runs into one number that fits four bytes.

    It is a 1, then a digit per level in base `RADIX`, high to low.
    """
    packed = 1
    for run in runs:
        packed = packed * RADIX + run
    return packed


def unpack(packed: int) -> tuple[int, ...]:
    """Unpack the runs of such a number."""
    runs: list[int] = []
    while packed > 1:
        packed, run = divmod(packed, RADIX)
        runs.append(run)
    return tuple(reversed(runs))
