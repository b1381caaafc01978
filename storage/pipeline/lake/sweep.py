"""Which rooms have changed without a fact that names them.

The table `rooms` of the mirror has the numbers of each room when it was read. The other tables are
at least as far, so a room with the same numbers has changed for none of them.
"""

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.lake.delta_table import LakeTable
from storage.pipeline.lake.room_rows import room_versions

NUMBERS = ["room_nid", "write_version", "removals"]


def swept_rooms(
    conn: ArrowConnection, rooms: LakeTable, *, every: bool
) -> tuple[set[int], set[int]]:
    """Return the rooms to read again, and all rooms that are stored.

    ``every``: read all again.
    """
    stored = {row[0]: row[1:] for row in _tuples(room_versions(conn).select(NUMBERS))}
    if every:
        return set(stored), set(stored)
    known = {row[0]: row[1:] for row in _tuples(rooms.rows(NUMBERS))}
    changed = {nid for nid, numbers in stored.items() if known.get(nid) != numbers}
    return changed, set(stored)


def _tuples(table: object) -> list[tuple[int, ...]]:
    columns = [column.to_pylist() for column in table.columns]  # type: ignore[attr-defined]
    return list(zip(*columns, strict=True))
