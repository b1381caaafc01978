"""Find events that are stored twice.

The index of event ids is not unique. A write looks for its events, and the writers of a room take
turns, so no event is stored twice, unless the index did not find it then: it was damaged.
"""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.event_columns import SQL_NIDS
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import BATCH, VerifiedRoom

SQL_DOUBLED: Final[LiteralString] = """
SELECT e.event_id, array_agg(other.event_nid ORDER BY other.event_nid) AS event_nids
FROM unnest($1::bigint[]) AS n (event_nid)
CROSS JOIN LATERAL (SELECT event_id FROM events WHERE event_nid = n.event_nid OFFSET 0) AS e
CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = e.event_id OFFSET 0) AS other
GROUP BY n.event_nid, e.event_id
HAVING count(*) > 1
"""


class DoubledRow(NamedTuple):
    """An event id, and the rows that have it."""

    event_id: str
    event_nids: list[int]


async def check_doubled(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that no event of the room is stored twice ("doubled_events")."""
    for event_id, nids in (await doubled_events(conn, room.nid)).items():
        found = f"stored {_times(len(nids))}: nids {', '.join(map(str, nids))}"
        yield room.finding("doubled_events", [event_id], found, "stored once")


async def doubled_events(conn: Connection, room_nid: int) -> dict[str, list[int]]:
    """Return the ids that several rows have, one of them in this room, with these rows."""
    nids: list[int] = await conn.fetchvals(SQL_NIDS, room_nid)
    found: dict[str, list[int]] = {}
    for start in range(0, len(nids), BATCH):
        rows = await conn.fetch(SQL_DOUBLED, nids[start : start + BATCH], row=DoubledRow)
        found.update((row.event_id, row.event_nids) for row in rows)
    return found


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"
