"""The path of a state group in bytes, for its row.

The path is stored as differences to the group's own number, all of one width::

    1 byte    the width of a difference, 1 to 4; plus 8 if the beginning is left out
    n x width the differences, big-endian, in the order of the path, without the group itself (0)

Seven groups of eight are on the low level (`storage.state.delta_levels`). Their paths are equal up
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
    if not all(0 < one <= FARTHEST for one in distances):
        return PathColumns([state_group - part for part in path], None)
    width = max(1, (max(distances, default=0).bit_length() + 7) // 8)
    first = width | HAS_BASE if has_base else width
    return PathColumns(
        None, bytes((first,)) + b"".join(one.to_bytes(width, "big") for one in distances)
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
        return [state_group - one for one in row.back or ()]
    width = row.path[0] & _WIDTH
    distances = (
        row.path[1:]
        if width == 1
        else [
            int.from_bytes(row.path[at : at + width], "big")
            for at in range(1, len(row.path), width)
        ]
    )
    path = [state_group - one for one in distances]
    path.append(state_group)
    if has_base(row.path) and (base := rows.get(path[0])) is not None:
        return path_of(path[0], base, rows)[:-1] + path
    return path
