"""Which rooms have changed without a fact that names them.

The table `rooms` of the mirror has the numbers of each room when it was read. A table that is at
least as far has seen every change up to these numbers. So a room with the same numbers has not
changed for it since. A table that is not as far, because it was mirrored less often, compares all
rooms.

Rooms are compared in pieces by their numbers.
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.room_rows import room_versions
from storage.pipeline.source.filters import room_numbers
from storage.pipeline.source.token_bounds import deployment_of
from storage.streams import SyncToken

NUMBERS: Final = ["room_nid", "write_version", "removals"]
PIECE: Final = 50_000
"""Rooms that are compared at a time."""


def swept_rooms(
    conn: ArrowConnection, rooms: LakeTable, start: SyncToken, *, every: bool
) -> set[int]:
    """Return the stored rooms to read again for a table at ``start``. ``every``: read all again."""
    state = rooms.state()
    all_again = every or state is None or not _token(conn, state.position) <= start
    found: set[int] = set()
    first, last = room_numbers(conn)
    for low in range(first, last + 1, PIECE):
        piece = range(low, min(low + PIECE, last + 1))
        stored = room_versions(conn, piece)
        if not all_again:
            stored = _differing(stored, rooms.rows(NUMBERS, piece), piece)
        found.update(stored.column("room_nid").to_pylist())
    return found


def gone_rooms(conn: ArrowConnection, lake: LakeTable) -> set[int]:
    """Return the rooms of a table that are not stored any more."""
    seen = [pc.unique(part.column(0)) for part in lake.parts(["room_nid"])]
    numbers = pc.unique(pa.concat_arrays([pa.array([], pa.int64()), *seen])).sort()
    found: set[int] = set()
    for at in range(0, len(numbers), PIECE):
        piece = numbers.slice(at, PIECE)
        stored = room_versions(conn, range(piece[0].as_py(), piece[-1].as_py() + 1))
        known = pc.is_in(piece, value_set=stored.column("room_nid"))
        found.update(piece.filter(pc.invert(known)).to_pylist())
    return found


def _differing(stored: pa.Table, known: pa.Table, piece: range) -> pa.Table:
    """Return the stored rooms of a piece that are not known with the same numbers."""
    ours, theirs = (
        np.column_stack([column.to_numpy() for column in one.select(NUMBERS).columns])
        for one in (known, stored)
    )
    ours = ours[(ours[:, 0] >= piece.start) & (ours[:, 0] < piece.stop)]
    numbers = np.full((len(piece), 2), -1, dtype=np.int64)  # no number of a room is negative
    numbers[ours[:, 0] - piece.start] = ours[:, 1:]
    differing = (numbers[theirs[:, 0] - piece.start] != theirs[:, 1:]).any(axis=1)
    return stored.filter(pa.array(differing))


def _token(conn: ArrowConnection, position: str) -> SyncToken:
    return SyncToken.parse(position, deployment_of(conn))
