"""Make one row of an event that is stored twice.

Mostly nothing refers to one of the two rows, which is deleted. Where edges or states refer to both,
both are taken out, and the event is appended again with its descendants
(storage/maintenance/repair/reauthorise.py).
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, OWN_ENTRIES, PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.maintenance.purge.removal import delete
from storage.maintenance.verify.doubled import doubled_events

SQL_TWINS: Final[LiteralString] = compose(
    """
WITH
named AS (
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(:prev_nids.call(e) || :auth_nids.call(e)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND (e.outlier OR NOT e.outlier) AND n.event_nid = ANY($2::bigint[])
    UNION
    SELECT x.event_nid
    FROM state_groups g
    CROSS JOIN LATERAL :own_entries.call(g) AS x
    WHERE g.room_nid = $1::int AND x.event_nid = ANY($2::bigint[])
)
SELECT e.event_nid, e.event_nid IN (SELECT event_nid FROM named) AS is_named
FROM events e
WHERE e.event_nid = ANY($2::bigint[]) AND e.room_nid = $1::int
-- the row that the others are copies of
ORDER BY is_named DESC, e.event_nid IN (
    SELECT event_nid FROM memberships WHERE room_nid = $1::int
) DESC, e.outlier, e.stream_ordering, e.event_nid
""",
    PREV_NIDS,
    AUTH_NIDS,
    OWN_ENTRIES,
).sql


class TwinRow(NamedTuple):
    """One row of a doubled event. ``is_named``: an edge or a state refers to it."""

    event_nid: int
    is_named: bool


async def drop_doubled(conn: Connection, room_nid: int) -> set[int]:
    """Delete rows of doubled events to which nothing refers, so that one of each is left.

    Return the rows of events that have several to which something refers. The room must be locked,
    and the derived data be rebuilt afterwards.
    """
    left: set[int] = set()
    for nids in (await doubled_events(conn, room_nid)).values():
        first, *others = await conn.fetch(SQL_TWINS, room_nid, nids, row=TwinRow)
        named = [row.event_nid for row in others if row.is_named]
        if named:
            left |= {first.event_nid, *named}
        gone = [row.event_nid for row in others if not row.is_named]
        await delete(conn, room_nid, gone, gone)
    return left
