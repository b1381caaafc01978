"""Merges: the latest events of a room with several parents, and whether their states differed.

Only the latest events are looked at (`SCANNED_MAX`), in topological order. Several parents are
always an array: `storage.persist.write.event_edges`.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import EventId, RoomId

SCANNED_MAX: Final = 2_000

SQL_MERGES: Final[LiteralString] = """
SELECT e.event_id, s.name AS sender, e.topological_ordering, e.stream_ordering, e.origin_server_ts,
    cardinality(e.prev_events) AS parents,
    (
        SELECT count(DISTINCT COALESCE(p.state_group_after, p.state_group_before))::int
        FROM events p
        WHERE p.event_nid = ANY(e.prev_events)
    ) AS states
FROM (
    SELECT e.event_id, e.sender_nid, e.topological_ordering, e.stream_ordering, e.origin_server_ts,
        e.prev_events
    FROM events e
    WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text) AND NOT e.outlier
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $2::bigint
) AS e
JOIN principals s ON s.principal_nid = e.sender_nid
WHERE cardinality(e.prev_events) > 1
ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
"""


class MergeRow(NamedTuple):
    """An event with several ``parents``, whose stored ones have so many different ``states``."""

    event_id: EventId
    sender: str
    topological_ordering: int
    stream_ordering: int
    origin_server_ts: int
    parents: int
    states: int


async def merges(conn: Connection, room_id: RoomId) -> list[MergeRow]:
    """Return the merges among the latest events of a room, latest first."""
    return await conn.fetch(SQL_MERGES, room_id, SCANNED_MAX, row=MergeRow)
