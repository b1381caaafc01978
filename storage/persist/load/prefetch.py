"""Load ahead what a batch will need, in one statement: what its events name and the caches lack."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, LiteralString

from storage.codec import decode_recent
from storage.database.columns import (
    AUTH_CHAINS,
    EVENTS,
    MISSING_EVENTS,
    ROOMS,
    STATE_GROUPS,
    VISIBILITY,
    WAITING_REDACTIONS,
)
from storage.database.connection import Connection
from storage.database.names import (
    KEY_CREATE,
    KEY_HISTORY_VISIBILITY,
    KEY_JOIN_RULES,
    KEY_POWER_LEVELS,
    PRINCIPAL_EVERYBODY,
    PRINCIPAL_SHARED,
    TYPE_MEMBER,
)
from storage.database.placeholders import InputRows, NumberedStatement, by_column, compose, fill
from storage.database.prepared import prepare_ahead
from storage.event import Event, relation_of
from storage.event import load as load_event
from storage.graph.chains import Chain, ChainPosition
from storage.ids import server_name_of
from storage.persist.load.events import PART_COLUMNS, PackedRow, packed
from storage.persist.load.lookups import keep_rows
from storage.persist.model.caches import BLOCK_LENGTHS, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent, IncomingEvent, LocalEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import UNSEEN, EventRow, MissingRow, RoomRow, VisibilityRow
from storage.state.groups import GroupRow, groups_of
from storage.visibility import multirange

MEMBER: Final = "m.room.member"
STANDING: Final = {
    "*everybody": PRINCIPAL_EVERYBODY,
    "*shared": PRINCIPAL_SHARED,
}  # principals that stand for many

NUMBERS_SPARE: Final = 4  # so many times what a batch needs is taken of a sequence

Load = Callable[[ChangeSet, MissingData], Awaitable[None]]


@dataclass(slots=True, eq=False)
class BatchRequest:
    """The request for `prefetch_rows`: ids and names, and nids if they are known."""

    rooms: set[str] = field(default_factory=set)
    events: set[str] = field(default_factory=set)
    parents: set[str] = field(default_factory=set)  # of the events: those whose states are wanted
    auth: set[str] = field(
        default_factory=set
    )  # of the events: those whose contents and places are wanted
    contents: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    places: set[int] = field(default_factory=set)
    principals: set[str] = field(default_factory=set)
    types: set[str] = field(default_factory=set)
    state_keys: set[tuple[str, str]] = field(default_factory=set)
    seen: set[tuple[str, str]] = field(default_factory=set)  # room, user or server
    numbers: dict[str, int] = field(default_factory=dict)  # of a sequence, so many at least

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to load."""
        return not any(getattr(self, name) for name in self.__slots__)

    @property
    def is_of_names(self) -> bool:
        """Return whether all rooms and events are known."""
        return not (self.rooms or self.events or self.contents or self.groups or self.places)


class PendingPrefetch:
    """A load for a batch that runs while the events that do not need it are planned.

    ``assumed``: whether the events of the batch were assumed to be new.
    """

    def __init__(
        self, load: Load, change_set: ChangeSet, lacking: BatchRequest, *, assumed: bool
    ) -> None:
        self.assumed = assumed
        self._load = (
            None
            if lacking.is_empty
            else asyncio.ensure_future(load(change_set, MissingData("batch", (lacking,))))
        )

    async def finished(self) -> bool:
        """Wait for the load; return whether there was one. Raise what it raised."""
        load, self._load = self._load, None
        if load is not None:
            await load
        return load is not None


