"""The events that a completion stores again: the join, and all that arrived after it.

They are stored again in the order in which they arrived, so that the result is that of a join with
the whole state. An event that was an outlier when others cited it, and entered the timeline later,
is stored as an outlier first:

    arrived         outlier A; message M, which cites A; then A in the timeline
    stored again    A as an outlier, M, A in the timeline

An event of an earlier stay is among them if it cites, over auth events, one that arrived after the
join. It keeps the result of the check against the current state: that state has changed since.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.database.sql_template import fill
from storage.event import Event
from storage.ids import EventId
from storage.maintenance.repair.reauthorise import (
    SQL_TAKEN,
    EventEdgesRow,
    RemovedEvents,
    TakenRow,
    dependent,
    event_of,
)
from storage.maintenance.room_events import PART_AUTHORISED_EVENTS
from storage.persist.model.incoming import IncomingEvent
from storage.queries.state_at import states_at

TEMPLATE_CITED: Final[LiteralString] = """
SELECT event_nid, event_id, rejected IS NOT NULL AS is_rejected, :auth_nids.call AS named
FROM {events} AS e
"""

SQL_CITED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_CITED,
        events=PART_AUTHORISED_EVENTS,
    ),
    AUTH_NIDS,
).sql

TEMPLATE_IS_CITED: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM {events} AS e
    CROSS JOIN unnest(:auth_nids.call) AS cited (event_nid)
    WHERE cited.event_nid = ANY($2::bigint[]) AND e.event_nid <> ALL($2::bigint[])
)
"""

SQL_IS_CITED: Final[LiteralString] = compose(
    fill(
        TEMPLATE_IS_CITED,
        events=PART_AUTHORISED_EVENTS,
    ),
    AUTH_NIDS,
).sql

SQL_ARRIVED_SINCE: Final[LiteralString] = """
SELECT e.event_nid
FROM events e
JOIN events joined ON joined.event_nid = $2::bigint
WHERE e.room_nid = $1::int AND e.stream_ordering >= joined.stream_ordering
"""

States = Mapping[str, tuple[EventId, ...]]


class EventsToReplay(NamedTuple):
    """The rows of the events, and the events in the order in which they are stored again."""

    rows: Sequence[TakenRow]
    removed: RemovedEvents

    def with_auth_events(self, event_ids: Iterable[str]) -> frozenset[int]:
        """Return the nids of these events, and of those that they cite, as far as they are here."""
        events = {one.event.event_id: one.event for one in self.removed.incoming}
        found, front = set[str](), list(event_ids)
        while front:
            event_id = front.pop()
            if event_id in events and event_id not in found:
                found.add(event_id)
                front.extend(_cited(events[EventId(event_id)]))
        return frozenset(self.removed.rows[EventId(one)].event_nid for one in found)


async def replayed(
    conn: Connection, room_nid: int, version: str, join_nid: int, state: Sequence[EventId]
) -> EventsToReplay:
    """Return the events to store again; ``state``: the whole state before the join."""
    arrived = await conn.fetchvals(SQL_ARRIVED_SINCE, room_nid, join_nid)
    again = await _with_dependent(conn, room_nid, arrived)
    rows = await conn.fetch(SQL_TAKEN, sorted(again), row=TakenRow)
    given = [row for row in rows if row.is_undetermined and row.event_nid != join_nid]
    found = await states_at(conn, [EventId(row.event_id) for row in given], after=False)
    states: dict[str, tuple[EventId, ...]] = {
        event_id: tuple(sorted(one.values())) for event_id, one in found.items()
    }
    states |= {row.event_id: tuple(state) for row in rows if row.event_nid == join_nid}
    return EventsToReplay(rows, _in_order(rows, version, states, frozenset(arrived)))


async def _with_dependent(conn: Connection, room_nid: int, arrived: Sequence[int]) -> set[int]:
    """Return the events that arrived, and all others that cite one of them over auth events.

    Mostly there are no others, and then the auth events of the room are not loaded.
    """
    if not await conn.fetchval(SQL_IS_CITED, room_nid, arrived):
        return set(arrived)
    cited = await conn.fetch(SQL_CITED, room_nid, row=EventEdgesRow)
    return dependent(cited, set(arrived))


def _in_order(
    rows: Sequence[TakenRow], version: str, states: States, arrived: frozenset[int]
) -> RemovedEvents:
    """Return the events in the order of their arrival, each after the events that it needs."""
    events = {row.event_id: event_of(row, version) for row in rows}
    removed = RemovedEvents(rows={EventId(row.event_id): row for row in rows})
    known = set[str]()

    def store(event: Event, *, is_placed: bool) -> None:
        row, state = removed.rows[event.event_id], states.get(event.event_id)
        known.add(event.event_id)
        for needed in [*_cited(event), *(state or ())]:
            if needed in events and needed not in known:
                store(events[needed], is_placed=False)
        origin = row.origin if is_placed else "outlier"
        one = IncomingEvent(event, origin)
        removed.incoming.append(_as_placed(one, row, state, arrived) if is_placed else one)

    for row in sorted(rows, key=_arrival):
        if not row.outlier or row.event_id not in known:
            store(events[row.event_id], is_placed=not row.outlier)
    return removed


def _as_placed(
    one: IncomingEvent, row: TakenRow, state: tuple[EventId, ...] | None, arrived: frozenset[int]
) -> IncomingEvent:
    """Return an event of the timeline with the facts that its bytes do not say."""
    is_settled = row.event_nid not in arrived and row.refused is None
    return one._replace(
        state_before=state if row.is_undetermined else None,
        refused=row.refused,
        soft_failed=row.soft_failed if is_settled else None,
    )


def _cited(event: Event) -> list[EventId]:
    """Return the auth events, with the create event that the room id names."""
    if event.room_version.create_room_id and event.type != "m.room.create":
        return [*event.auth_event_ids, EventId("$" + event.room_id[1:])]
    return list(event.auth_event_ids)


def _arrival(row: TakenRow) -> tuple[bool, int]:
    """Return the sort key: the position; outliers that no other event needs come last."""
    return row.arrival is None, row.arrival or row.event_nid
