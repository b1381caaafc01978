"""The auth graph of a room, from the events' arrays alone: the reference for the chain cover.

It takes about 0.3 kB of memory for each state event; messages are not part of it.
"""

from collections.abc import Collection, Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.database.sql_template import fill
from storage.maintenance.room_events import PART_ROOM_EVENTS

TEMPLATE_AUTH_EDGES: Final[LiteralString] = """
SELECT event_nid, event_id, state_key_nid,
    -- an out-of-band event counts as rejected
    rejected IS NOT NULL OR (outlier AND COALESCE(membership <> 5, false)
        AND :auth_nids.call = '{}') AS rejected,
    :auth_nids.call AS auth_events
FROM {events} AS e
WHERE state_key_nid IS NOT NULL
ORDER BY event_nid
"""

SQL_AUTH_EDGES: Final[LiteralString] = compose(
    fill(
        TEMPLATE_AUTH_EDGES,
        events=PART_ROOM_EVENTS,
    ),
    AUTH_NIDS,
).sql


class EdgesRow(NamedTuple):
    """A state event and its auth events.

    An out-of-band event counts as rejected: it has no position in the chain cover.
    """

    event_nid: int
    event_id: str
    state_key_nid: int
    rejected: bool
    auth_events: list[int]


class AuthGraph:
    """State events and the auth events they name, in both directions."""

    def __init__(self, rows: Iterable[EdgesRow]) -> None:
        self.rows: dict[int, EdgesRow] = {row.event_nid: row for row in rows}
        self.citing: dict[int, list[int]] = {}
        for nid, row in self.rows.items():
            for auth in row.auth_events:
                self.citing.setdefault(auth, []).append(nid)

    def parents(self, nid: int) -> Collection[int]:
        """Return the auth events of a state event; none for any other event."""
        row = self.rows.get(nid)
        return () if row is None else row.auth_events

    def name(self, nid: int) -> str:
        """Return the id of an event, or its nid if it is none of the graph."""
        row = self.rows.get(nid)
        return f"nid {nid}" if row is None else row.event_id

    def chain(self, nids: Iterable[int]) -> set[int]:
        """Return the auth chain of these events, without the events themselves."""
        reached: set[int] = set()
        front = [parent for nid in nids for parent in self.parents(nid)]
        while front:
            nid = front.pop()
            if nid not in reached:
                reached.add(nid)
                front.extend(self.parents(nid))
        return reached

    def reached_by(self, nid: int, state: Collection[int]) -> bool:
        """Return whether some event of a state has this one in its auth chain.

        The search goes up from the event: mostly one of the first that cite it is in the state.
        """
        seen: set[int] = set()
        front = list(self.citing.get(nid, ()))
        while front:
            above = front.pop()
            if above in state:
                return True
            if above not in seen:
                seen.add(above)
                front.extend(self.citing.get(above, ()))
        return False

    def in_order(self) -> list[int]:
        """Return the events, each after its auth events; circles (impossible) are omitted."""
        left = {
            nid: sum(auth in self.rows for auth in row.auth_events)
            for nid, row in self.rows.items()
        }
        free = [nid for nid, count in left.items() if not count]
        ordered: list[int] = []
        while free:
            nid = free.pop()
            ordered.append(nid)
            for above in self.citing.get(nid, ()):
                left[above] -= 1
                if not left[above]:
                    free.append(above)
        return ordered


async def read_auth_graph(conn: Connection, room_nid: int) -> AuthGraph:
    return AuthGraph(await conn.fetch(SQL_AUTH_EDGES, room_nid, row=EdgesRow))