async def prefetch(
    load: Load, change_set: ChangeSet, incoming: Sequence[AnyEvent], *, assume_new: bool
) -> PendingPrefetch:
    """Load what the events name: rooms, parents, auth events, states after the parents, names.

    If ``assume_new`` allows it, and the caches have all other events that they name, the events are
    assumed to be new. Then the load may still run on return; otherwise it is done. So are the
    requests of clients that make events here; without ``assume_new`` they are looked up.
    """
    if not assume_new:
        await _load_transactions(load, change_set, incoming)
    lacking = BatchRequest()
    received = [event for event in incoming if isinstance(event, IncomingEvent)]
    ids: set[str] = {incoming_event.event.event_id for incoming_event in received}
    own = {
        event_id
        for event_id in ids
        if event_id not in change_set.caches.rows and event_id not in change_set.events.rows
    }
    for room_id in {event.room_id for event in incoming}:
        _collect_room(change_set, room_id, lacking)
    for event in received:
        _collect(change_set, event, own, lacking)
    assumed = assume_new and not (lacking.rooms or lacking.events)
    if assumed:
        change_set.events.assume_new(own)
    else:
        lacking.events |= own
    needed = dict.fromkeys(BLOCK_LENGTHS, 1) | {
        "event_nids": len(incoming),
        "state_group_nids": len(incoming) + 2,
    }
    lacking.numbers = {
        name: NUMBERS_SPARE * number
        for name, number in needed.items()
        if change_set.blocks.left(name) < number
    }
    pending = PendingPrefetch(load, change_set, lacking, assumed=assumed)
    if not assumed:
        await pending.finished()
    elif not lacking.is_empty:
        await asyncio.sleep(0)  # it is on its way before anything is planned
    return pending


async def _load_transactions(
    load: Load, change_set: ChangeSet, incoming: Sequence[AnyEvent]
) -> None:
    """Look up which of the local events are of repeated requests."""
    transactions = [
        event.transaction
        for event in incoming
        if isinstance(event, LocalEvent) and event.transaction is not None
    ]
    if transactions:
        await load(change_set, MissingData("transactions", transactions))


def _collect(
    change_set: ChangeSet, received: IncomingEvent, own: set[str], lacking: BatchRequest
) -> None:
    event, caches = received.event, change_set.caches
    cached = caches.rows.row(event.event_id)
    if cached is not None:
        if not cached.outlier or (received.origin == "outlier" and not cached.is_out_of_band):
            return  # a duplicate, which needs nothing
        # as below: it may be a duplicate by now, or have missing parents
        _want(change_set, event.event_id, own, lacking, lacking.events)
    _collect_parents(change_set, event, own, lacking)
    if "m.relates_to" in event.content:
        _collect_relation(change_set, event, lacking)
    if _is_ordinary(caches, received):
        return
    for event_id in event.auth_event_ids:
        row = caches.rows.row(event_id) or change_set.events.rows.get(event_id)
        if row is None or (
            row.outlier and row.is_out_of_band
        ):  # another writer may have authorised it
            _want(change_set, event_id, own, lacking, lacking.auth)
        else:
            _collect_auth_event(
                change_set, row.event_nid, lacking, placed=event.state_key is not None
            )
    for event_id in (
        *(received.state_before or ()),
        *((event.redacts,) if event.redacts is not None else ()),
    ):
        row = caches.rows.row(event_id)
        if row is None or row.is_out_of_band:
            _want(change_set, event_id, own, lacking, lacking.events)
    _collect_names(change_set, event, lacking)


def _is_ordinary(caches: WriterCaches, received: IncomingEvent) -> bool:
    """Return whether it is a message like one before it.

    Then `storage.persist.plan.fast_path` needs only its parents, and the type of its relation.
    """
    event = received.event
    if event.state_key is not None or received.state_before is not None:
        return False
    return (event.sender, event.type, event.auth_event_ids, event.room_id) in caches.allowed


def _collect_parents(
    change_set: ChangeSet, event: Event, own: set[str], lacking: BatchRequest
) -> None:
    caches = change_set.caches
    for event_id in event.prev_event_ids:
        row = caches.rows.row(event_id) or change_set.events.rows.get(event_id)
        # Another writer may have given an outlier its position. Such a write leaves no trace here.
        if row is None or row.outlier:
            _want(change_set, event_id, own, lacking, lacking.parents)
        elif row.after not in caches.groups and row.after not in change_set.states.groups:
            lacking.groups.add(row.after)


