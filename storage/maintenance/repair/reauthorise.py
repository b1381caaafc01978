"""Authorise again the events that were wrongly rejected, or read by another room's version.

Such an event is taken out of the room with all its descendants, by prev_events or auth_events. The
derived data of the rest is rebuilt. Then the events are appended again with
`storage.persist.plan.event`, from the same bytes and in the order in which they were stored. All of
this is one transaction: a repair that fails changes nothing.

An event keeps its nid and its time of receipt. It gets a new position in its stream, so that
clients receive it in their next sync. Where an accepted event was taken out as well, syncs from
before it start from the beginning (`purged_streams`), as after a purge.

  create <- join <- levels <- message      the join was rejected, and so were levels and message:
                                           three events are appended again

A store of an earlier release read all events of a batch by the version of its first create event.
Then the event id may be wrong as well: the event gets its correct id, and a new nid.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.columns import AUTH_NIDS, OWN_ENTRIES, PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill, transposed
from storage.errors import InvalidEvent, StorageCorrupt
from storage.event import Event, load, parse
from storage.event.model import auth_ids_of
from storage.ids import EventId
from storage.maintenance.purge.removal import delete
from storage.maintenance.repair.replay import new_caches
from storage.maintenance.room_states import PART_AUTHORISED_EVENTS
from storage.maintenance.verify.auth_results import wrongly_rejected
from storage.maintenance.verify.event_loader import VerifiedRoom, version_of_id
from storage.persist.load.on_demand import load as load_needs
from storage.persist.load.prefetch import prefetch
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.results import AppendResult, Origin
from storage.persist.plan.event import plan_event
from storage.persist.write.all_tables import write
from storage.queries.state_at import states_at
from storage.streams.invalidate_caches import INSTANCE_NAME
from storage.streams.stream_writer import Author

SQL_SET_VERSION: Final[LiteralString] = """
UPDATE rooms
SET room_version = $2::text
WHERE room_nid = $1::int AND room_version <> $2::text
"""

TEMPLATE_GRAPH: Final[LiteralString] = """
SELECT event_nid, event_id, rejected IS NOT NULL AS is_rejected,
    :prev_nids.call || :auth_nids.call AS named
FROM {events} AS e
"""

SQL_GRAPH: Final[LiteralString] = compose(
    fill(
        TEMPLATE_GRAPH,
        events=PART_AUTHORISED_EVENTS,
    ),
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_BYTES: Final[LiteralString] = """
SELECT event_id, json
FROM events
WHERE event_nid = ANY($1::bigint[])
"""

SQL_TAKEN: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.event_id, r.room_id, e.stream_ordering, e.outlier, e.backfilled,
    e.redacted_form, e.encoding, e.received_ts,
    e.rejected IS NULL AS is_accepted, e.json,
    NOT e.outlier AND EXISTS (
        SELECT
        FROM unnest(:prev_nids.call(e)) AS named (event_nid)
        LEFT JOIN events p USING (event_nid)
        WHERE p.stream_ordering IS NULL OR COALESCE(p.arrival_ordering, p.stream_ordering)
            > COALESCE(e.arrival_ordering, e.stream_ordering)
    ) AS is_undetermined,
    e.refused, COALESCE(e.arrival_ordering, e.stream_ordering) AS arrival, e.soft_failed
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid = ANY($1::bigint[])
ORDER BY arrival NULLS FIRST, e.event_nid
""",
    PREV_NIDS,
).sql

SQL_FOLLOW: Final[LiteralString] = """
WITH
delta AS (DELETE FROM state_deltas
    WHERE room_nid = $1::int AND stream_ordering = ANY($3::bigint[])),
moved AS (DELETE FROM reordered_events WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])),
dropped AS (DELETE FROM dropped_extremities
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])),
waiting AS (DELETE FROM waiting_redactions WHERE redaction_nid = ANY($2::bigint[])),
outlier AS (DELETE FROM outlier_memberships WHERE event_nid = ANY($2::bigint[]))
INSERT INTO purged_streams (stream_name, purged_upto)
SELECT 'events', $4::bigint
WHERE $4::bigint IS NOT NULL
ON CONFLICT (stream_name) DO UPDATE SET purged_upto = GREATEST(purged_streams.purged_upto,
    EXCLUDED.purged_upto)
"""

