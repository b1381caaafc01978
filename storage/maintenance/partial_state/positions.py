"""Put back the positions that readers know, and publish the changes of a completion.

Events that were in the timeline keep their positions in the stream, and the state deltas that were
written for them stay. Then a token from before the completion is still right. The difference
between the current state before and after is written as state deltas at one new position. So a sync
from before gets all of it once. An event that is accepted only now has a new position: clients get
it like any new event.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill, transposed
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.ids import EventId, UserId
from storage.maintenance.repair.reauthorise import (
    SQL_TAKEN,
    EventEdgesRow,
    RemovedEvents,
    TakenRow,
    dependent,
    event_of,
)
from storage.maintenance.room_states import PART_AUTHORISED_EVENTS
from storage.persist.model.incoming import IncomingEvent
from storage.queries.state_at import states_at
from storage.streams.invalidate_caches import INSTANCE_NAME

SQL_TIMELINE: Final[LiteralString] = """
SELECT event_nid, stream_ordering, arrival_ordering, in_order_ts, topological_ordering, writer_nid,
    rejected IS NULL AND NOT soft_failed AS was_shown
FROM events
WHERE event_nid = ANY($1::bigint[]) AND NOT outlier
"""

SQL_CURRENT: Final[LiteralString] = """
SELECT state_key_nid, event_nid
FROM current_state
WHERE room_nid = $1::int
"""

SQL_MEMBERSHIPS: Final[LiteralString] = """
SELECT principal_nid, stream_ordering, event_nid, writer_nid, membership, forgotten
FROM memberships
WHERE room_nid = $1::int
"""

SQL_REORDERED: Final[LiteralString] = """
SELECT moves, event_nid, topological_before
FROM reordered_events
WHERE room_nid = $1::int
"""

SQL_BOUNDS: Final[LiteralString] = """
SELECT nextval('events_stream') AS last_position, moves, max_topological_ordering
FROM rooms
WHERE room_nid = $1::int
"""

SQL_PUT_BACK: Final[LiteralString] = """
WITH
event AS (
    UPDATE events e
    SET stream_ordering = i.stream_ordering,
        arrival_ordering = i.arrival_ordering,
        in_order_ts = i.in_order_ts,
        writer_nid = i.writer_nid
    FROM unnest($2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::smallint[],
        $7::boolean[])
        AS i (event_nid, stream_ordering, arrival_ordering, in_order_ts, writer_nid, was_shown)
    WHERE e.event_nid = i.event_nid AND NOT e.outlier
        -- an event that is accepted only now is new
        AND (i.was_shown OR e.backfilled OR e.soft_failed OR e.rejected IS NOT NULL)
),
delta AS (
    DELETE FROM state_deltas
    WHERE room_nid = $1::int AND stream_ordering > $8::bigint
),
moved AS (
    DELETE FROM reordered_events
    WHERE room_nid = $1::int
)
UPDATE rooms
SET max_topological_ordering = GREATEST(max_topological_ordering, $9::bigint)
WHERE room_nid = $1::int
"""

SQL_RESTORE_ORDER: Final[LiteralString] = """
WITH
kept AS (
    INSERT INTO reordered_events (room_nid, moves, event_nid, topological_before)
    SELECT $1::int, *
    FROM unnest($3::bigint[], $4::bigint[], $5::bigint[])
),
-- a reader's token may be from before: these events are now at another position
moved AS (
    INSERT INTO reordered_events (room_nid, moves, event_nid, topological_before)
    SELECT $1::int, $2::bigint + 1, i.event_nid, i.topological_before
    FROM unnest($6::bigint[], $7::bigint[]) AS i (event_nid, topological_before)
    JOIN events e USING (event_nid)
    WHERE e.topological_ordering <> i.topological_before
    RETURNING event_nid
)
UPDATE rooms
SET moves = $2::bigint + (SELECT count(*) > 0 FROM moved)::int
WHERE room_nid = $1::int
"""

# an event with a new position arrived, for clients, after its children and after its parents
SQL_SET_AFTER_GAP: Final[LiteralString] = compose(
    """