def _collect_room(change_set: ChangeSet, room_id: str, lacking: BatchRequest) -> None:
    if room_id in change_set.rooms.rows:
        return
    room = change_set.caches.rooms.get(room_id)
    if room is None:
        lacking.rooms.add(room_id)
    elif (
        room.current_state_group is not None
        and room.current_state_group not in change_set.caches.groups
    ):
        lacking.groups.add(room.current_state_group)


def _collect_relation(change_set: ChangeSet, event: Event, lacking: BatchRequest) -> None:
    relation = relation_of(event)
    if relation is not None:
        _collect_type(change_set, relation.rel_type, lacking)


def _collect_type(change_set: ChangeSet, name: str, lacking: BatchRequest) -> None:
    if name not in change_set.caches.names.types and name not in change_set.names.types:
        lacking.types.add(name)


def _want(
    change_set: ChangeSet, event_id: str, own: set[str], lacking: BatchRequest, kind: set[str]
) -> None:
    """Request an event, unless it is cached, in the batch, or known not to be stored."""
    if event_id not in own and event_id not in change_set.events.rows:
        lacking.events.add(event_id)
        kind.add(event_id)


def _collect_auth_event(
    change_set: ChangeSet, nid: int, lacking: BatchRequest, *, placed: bool
) -> None:
    if nid not in change_set.caches.events and nid not in change_set.events.parsed:
        lacking.contents.add(nid)
    if placed and nid not in change_set.caches.places and nid not in change_set.auth_graph.places:
        lacking.places.add(nid)


def _collect_names(change_set: ChangeSet, event: Event, lacking: BatchRequest) -> None:
    """Request the sender, its membership key, the type and the state key."""
    names = change_set.caches.names
    if event.sender not in names.principals and event.sender not in change_set.names.principals:
        lacking.principals.add(event.sender)
    if (TYPE_MEMBER, event.sender) not in names.state_keys and (
        TYPE_MEMBER,
        event.sender,
    ) not in change_set.names.state_keys:
        lacking.state_keys.add((MEMBER, event.sender))
    _collect_type(change_set, event.type, lacking)
    if event.state_key is None:
        return
    type_nid = names.types.get(event.type) or change_set.names.types.get(event.type)
    key = (type_nid, event.state_key)
    if type_nid is None or (key not in names.state_keys and key not in change_set.names.state_keys):
        lacking.state_keys.add((event.type, event.state_key))
    if event.type == MEMBER:
        _collect_member(change_set, event.room_id, event.state_key, lacking)


def _collect_member(change_set: ChangeSet, room_id: str, user: str, lacking: BatchRequest) -> None:
    """Request the visibility of the server, of a local member, and of the standing principals."""
    names = change_set.caches.names
    room = change_set.caches.rooms.get(room_id) or change_set.rooms.rows.get(room_id)
    server = server_name_of(user)
    for name in (server, *((user,) if server == change_set.server_name else ()), *STANDING):
        nid = (
            STANDING.get(name)
            or names.principals.get(name)
            or change_set.names.principals.get(name)
        )
        if nid is None and name not in change_set.names.principals:
            lacking.principals.add(name)
        if (nid is None and name not in change_set.names.principals) or (
            nid is not None
            and (room is None or not change_set.visibility.knows_visibility(room.room_nid, nid))
        ):
            lacking.seen.add((room_id, name))


# --------------------------------------------------------------------------------------------------
# The statements that load what a batch of events needs (`prefetch_rows` sends them).

