"""What another server needs to check an event: the state before it with its auth chain, or the event's own chain whole.

Server-server API, /state_ids and /event_auth. Chains of ids alone are in auth_chain.py.
"""

from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import StateUnknown, UnknownEvent
from storage.ids import EventId
from storage.queries.auth_chain import auth_chain_ids
from storage.queries.events import StoredEvent, StoredRow, stored

SQL_STATE_IDS: Final[LiteralString] = """
SELECT at.state_group_before, e.event_id
FROM events at
LEFT JOIN LATERAL state_entries(at.state_group_before) AS entry ON true
LEFT JOIN events e ON e.event_nid = entry.event_nid
WHERE at.event_id = $1::text
"""

SQL_EVENT_AUTH: Final[LiteralString] = """
WITH RECURSIVE
start AS MATERIALIZED (
    SELECT event_nid, auth_events
    FROM events
    WHERE event_id = $1::text
),
chain (event_nid) AS (
    SELECT unnest(auth_events)
    FROM start
    UNION
    SELECT cited.event_nid
    FROM chain
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(e.auth_events) AS cited (event_nid)
)
SELECT s.*
FROM (SELECT event_nid FROM start UNION ALL SELECT event_nid FROM chain) AS wanted
JOIN stored_events s USING (event_nid)
ORDER BY s.depth, s.event_nid
"""


class StateIdRow(NamedTuple):
    """One event of the state before an event; none for an empty state. An outlier has no state group."""

    state_group_before: int | None
    event_id: str | None


@dataclass(frozen=True, slots=True)
class StateIds:
    """The state before an event, and the union of the auth chains of its events. Server-server API, /state_ids."""

    state_ids: frozenset[EventId]
    auth_chain_ids: frozenset[EventId]


async def state_ids(conn: Connection, event_id: EventId) -> StateIds:
    """The ids of the state before an event and of its auth chain. `UnknownEvent`, `StateUnknown` for an outlier.

    Both never change, so two statements need no common snapshot.
    """
    rows = await conn.fetch(SQL_STATE_IDS, event_id, row=StateIdRow)
    if not rows:
        raise UnknownEvent(event_id)
    if rows[0].state_group_before is None:
        raise StateUnknown(event_id)
    ids = frozenset(EventId(row.event_id) for row in rows if row.event_id is not None)
    return StateIds(ids, frozenset(await auth_chain_ids(conn, ids) if ids else ()))


async def event_auth(conn: Connection, event_id: EventId) -> list[StoredEvent]:
    """The whole auth chain of an event, without itself. Also of rejected events and outliers. `UnknownEvent`."""
    rows = await conn.fetch(SQL_EVENT_AUTH, event_id, row=StoredRow)
    if not rows:
        raise UnknownEvent(event_id)
    return [stored(row) for row in rows if row.event_id != event_id]