UPDATE events e
SET after_gap = NULLIF(correct.is_after_gap, false)
FROM (
    SELECT x.event_nid, EXISTS (
        SELECT
        FROM unnest(:prev_nids.call(x)) AS n (event_nid)
        LEFT JOIN events p ON p.event_nid = n.event_nid AND p.room_nid = x.room_nid
            AND p.stream_ordering < x.stream_ordering
        WHERE p.event_nid IS NULL
    ) AS is_after_gap
    FROM events x
    WHERE x.event_nid = ANY($1::bigint[]) AND NOT x.outlier AND NOT x.backfilled
) AS correct
WHERE e.event_nid = correct.event_nid
    AND COALESCE(e.after_gap, false) <> correct.is_after_gap
""",
    PREV_NIDS,
).sql

SQL_PUBLISH: Final[LiteralString] = """
WITH
fact AS MATERIALIZED (
    SELECT nextval('events_stream') AS stream_id, w.writer_nid
    FROM writers w
    WHERE w.instance_name = $2::text
),
delta AS (
    INSERT INTO state_deltas (stream_ordering, event_nid, prev_event_nid, room_nid, state_key_nid,
        writer_nid)
    SELECT f.stream_id, c.event_nid, o.event_nid, $1::int, state_key_nid, f.writer_nid
    FROM fact f
    CROSS JOIN (
        (SELECT state_key_nid, event_nid FROM current_state WHERE room_nid = $1::int) AS c
        FULL JOIN unnest($4::int[], $5::bigint[]) AS o (state_key_nid, event_nid)
            USING (state_key_nid)
    )
    WHERE c.event_nid IS DISTINCT FROM o.event_nid
),
published AS (  -- the fact of the stream: it wakes the syncs of the room
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT stream_id, $3::bigint, writer_nid
    FROM fact
),
room AS (
    UPDATE rooms
    SET last_stream_ordering = fact.stream_id,
        completed_at = fact.stream_id
    FROM fact
    WHERE room_nid = $1::int
),
set_position AS (
    UPDATE stream_positions p
    SET stream_id = GREATEST(p.stream_id, fact.stream_id)
    FROM fact
    WHERE p.stream_name = 'events' AND p.instance_name = $2::text
)
SELECT stream_id
FROM fact
"""

SQL_SET_MEMBERSHIPS: Final[LiteralString] = """
WITH
old AS MATERIALIZED (
    SELECT *
    FROM unnest($4::int[], $5::bigint[], $6::bigint[], $7::smallint[], $8::smallint[],
        $9::boolean[])
        AS i (principal_nid, stream_ordering, event_nid, writer_nid, membership, forgotten)
),
writer AS (
    SELECT writer_nid FROM writers WHERE instance_name = $3::text
),
kept AS (
    UPDATE memberships m
    SET stream_ordering = o.stream_ordering,
        writer_nid = o.writer_nid,
        forgotten = o.forgotten
    FROM old o
    WHERE m.room_nid = $1::int AND m.principal_nid = o.principal_nid
        AND (m.event_nid, m.membership) = (o.event_nid, o.membership)
    RETURNING m.principal_nid
),
changed AS (
    UPDATE memberships m
    SET stream_ordering = $2::bigint,
        writer_nid = writer.writer_nid
    FROM writer
    WHERE m.room_nid = $1::int AND NOT EXISTS (SELECT FROM old o
        WHERE o.principal_nid = m.principal_nid
            AND (m.event_nid, m.membership) = (o.event_nid, o.membership))
    RETURNING m.principal_nid
),
ended AS (
    INSERT INTO memberships (stream_ordering, event_nid, principal_nid, room_nid, writer_nid,
        membership, forgotten)
    SELECT CASE WHEN o.event_nid = 0 THEN o.stream_ordering ELSE $2::bigint END, 0,
        o.principal_nid, $1::int, writer.writer_nid, 0, false
    FROM old o
    CROSS JOIN writer
    WHERE NOT EXISTS (SELECT FROM memberships m
        WHERE m.room_nid = $1::int AND m.principal_nid = o.principal_nid)
    RETURNING principal_nid
)
SELECT p.name
FROM (SELECT principal_nid FROM changed UNION SELECT principal_nid FROM ended) AS c
JOIN principals p USING (principal_nid)
"""


class TimelinePositionRow(NamedTuple):
    """The positions of an event, and whether clients could see it."""

    event_nid: int
    stream_ordering: int
    arrival_ordering: int | None
    in_order_ts: int | None
    topological_ordering: int
    writer_nid: int
    was_shown: bool


class EntryBeforeRow(NamedTuple):
    """An entry of the current state."""

    state_key_nid: int
    event_nid: int


class MembershipBeforeRow(NamedTuple):
    """The membership of a local user."""

    principal_nid: int
    stream_ordering: int
    event_nid: int
    writer_nid: int
    membership: int
    forgotten: bool


class ReorderedBeforeRow(NamedTuple):
    """An event that was moved in the topological order."""

    moves: int
    event_nid: int
    topological_before: int


class BoundsRow(NamedTuple):
    """The last position before a completion, and the room's counters."""

    last_position: int
    moves: int
    max_topological_ordering: int