ROOM: Final = packed("room", ROOMS, RoomRow._fields)
EVENT: Final = packed("event", EVENTS, EventRow._fields)
GAP: Final = packed("gap", MISSING_EVENTS, MissingRow._fields)
WAITING: Final = packed("waiting", WAITING_REDACTIONS, ("redaction_nid", "target_event_id"))
GROUP: Final = packed("state_group", STATE_GROUPS, GroupRow._fields)
POSITION: Final = packed("position", AUTH_CHAINS, ("event_nid", "chain_nid", "sequence_number"))
VISIBLE: Final = packed(
    "visible", VISIBILITY, ("room_nid", "principal_nid", *VisibilityRow._fields)
)

REQUEST: Final = InputRows.own(
    "request",
    rooms="text",
    events="text",
    parents="text",
    auth="text",
    contents="bigint",
    groups="bigint",
    positions="bigint",
    deciding_keys="int",
)
NAMES: Final = InputRows.own(
    "names",
    principals="text",
    types="text",
    key_types="text",
    state_keys="text",
    visible_rooms="text",
    visible_names="text",
    sequences="text",
    blocks="int",
)

TEMPLATE_LOAD_BATCH: Final[LiteralString] = """
WITH
room AS MATERIALIZED (
    SELECT * FROM rooms WHERE room_id = ANY(:request.rooms)
),
stored AS MATERIALIZED (
    SELECT :event.columns
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT e.event_nid  -- one by one: for many ids a scan looks cheaper while a table is small
        FROM unnest(:request.events) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS e
        UNION
        SELECT unnest(forward_extremities)
        FROM room
    ))
),
auth AS MATERIALIZED (
    SELECT event_nid FROM stored WHERE event_id = ANY(:request.auth)
),
path AS MATERIALIZED (
    SELECT step.part AS state_group
    FROM unnest(ARRAY(
        SELECT COALESCE(state_group_after, state_group_before)
        FROM stored
        WHERE NOT outlier AND (
            event_id = ANY(:request.parents)
            OR event_nid = ANY(ARRAY(SELECT unnest(forward_extremities) FROM room))
        )
        UNION
        SELECT current_state_group FROM room
    ) || :request.groups) AS wanted (state_group)
    CROSS JOIN LATERAL state_path(wanted.state_group) AS step
),
chain_position AS MATERIALIZED (
    SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number
    FROM auth_chains
    WHERE event_nid = ANY(ARRAY(SELECT event_nid FROM auth) || :request.positions)
),
chain AS MATERIALIZED (SELECT DISTINCT chain_nid FROM chain_position)
{columns}
UNION ALL
SELECT 'room', :room.packed
FROM room
UNION ALL
SELECT 'event', :event.packed
FROM stored
UNION ALL
SELECT 'missing', :gap.packed
FROM missing_events
WHERE event_id = ANY(:request.events)
UNION ALL
SELECT 'waiting', :waiting.packed
FROM waiting_redactions
WHERE target_event_id = ANY(:request.events)
UNION ALL
SELECT 'content', ARRAY[e.event_id, r.room_id, r.room_version],
    ARRAY[e.event_nid, e.redacted_form::int], NULL, NULL, NULL, NULL, NULL, e.json
FROM events e
CROSS JOIN LATERAL (
    SELECT room_id, room_version FROM rooms WHERE room_nid = e.room_nid OFFSET 0
) AS r
WHERE e.event_nid = ANY(ARRAY(
    SELECT event_nid FROM auth
    UNION
    SELECT c.event_nid
    FROM room
    CROSS JOIN unnest(:request.deciding_keys) AS deciding (state_key_nid)
    CROSS JOIN LATERAL (
        SELECT event_nid
        FROM current_state
        WHERE room_nid = room.room_nid AND state_key_nid = deciding.state_key_nid
        OFFSET 0
    ) AS c
) || :request.contents)
UNION ALL
SELECT 'group', :state_group.packed
FROM state_groups
WHERE state_group = ANY(ARRAY(SELECT DISTINCT state_group FROM path))
UNION ALL
SELECT 'position', :position.packed
FROM chain_position
UNION ALL
SELECT 'chain', NULL, ARRAY[c.chain_nid, NULL, max(a.sequence_number)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM chain c
CROSS JOIN LATERAL chain_rows(c.chain_nid, 2147483647) AS a
GROUP BY c.chain_nid
UNION ALL
SELECT 'chain', NULL, ARRAY[c.chain_nid, l.chain_nid_reached, l.upto], NULL, NULL, NULL, NULL, NULL,
    NULL
FROM chain c
CROSS JOIN LATERAL reached_from(c.chain_nid, 2147483647) AS l
{names}
"""