# a state that came with an event may have events that are none of its ancestors
SQL_HOLDING: Final[LiteralString] = compose(
    """
WITH
holding AS (
    SELECT g.state_group
    FROM state_groups g
    CROSS JOIN LATERAL :own_entries.call(g) AS x
    WHERE g.room_nid = $1::int AND x.event_nid = ANY($2::bigint[])
),
used AS (
    SELECT state_group_before AS state_group FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT state_group_after FROM events WHERE room_nid = $1::int AND NOT outlier
),
affected AS (
    SELECT DISTINCT u.state_group
    FROM used u
    CROSS JOIN LATERAL state_path(u.state_group) AS step
    JOIN holding h ON h.state_group = step.part
)
SELECT e.event_nid
FROM events e
WHERE e.room_nid = $1::int AND NOT e.outlier
    AND (e.state_group_before IN (SELECT state_group FROM affected)
        OR e.state_group_after IN (SELECT state_group FROM affected))
""",
    OWN_ENTRIES,
).sql

SQL_DROP_GROUPS: Final[LiteralString] = """
WITH
used AS (
    SELECT state_group_before AS state_group FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT state_group_after FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT current_state_group FROM rooms WHERE room_nid = $1::int
),
needed AS (
    SELECT step.part AS state_group
    FROM used
    CROSS JOIN LATERAL state_path(used.state_group) AS step
)
DELETE FROM state_groups g
WHERE g.room_nid = $1::int AND g.entry_count > 0
    AND NOT EXISTS (SELECT FROM needed n WHERE n.state_group = g.state_group)
"""

SQL_AUTHOR: Final[LiteralString] = """
SELECT w.writer_nid, p.instance_name, p.epoch AS writer_epoch
FROM stream_positions p
JOIN writers w USING (instance_name)
WHERE p.instance_name = $1::text AND p.stream_name IN ('events', 'backfill', 'caches')
ORDER BY p.stream_name
FOR UPDATE OF p  -- keeps others from moving this writer's positions past uncommitted ids
"""

SQL_RECEIVED: Final[LiteralString] = """
UPDATE events e
SET received_ts = i.received_ts, encoding = i.encoding
FROM unnest($1::text[], $2::bigint[], $3::smallint[]) AS i (event_id, received_ts, encoding)
WHERE e.event_id = i.event_id
"""

BATCH: Final = 200  # events written by one statement


class EventEdgesRow(NamedTuple):
    """An event, and the events that it names."""

    event_nid: int
    event_id: str
    is_rejected: bool
    named: list[int]


class EventBytesRow(NamedTuple):
    """An event id with its bytes."""

    event_id: str
    json: StoredBytes


class TakenRow(NamedTuple):
    """An event that is appended again.

    ``is_undetermined``: its stored parents do not determine the state before it.
    """

    event_nid: int
    event_id: str
    room_id: str
    stream_ordering: int | None
    outlier: bool
    backfilled: bool
    redacted_form: bool
    encoding: int
    received_ts: int
    is_accepted: bool
    json: StoredBytes
    is_undetermined: bool
    refused: str | None
    arrival: int | None
    soft_failed: bool

    @property
    def origin(self) -> Origin:
        return "outlier" if self.outlier else "backfill" if self.backfilled else "live"


@dataclass(frozen=True, slots=True)
class RemovedEvents:
    """Events taken out of a room, in the order in which they are appended again.

    ``rows`` is keyed by the ids that the events will have.
    """

    incoming: list[IncomingEvent] = field(default_factory=list)
    rows: dict[EventId, TakenRow] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.incoming)


class CannotReauthoriseError(StorageCorrupt):
    """An event cannot be appended again as it is. Nothing was changed."""