class KnownToReaders(NamedTuple):
    """The state of a room before a completion, as readers know it."""

    events: Sequence[TimelinePositionRow]
    current: Mapping[int, int]
    memberships: Sequence[MembershipBeforeRow]
    reordered: Sequence[ReorderedBeforeRow]
    bounds: BoundsRow


async def known_to_readers(
    conn: Connection, room_nid: int, event_nids: Sequence[int]
) -> KnownToReaders:
    """Return the input of `put_back`; the room is locked and unchanged."""
    bounds = await conn.fetchrow(SQL_BOUNDS, room_nid, row=BoundsRow)
    if bounds is None:
        raise StorageCorrupt("a locked room is gone", room_nid=room_nid)
    return KnownToReaders(
        await conn.fetch(SQL_TIMELINE, list(event_nids), row=TimelinePositionRow),
        dict(await conn.fetch(SQL_CURRENT, room_nid, row=EntryBeforeRow)),
        await conn.fetch(SQL_MEMBERSHIPS, room_nid, row=MembershipBeforeRow),
        await conn.fetch(SQL_REORDERED, room_nid, row=ReorderedBeforeRow),
        bounds,
    )


async def put_back(conn: Connection, room_nid: int, known: KnownToReaders) -> None:
    """Give the events stored again the positions that they had."""
    rows = ((*row[:4], row.writer_nid, row.was_shown) for row in known.events)
    bounds = known.bounds
    await conn.execute(
        SQL_PUT_BACK,
        room_nid,
        *transposed(rows, 6),
        bounds.last_position,
        bounds.max_topological_ordering,
    )
    await conn.execute(SQL_SET_AFTER_GAP, [row.event_nid for row in known.events])
    orders = ((row.event_nid, row.topological_ordering) for row in known.events)
    await conn.execute(
        SQL_RESTORE_ORDER,
        room_nid,
        bounds.moves,
        *transposed(known.reordered, 3),
        *transposed(orders, 2),
    )


async def publish(
    conn: Connection, room_nid: int, join_nid: int, known: KnownToReaders
) -> list[UserId]:
    """Write the difference of the current state at a new position.

    Return the local users whose membership changed.
    """
    position = await conn.fetchval(
        SQL_PUBLISH,
        room_nid,
        INSTANCE_NAME,
        join_nid,
        list(known.current),
        list(known.current.values()),
    )
    names = await conn.fetchvals(
        SQL_SET_MEMBERSHIPS,
        room_nid,
        position,
        INSTANCE_NAME,
        *transposed(known.memberships, 6),
    )
    return [UserId(name) for name in names]


# --------------------------------------------------------------------------------------------------
# The events that a completion stores again: the join, and all that arrived after it.
#
# They are stored again in the order in which they arrived, so that the result is that of a join
# with the whole state. An event that was an outlier when others cited it, and entered the timeline
# later, is stored as an outlier first:
#
#     arrived         outlier A; message M, which cites A; then A in the timeline
#     stored again    A as an outlier, M, A in the timeline
#
# An event of an earlier stay is among them if it cites, over auth events, one that arrived after
# the join. It keeps the result of the check against the current state: that state has changed
# since.

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