PART_NAME_ROWS: Final[LiteralString] = """
UNION ALL
SELECT 'principal', ARRAY[name], ARRAY[principal_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM principals
WHERE name = ANY(:names.principals)
UNION ALL
SELECT 'type', ARRAY[type], ARRAY[type_nid], NULL, NULL, NULL, NULL, NULL, NULL
FROM event_types
WHERE type = ANY(:names.types)
UNION ALL
SELECT 'state_key', ARRAY[k.state_key], ARRAY[k.type_nid, k.state_key_nid], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest(:names.key_types, :names.state_keys) AS wanted (type, state_key)
CROSS JOIN LATERAL (SELECT type_nid FROM event_types WHERE type = wanted.type OFFSET 0) AS t
-- one by one, by the whole key, as the next: never all keys of a type, nor all members of a room,
-- for each
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE type_nid = t.type_nid AND state_key = wanted.state_key OFFSET 0
) AS k
UNION ALL
SELECT 'visible', :visible.packed(v)
FROM unnest(:names.visible_rooms, :names.visible_names) AS wanted (room_id, name)
CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
CROSS JOIN LATERAL (SELECT principal_nid FROM principals WHERE name = wanted.name OFFSET 0) AS p
CROSS JOIN LATERAL (
    SELECT *
    FROM visibility
    WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid
    OFFSET 0
) AS v
UNION ALL
SELECT 'number', ARRAY[wanted.name], ARRAY[nextval(wanted.name::regclass)], NULL, NULL, NULL, NULL,
    NULL, NULL
FROM unnest(:names.sequences, :names.blocks) AS wanted (name, blocks)
CROSS JOIN generate_series(1, wanted.blocks)
"""

LOAD_BATCH: Final[NumberedStatement] = compose(
    fill(TEMPLATE_LOAD_BATCH, columns=PART_COLUMNS, names=PART_NAME_ROWS),
    replace(REQUEST, is_text=False),  # filters compare its arrays with loaded rows
    replace(NAMES, is_text=False),
    ROOM,
    EVENT,
    GAP,
    WAITING,
    GROUP,
    POSITION,
    VISIBLE,
)
SQL_LOAD_BATCH: Final[LiteralString] = LOAD_BATCH.sql

TEMPLATE_LOAD_NAMES: Final[LiteralString] = """
{columns}
{names}
"""

LOAD_NAMES: Final[NumberedStatement] = compose(
    fill(TEMPLATE_LOAD_NAMES, columns=PART_COLUMNS, names=PART_NAME_ROWS), NAMES, VISIBLE
)
SQL_LOAD_NAMES: Final[LiteralString] = LOAD_NAMES.sql
"""The load without rooms and events. It is enough if a new user comes to a known room."""
prepare_ahead(SQL_LOAD_BATCH, SQL_LOAD_NAMES, writes=True)


# --------------------------------------------------------------------------------------------------
# Load all that a batch of events needs by one statement.
#
# A small statement is enough if only names are missing. Rows of all kinds come in the same columns
# (`storage.persist.load.events`). Each kind has a function that puts them into the change
# set. If planning needs more, `storage.persist.load.on_demand` loads it.

DECIDING_KEYS: Final = [KEY_CREATE, KEY_POWER_LEVELS, KEY_JOIN_RULES, KEY_HISTORY_VISIBILITY]
"""State keys whose events decide about most others: their contents come with the room."""