async def take_out(
    conn: Connection, room: VerifiedRoom, damaged: Collection[int] = ()
) -> RemovedEvents:
    """Take out of a room the events that must be authorised again, and set its version.

    ``damaged``: events that must be appended again, too. The room must be locked. Rebuild the
    derived data afterwards.
    """
    changed = room.row.room_version != room.stored_version
    graph = await conn.fetch(SQL_GRAPH, room.nid, row=EventEdgesRow)
    roots = await _all_but_create(conn, room, graph) if changed else await _roots(conn, room, graph)
    roots |= set(damaged)
    if changed:
        await conn.execute(SQL_SET_VERSION, room.nid, room.row.room_version)
    if not roots:
        return RemovedEvents()
    rows = await conn.fetch(
        SQL_TAKEN, sorted(await _affected(conn, room.nid, graph, roots)), row=TakenRow
    )
    taken = _taken(rows, room.row.room_version, await _states(conn, rows))
    await _remove(conn, room.nid, rows)
    return taken


async def _affected(
    conn: Connection, room_nid: int, graph: Sequence[EventEdgesRow], roots: set[int]
) -> set[int]:
    """Return these events, their descendants, and events whose states have one of them."""
    reached = dependent(graph, roots)
    while True:
        holding = await conn.fetchvals(SQL_HOLDING, room_nid, list(reached))
        if reached.issuperset(holding):
            return reached
        reached = dependent(graph, reached.union(holding))


async def drop_groups(conn: Connection, room_nid: int) -> None:
    """Delete the state groups that nothing refers to now: they may name removed events."""
    await conn.execute(SQL_DROP_GROUPS, room_nid)


