"""Which rooms have changed without a fact that names them.

The table `rooms` of the mirror has the numbers of each room when it was read. A table that is at
least as far has seen every change up to these numbers. So a room with the same numbers has not
changed for it since. A table that is not as far, because it was mirrored less often, compares all
rooms.
"""

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.room_rows import room_versions
from storage.pipeline.source.token_bounds import deployment_of
from storage.streams import SyncToken

NUMBERS = ["room_nid", "write_version", "removals"]


def swept_rooms(
    conn: ArrowConnection, rooms: LakeTable, start: SyncToken, *, every: bool
) -> tuple[set[int], set[int]]:
    """Return the rooms to read again for a table at ``start``, and all rooms that are stored.

    ``every``: read all again.
    """
    stored = {row[0]: row[1:] for row in _tuples(room_versions(conn).select(NUMBERS))}
    state = rooms.state()
    if every or state is None or not _token(conn, state.position) <= start:
        return set(stored), set(stored)
    known = {row[0]: row[1:] for row in _tuples(rooms.rows(NUMBERS))}
    changed = {nid for nid, numbers in stored.items() if known.get(nid) != numbers}
    return changed, set(stored)


def _token(conn: ArrowConnection, position: str) -> SyncToken:
    return SyncToken.parse(position, deployment_of(conn))


def _tuples(table: object) -> list[tuple[int, ...]]:
    columns = [column.to_pylist() for column in table.columns]  # type: ignore[attr-defined]
    return list(zip(*columns, strict=True))
