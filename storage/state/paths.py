"""The path of a state group in bytes, for its row.

The path is stored as differences to the group's own number, all of one width::

    1 byte    the width of a difference, 1 to 4; plus 8 if the beginning is left out
    n x width the differences, big-endian, in the order of the path, without the group itself (0)

Seven groups of eight are on the low level. Their paths are equal up
to the last row before that level, which is never on the low level. Only that row has the beginning,
so the others store it as their first difference, and then the rows of the low level.

Worked example: R and c are above the low level, d, e and f are on it. Their numbers are 1, 30, 31,
35 and 36::

    path of c    R c            01 1d             30 - 1
    path of f    R c d e f      09 06 05 01       36 - 30, 36 - 31, 36 - 35

A group whose number is lower than one of its path, or much higher, stores the whole path as an
array (``back``). The numbers of one process grow, but several may write to a room.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

# --------------------------------------------------------------------------------------------------
# Levelled deltas: the ancestors that a new state group keeps, and the entries it writes itself.
#
# A group is read by folding the rows of its path: one root that holds a whole state, then deltas.
# The deltas are on levels, each holding at most ``RADIX - 1`` of them. A new group is put on the
# lowest level that has room. When a level is full, the new group takes over everything on that
# level and below (it is promoted) and drops those rows from its path. So a path has at most
# ``levels * (RADIX - 1) + 1`` rows, and an entry is written again once per level, not once per
# group. The counters are derived from the parent's own path, so forks share nothing that could be
# contended.
#
# Worked example with radix 3 and two levels, one key changed at a time (root R; runs high, low)::
#
#     R          (0, 0)
#     R a        (0, 1)
#     R a b      (0, 2)
#     R c        (1, 0)      c = a and b folded, and its own change
#     R c d      (1, 1)
#
# The idea is that of a radix-RADIX counter, as log-structured merge trees use it.

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


HAS_BASE: Final = 8
"""Flag of the first byte: the first difference is that of the row which has the beginning."""
_WIDTH: Final = 7
FARTHEST: Final = 2**31 - 1


class StoredPath(Protocol):
    """The columns of a row that have its path."""

    @property
    def back(self) -> Sequence[int] | None:
        """The whole path as differences, or None."""

    @property
    def path(self) -> bytes | None:
        """The path in bytes, or None."""


class PathColumns(NamedTuple):
    """The path of a group as one of two columns."""

    back: list[int] | None
    path: bytes | None


def path_columns(path: Sequence[int], low_run: int) -> PathColumns:
    """Return the columns for a path, root first and the group itself last.

    ``low_run``: how many of its last groups are on the low level.
    """
    state_group = path[-1]
    has_base = low_run > 0
    distances = [state_group - part for part in path[-low_run - 1 if has_base else 0 : -1]]
    if not all(0 < distance <= FARTHEST for distance in distances):
        return PathColumns([state_group - part for part in path], None)
    width = max(1, (max(distances, default=0).bit_length() + 7) // 8)
    first = width | HAS_BASE if has_base else width
    return PathColumns(
        None, bytes((first,)) + b"".join(distance.to_bytes(width, "big") for distance in distances)
    )


def has_base(path: bytes) -> bool:
    """Return whether the beginning of a path is left out."""
    return path[0] & HAS_BASE != 0


def path_of(state_group: int, row: StoredPath, rows: Mapping[int, StoredPath]) -> list[int]:
    """Return the groups to fold for a group with this row: root first, the group itself last.

    ``rows``: by number, with the row that has the beginning. Where that is missing, the path begins
    with its number.
    """
    if row.path is None:
        return [state_group - distance for distance in row.back or ()]
    width = row.path[0] & _WIDTH
    distances = (
        row.path[1:]
        if width == 1
        else [
            int.from_bytes(row.path[at : at + width], "big")
            for at in range(1, len(row.path), width)
        ]
    )
    path = [state_group - distance for distance in distances]
    path.append(state_group)
    if has_base(row.path) and (base := rows.get(path[0])) is not None:
        return path_of(path[0], base, rows)[:-1] + path
    return path
