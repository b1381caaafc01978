"""Events that authorise another one: the state before it with its auth chain, or its own chain.

Server-server API, /state_ids and /event_auth. auth_chain.py has the chains of ids alone.
"""

from dataclasses import dataclass
from typing import Final, LiteralString

from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import UnknownEvent
from storage.ids import EventId
from storage.queries.auth_chain import state_and_chain_ids
from storage.queries.events import StoredEvent, StoredEventRow, stored
from storage.queries.state_at import event_nids_before

SQL_EVENT_AUTH: Final[LiteralString] = compose(
    """
WITH RECURSIVE
start AS MATERIALIZED (
    SELECT event_nid, room_nid, :auth_nids.call AS auth_events
    FROM events
    WHERE event_id = $1::text
),
-- within the room: a refused event may cite events of other rooms, which its sender may not get
chain (event_nid) AS (
    SELECT unnest(auth_events)
    FROM start
    UNION
    SELECT cited.event_nid
    FROM chain
    CROSS JOIN start
    CROSS JOIN LATERAL (
        SELECT * FROM events
        WHERE event_nid = chain.event_nid AND room_nid + 0 = start.room_nid OFFSET 0
    ) AS e
    CROSS JOIN unnest(:auth_nids.call(e)) AS cited (event_nid)
)
SELECT s.*
FROM start
CROSS JOIN LATERAL (SELECT start.event_nid UNION ALL SELECT event_nid FROM chain) AS wanted
-- one by one: the planner expects a long chain, and would read all rooms
CROSS JOIN LATERAL (
    SELECT s.*
    FROM events e
    JOIN stored_events s USING (event_nid)
    WHERE e.event_nid = wanted.event_nid AND e.room_nid = start.room_nid
    OFFSET 0
) AS s
ORDER BY s.depth, s.event_nid
""",
    AUTH_NIDS,
).sql


@dataclass(frozen=True, slots=True)
class StateIds:
    """The state before an event, and the union of the auth chains of its events.

    Server-server API, /state_ids.
    """

    state_ids: frozenset[EventId]
    auth_chain_ids: frozenset[EventId]


async def state_ids(conn: Connection, event_id: EventId) -> StateIds:
    """Return the ids of the state before an event, and of its auth chain.

    `UnknownEvent`, `StateUnknown` for an outlier.

    Both never change, so two statements need no common snapshot.
    """
    return StateIds(*await state_and_chain_ids(conn, await event_nids_before(conn, event_id)))


async def event_auth(conn: Connection, event_id: EventId) -> list[StoredEvent]:
    """Return the whole auth chain of an event, without itself.

    Also of rejected events and outliers. `UnknownEvent`.
    """
    rows = await conn.fetch(SQL_EVENT_AUTH, event_id, row=StoredEventRow)
    if not rows:
        raise UnknownEvent(event_id)
    return [stored(row) for row in rows if row.event_id != event_id]