async def append_again(
    conn: Connection, taken: RemovedEvents, server_name: str, *, extremities_max: int
) -> None:
    """Append the removed events. Raise `CannotReauthoriseError` if one would not be stored.

    The positions of the writer are locked from the first write on: readers wait for them.
    """
    blocks = NidBlocks()
    again = set[EventId]()
    for start in range(0, len(taken.incoming), BATCH):
        change_set = ChangeSet(new_caches(), blocks, server_name, extremities_max=extremities_max)
        change_set.events.reserved.update(
            (event_id, row.event_nid)
            for event_id, row in taken.rows.items()
            if event_id == row.event_id
        )
        batch = taken.incoming[start : start + BATCH]
        await prefetch(partial(load_needs, conn), change_set, batch, assume_new=False)
        for incoming in batch:
            answer = await _planned(conn, change_set, incoming)
            if not answer.is_stored:
                raise CannotReauthoriseError(
                    f"the event would be {answer.outcome} when appended again: {answer.reason}",
                    event_id=incoming.event.event_id,
                )
            if answer.outcome != "duplicate":  # it was appended since, under the right id
                again.add(incoming.event.event_id)
        if change_set.has_changes:
            await write(conn, change_set, await _author(conn), time.time_ns() // 1_000_000)
    received = (
        (event_id, row.received_ts, row.encoding)
        for event_id, row in taken.rows.items()
        if event_id in again
    )
    await conn.execute(SQL_RECEIVED, *transposed(received, 3))


async def _author(conn: Connection) -> Author:
    author = await conn.fetchrow(SQL_AUTHOR, INSTANCE_NAME, row=Author)
    if author is None:
        raise StorageCorrupt("the writer of repairs has no positions", instance_name=INSTANCE_NAME)
    return author


async def _planned(
    conn: Connection, change_set: ChangeSet, incoming: IncomingEvent
) -> AppendResult:
    while True:
        try:
            return plan_event(change_set, incoming)
        except MissingData as needs:
            lacking = needs
        await load_needs(conn, change_set, lacking)


async def _roots(conn: Connection, room: VerifiedRoom, graph: Sequence[EventEdgesRow]) -> set[int]:
    """Return the rejected events that the rules accept, or that have an id of another version."""
    rejected = {row.event_id: row.event_nid for row in graph if row.is_rejected}
    roots = await wrongly_rejected(conn, room)
    if rejected:
        wrong = await _wrong_ids(conn, room, rejected.values())
        roots |= {rejected[event_id] for event_id in wrong}
    return roots


async def _all_but_create(
    conn: Connection, room: VerifiedRoom, graph: Sequence[EventEdgesRow]
) -> set[int]:
    """Return all events, without the create event if its id is right and it is accepted."""
    create = [row for row in graph if row.event_id == room.create_id]
    sound = {
        row.event_nid
        for row in create
        if not row.is_rejected and not await _wrong_ids(conn, room, [row.event_nid])
    }
    return {row.event_nid for row in graph} - sound


async def _wrong_ids(conn: Connection, room: VerifiedRoom, nids: Iterable[int]) -> set[str]:
    """Return those of these events that have the id of another room version."""
    wrong = set[str]()
    every = list(nids)
    for start in range(0, len(every), BATCH):
        for event_id, json in await conn.fetch(
            SQL_BYTES, every[start : start + BATCH], row=EventBytesRow
        ):
            raw = decode(json, event_id, room.row.room_id)
            own = _own_id(raw, room.row.room_version)
            if own not in {None, event_id} and version_of_id(raw, event_id) is not None:
                wrong.add(event_id)
    return wrong


def _own_id(raw: bytes, version: str) -> str | None:
    try:
        return parse(raw, version).event_id
    except InvalidEvent:
        return None


def dependent(graph: Sequence[EventEdgesRow], roots: set[int]) -> set[int]:
    naming: dict[int, list[int]] = {}
    for row in graph:
        for nid in row.named:
            naming.setdefault(nid, []).append(row.event_nid)
    reached, front = set(roots), list(roots)
    while front:
        for nid in naming.get(front.pop(), ()):
            if nid not in reached:
                reached.add(nid)
                front.append(nid)
    return reached


async def _states(conn: Connection, rows: Sequence[TakenRow]) -> Mapping[str, tuple[EventId, ...]]:
    """Return the states before those events whose parents do not determine them."""
    undetermined = [EventId(row.event_id) for row in rows if row.is_undetermined]
    found = await states_at(conn, undetermined, after=False) if undetermined else {}
    return {event_id: tuple(sorted(state.values())) for event_id, state in found.items()}


def _taken(
    rows: Sequence[TakenRow], version: str, states: Mapping[str, tuple[EventId, ...]]
) -> RemovedEvents:
    """Return the events in the order of their arrival, each after the events that it needs.

    One that is needed earlier than it arrived is an outlier first, as it was then.
    """
    events = {row.event_id: event_of(row, version) for row in rows}
    new_ids = {event_id: event.event_id for event_id, event in events.items()}
    taken = RemovedEvents()
    for row in sorted(rows, key=_arrival):
        taken.rows.setdefault(new_ids[row.event_id], row)
    states = {
        row.event_id: tuple(new_ids.get(one, one) for one in states[row.event_id])
        for row in rows
        if row.event_id in states
    }
    known: set[EventId] = set()
    for row in sorted(rows, key=_arrival):
        waiting = [row]
        while waiting:
            event, state = events[waiting[-1].event_id], states.get(waiting[-1].event_id)
            known.add(event.event_id)
            lacking = {*auth_ids_of(event), *(state or ())} & taken.rows.keys() - known
            if lacking:
                waiting.append(taken.rows[min(lacking)])
                continue
            one = waiting.pop()
            if waiting:
                taken.incoming.append(IncomingEvent(event, "outlier"))
            else:
                taken.incoming.append(IncomingEvent(event, one.origin, state, refused=one.refused))
    return taken


def _arrival(row: TakenRow) -> tuple[bool, int]:
    """Return the sort key: the position; outliers, which others may need, come last."""
    return row.arrival is None, row.arrival or row.event_nid


def event_of(row: TakenRow, version: str) -> Event:
    """Parse an event by the version of the room.

    Censored bytes are already those of the redacted form.
    """
    raw = decode(row.json, row.event_id, row.room_id)
    try:
        event = parse(raw, version)
    except InvalidEvent as error:
        raise CannotReauthoriseError(
            f"not a valid event of version {version}: {error.reason}", event_id=row.event_id
        ) from error
    return (
        event
        if event.event_id != row.event_id
        else load(raw, version, row.event_id, redacted=row.redacted_form)
    )


async def _remove(conn: Connection, room_nid: int, rows: Sequence[TakenRow]) -> None:
    nids = [row.event_nid for row in rows]
    await delete(conn, room_nid, nids, nids)
    positions = [row.stream_ordering for row in rows if row.stream_ordering is not None]
    shown = max(
        (row.stream_ordering or 0 for row in rows if row.is_accepted and row.origin == "live"),
        default=None,
    )
    await conn.execute(SQL_FOLLOW, room_nid, nids, positions, shown)