UNPACK_ROOM: Final = ROOM.unpacker()
UNPACK_EVENT: Final = EVENT.unpacker()
UNPACK_GAP: Final = GAP.unpacker()
UNPACK_WAITING: Final = WAITING.unpacker()
UNPACK_GROUP: Final = GROUP.unpacker()
UNPACK_POSITION: Final = POSITION.unpacker()
UNPACK_VISIBLE: Final = VISIBLE.unpacker()


async def load_batch(conn: Connection, change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Load what is requested, and remember as absent what does not exist.

    Nothing of it is known before the result is here, while other events are planned.
    """
    if lacking.is_of_names:
        arguments = LOAD_NAMES.bind({"names": _names(lacking)})
        rows = await conn.fetch(SQL_LOAD_NAMES, *arguments, row=PackedRow)
    else:
        arguments = LOAD_BATCH.bind({"names": _names(lacking), "request": _request(lacking)})
        rows = await conn.fetch(SQL_LOAD_BATCH, *arguments, row=PackedRow)
    _expect(change_set, lacking)
    by_kind: dict[str, list[PackedRow]] = {}
    for row in rows:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, rows in by_kind.items():
        KEEP[kind](change_set, rows, lacking)
    _absent_names(change_set, lacking)


def _names(lacking: BatchRequest) -> dict[str, Sequence[Any]]:
    nothing: dict[str, Sequence[Any]] = dict.fromkeys(NAMES.types, ())
    blocks = {name: -(-number // BLOCK_LENGTHS[name]) for name, number in lacking.numbers.items()}
    return {
        **nothing,
        "principals": list(lacking.principals),
        "types": list(lacking.types),
        **by_column(("key_types", "state_keys"), lacking.state_keys),
        **by_column(("visible_rooms", "visible_names"), lacking.seen),
        **by_column(("sequences", "blocks"), blocks.items()),
    }


def _request(lacking: BatchRequest) -> dict[str, Sequence[Any]]:
    return {
        "rooms": list(lacking.rooms),
        "events": list(lacking.events),
        "parents": list(lacking.parents),
        "auth": list(lacking.auth),
        "contents": list(lacking.contents),
        "groups": list(lacking.groups),
        "positions": list(lacking.places),
        "deciding_keys": DECIDING_KEYS,
    }


def _expect(change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Remember everything requested as absent, until a row says otherwise."""
    for room_id in lacking.rooms:
        change_set.rooms.rows.setdefault(room_id, None)
    for event_id in lacking.events:
        change_set.events.rows.setdefault(event_id, None)
        change_set.events.missing.setdefault(event_id, None)
        change_set.events.waiting.setdefault(event_id, ())
    for name in lacking.principals:
        change_set.names.principals.setdefault(name, None)
    for name in lacking.types:
        change_set.names.types.setdefault(name, None)


def _absent_names(change_set: ChangeSet, lacking: BatchRequest) -> None:
    """Remember as absent what was requested by names whose nids are known only now."""
    names = change_set.caches.names
    for type_name, state_key in lacking.state_keys:
        type_nid = names.types.get(type_name) or change_set.names.types.get(type_name)
        if type_nid is not None:
            change_set.names.state_keys.setdefault((type_nid, state_key), None)
    for room_id, name in lacking.seen:
        room = change_set.rooms.rows.get(room_id) or change_set.caches.rooms.get(room_id)
        nid = (
            STANDING.get(name)
            or change_set.names.principals.get(name)
            or names.principals.get(name)
        )
        if (
            room is not None
            and nid is not None
            and not change_set.visibility.knows_visibility(room.room_nid, nid)
        ):
            change_set.visibility.current[room.room_nid, nid] = UNSEEN


def _rooms(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        room = RoomRow._make(UNPACK_ROOM(row))
        change_set.rooms.rows[room.room_id] = room._replace(
            forward_extremities=tuple(room.forward_extremities),
            out_of_range=multirange.from_text(str(room.out_of_range)),
        )


def _events(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    keep_rows(change_set, [EventRow._make(UNPACK_EVENT(row)) for row in rows])


def _missing(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        gap = MissingRow._make(UNPACK_GAP(row))
        if (
            gap.event_id not in change_set.events.new_missing
            and gap.event_id not in change_set.events.deleted_missing
        ):
            change_set.events.missing[gap.event_id] = gap._replace(child_nids=tuple(gap.child_nids))


def _waiting(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        redaction_nid, target = UNPACK_WAITING(row)
        change_set.events.waiting[target] = (*change_set.events.waiting[target], redaction_nid)


def _contents(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        event_id, room_id, version = row.texts
        nid, redacted = row.numbers
        raw = decode_recent(row.data, event_id, room_id)
        change_set.events.parsed[nid] = load_event(raw, version, event_id, redacted=bool(redacted))


def _groups(change_set: ChangeSet, rows: Sequence[PackedRow], lacking: BatchRequest) -> None:
    """Keep the groups that are wanted; the other rows are of their paths."""
    group_rows = [GroupRow._make(UNPACK_GROUP(row)) for row in rows]
    parts = {row.state_group: row for row in group_rows}
    rooms = [
        room
        for room_id in lacking.rooms
        if (room := change_set.rooms.rows.get(room_id)) is not None
    ]
    parents = lacking.parents | {
        change_set.events.row_ids[nid] for room in rooms for nid in room.forward_extremities
    }
    rows_before = (change_set.events.rows.get(parent) for parent in parents)
    state_groups = {row.after for row in rows_before if row is not None and not row.outlier}
    state_groups |= {
        room.current_state_group for room in rooms if room.current_state_group is not None
    }
    change_set.states.groups.update(groups_of(state_groups | lacking.groups, parts))


def _positions(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        nid, *position = UNPACK_POSITION(row)
        change_set.auth_graph.places[nid] = ChainPosition(*position)


def _chains(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    """Keep the lengths of chains, and their links. A known chain is newer."""
    links: dict[int, dict[int, int]] = {}
    for row in rows:
        chain_nid, target, number = row.numbers
        if target is not None:
            links.setdefault(chain_nid, {})[target] = number
    for row in rows:
        chain_nid, target, number = row.numbers
        if (
            target is None
            and chain_nid not in change_set.auth_graph.chains
            and chain_nid not in change_set.caches.chains
        ):
            change_set.auth_graph.chains[chain_nid] = Chain(number, links.get(chain_nid, {}))


def _principals(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    change_set.names.principals.update((row.texts[0], row.numbers[0]) for row in rows)


def _types(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.names.types[row.texts[0]] = row.numbers[0]
        change_set.names.type_names[row.numbers[0]] = row.texts[0]


def _state_keys(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        type_nid, nid = row.numbers
        change_set.names.state_keys[type_nid, row.texts[0]] = nid
        change_set.names.state_key_names[nid] = (type_nid, row.texts[0])


def _visible(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        room_nid, nid, *values = UNPACK_VISIBLE(row)
        if not change_set.visibility.knows_visibility(room_nid, nid):
            visibility_row = VisibilityRow._make(values)
            change_set.visibility.current[room_nid, nid] = visibility_row._replace(
                audiences=multirange.from_text(str(visibility_row.audiences)),
                invited_audiences=multirange.from_text(str(visibility_row.invited_audiences or "")),
            )


def _numbers(change_set: ChangeSet, rows: Sequence[PackedRow], _: BatchRequest) -> None:
    for row in rows:
        change_set.blocks.put(row.texts[0], row.numbers[0])


KEEP: Final[dict[str, Callable[[ChangeSet, Sequence[PackedRow], BatchRequest], None]]] = {
    "room": _rooms,
    "event": _events,
    "missing": _missing,
    "waiting": _waiting,
    "content": _contents,
    "group": _groups,
    "position": _positions,
    "chain": _chains,
    "principal": _principals,
    "type": _types,
    "state_key": _state_keys,
    "visible": _visible,
    "number": _numbers,
}
