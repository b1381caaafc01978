"""Which rooms have changed without a fact that names them.

The table `rooms` of the mirror has the numbers of each room when it was read. A table that is at
least as far has seen every change up to these numbers. So a room with the same numbers has not
changed for it since. A table that is not as far, because it was mirrored less often, compares all
rooms.

Rooms are compared in pieces by their numbers. Of all rooms, memory has a byte each, no more.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.room_rows import room_versions
from storage.pipeline.source.filled_ranges import SQL_FIRST_ROOM, filled
from storage.pipeline.source.filters import room_numbers
from storage.pipeline.source.token_bounds import deployment_of
from storage.streams import SyncToken

NUMBERS: Final = ["room_nid", "write_version", "removals"]
RoomNumbers = npt.NDArray[np.int64]
PIECE: Final = 50_000
"""Rooms that are compared at a time."""


def swept_rooms(
    conn: ArrowConnection, rooms: LakeTable, start: SyncToken, *, every: bool
) -> Iterator[RoomNumbers]:
    """Yield the stored rooms to read again for a table at ``start``, piece by piece.

    ``every``: read all again.
    """
    state = rooms.state()
    all_again = every or state is None or not _token(conn, state.position) <= start
    for piece, stored in _pieces(conn):
        if all_again:
            yield stored.column("room_nid").to_numpy()
        else:
            known = rooms.within(NUMBERS, piece.start, piece.stop - 1)
            yield _differing(stored, known, piece).column("room_nid").to_numpy()


def gone_rooms(conn: ArrowConnection, lake: LakeTable) -> set[int]:
    """Return the rooms of a table that are not stored any more."""
    first, last = room_numbers(conn)
    is_stored = np.zeros(last - first + 1, dtype=np.bool_)
    for _, stored in _pieces(conn):
        is_stored[stored.column("room_nid").to_numpy() - first] = True
    found: set[int] = set()
    for part in lake.parts(["room_nid"]):
        numbers = np.unique(part.column("room_nid").to_numpy())
        known = (numbers >= first) & (numbers <= last)
        known[known] = is_stored[numbers[known] - first]
        found.update(numbers[~known].tolist())
    return found


def _pieces(conn: ArrowConnection) -> Iterator[tuple[range, pa.Table]]:
    """Yield ranges of numbers of rooms, with the numbers of their rooms."""
    first, last = room_numbers(conn)
    for low, high in filled(conn, SQL_FIRST_ROOM, first, last + 1, PIECE):
        piece = range(low, high)
        yield piece, room_versions(conn, piece)


def _differing(stored: pa.Table, known: pa.Table, piece: range) -> pa.Table:
    """Return the stored rooms of a piece that are not known with the same numbers."""
    ours, theirs = (
        np.column_stack([column.to_numpy() for column in one.select(NUMBERS).columns])
        for one in (known, stored)
    )
    numbers = np.full((len(piece), 2), -1, dtype=np.int64)  # no number of a room is negative
    numbers[ours[:, 0] - piece.start] = ours[:, 1:]
    differing = (numbers[theirs[:, 0] - piece.start] != theirs[:, 1:]).any(axis=1)
    return stored.filter(pa.array(differing))


def _token(conn: ArrowConnection, position: str) -> SyncToken:
    return SyncToken.parse(position, deployment_of(conn))
