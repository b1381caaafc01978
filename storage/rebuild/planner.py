"""Plan a room that the store does not have, in memory, and write it: for imports and for rebuilds.

The planner is that of an append (`storage.persist.plan.event`). The database has nothing of such a
room except what the load itself has written. So data that is not in memory does not exist, and no
query is needed. Events come as slim ones, in the order of the lines. A line with a missing
dependency waits until that is stored, and is then stored before all later lines. So each step
takes the first line that lacks nothing.

A room that is too large to plan at once is written in parts, in one transaction. Data that the
caches have dropped by then is read from the written parts.
"""

import heapq
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final, LiteralString, NamedTuple

from storage.auth import CONTENT_MATTERS
from storage.database.columns import EVENTS
from storage.database.connection import Connection, Database
from storage.database.names import InternedNames
from storage.database.placeholders import ColumnValues, InputValue, NumberedStatement, compose
from storage.errors import DatabaseConflict, StorageCorrupt
from storage.event import ROOM_VERSIONS, Event, load, relation_of
from storage.event.model import make_event, references_of
from storage.event.ndjson import Origin
from storage.ids import EventId
from storage.persist.commit.publish import absorb, set_positions
from storage.persist.load import on_demand
from storage.persist.model.cache_view import CONTENT_KEYS
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import Answers, MissingData
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import RoomChanges
from storage.persist.plan.event import plan_event
from storage.persist.write.all_tables import WriteResult, write_around
from storage.persist.write.events import new_columns_but_bytes
from storage.rebuild.interned import intern, members_known
from storage.streams.stream_writer import Author

# --------------------------------------------------------------------------------------------------
# An event without its bytes: the data that planning needs, packed by the thousand.
#
# State events, and events whose content the auth rules read, include their bytes. All others have
# their identifying fields, their edges, and the content that the tables need: a relation, a URL. So
# a room of a million messages is planned from some 300 bytes a message. The bytes of each line wait
# in the table `import_events`, under its place.

NOTHING: Final[dict[str, Any]] = {}


class SlimEvent(NamedTuple):
    """A valid line.

    ``rank``: its position among the lines of its path; ``place``: where its bytes are staged;
    ``whole``: its bytes, or None.
    """

    rank: int
    place: int
    event_id: str
    origin: Origin
    valid: bool
    type: str
    sender: str
    state_key: str | None
    depth: int
    origin_server_ts: int
    prev_events: tuple[str, ...]
    auth_events: tuple[str, ...]
    content: dict[str, Any]
    whole: bytes | None
    state_before: tuple[str, ...] | None
    refused: str | None = None
    readmit: bool = False
    """The event is stored and refused: accept it."""
    second: bool = False
    """A second create event of the room: store it after the first one."""


def slim(
    event: Event,
    rank: int,
    place: int,
    origin: Origin,
    state_before: tuple[str, ...] | None,
    *,
    refused: str | None = None,
    readmit: bool = False,
    second: bool = False,
) -> tuple[Any, ...]:
    """Return the fields of a `SlimEvent`, as they are packed."""
    whole = event.state_key is not None or event.type in CONTENT_MATTERS
    return (
        rank,
        place,
        event.event_id,
        origin,
        event.content_hash_valid,
        event.type,
        event.sender,
        event.state_key,
        event.depth,
        event.origin_server_ts,
        event.prev_event_ids,
        event.auth_event_ids,
        NOTHING if whole else _reduced(event),
        event.raw if whole else None,
        state_before,
        refused,
        readmit,
        second,
    )


def _reduced(event: Event) -> dict[str, Any]:
    """Return the part of a content that `EventView.stored_columns` reads."""
    content = event.content
    left: dict[str, Any] = {key: None for key in CONTENT_KEYS if key in content}
    if "m.relates_to" in content and (relation := relation_of(event)) is not None:
        left["m.relates_to"] = {"rel_type": relation.rel_type, "event_id": relation.event_id}
        if "m.new_content" in content:
            left["m.new_content"] = None
    return left


def event_of(one: SlimEvent, room_id: str, version: str) -> Event:
    """Return the event as planning takes it; without its bytes, unless it is whole."""
    if one.whole is not None:
        return load(one.whole, version, one.event_id, redacted=not one.valid)
    return make_event(
        one.event_id,
        room_id,
        ROOM_VERSIONS[version],
        one.type,
        one.sender,
        one.state_key,
        one.content,
        one.depth,
        one.origin_server_ts,
        one.prev_events,
        one.auth_events,
        None,
        b"",
        NOTHING,
        one.valid,
        None,
    )


# --------------------------------------------------------------------------------------------------
# Plan the lines of rooms, one after the other.

SQL_HELD_IDS: Final[LiteralString] = """
SELECT event_id
FROM events
WHERE event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($1::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
))
"""

ROUNDS_MAX: Final = 10_000
EVENTS_REMEMBERED: Final = 100_000
GROUPS_REMEMBERED: Final = 4_000
STATE_ENTRIES_REMEMBERED: Final = 2_000_000
NAMES_REMEMBERED: Final = 1_000_000
NO_ANSWER: Final[dict[str, Any]] = {
    "digest": [],
    "order": [],
    "create": [],
    "invited": [],
    "principals": [],
    "reaching": [],
}


class CannotPlan(Exception):  # noqa: N818  # control flow, not an error
    """A room to append instead.

    It refers to stored rooms, or has readmissions or second create events.
    """


class FailedLine(NamedTuple):
    """A line of a room that is not stored, and why."""

    room_id: str
    line: SlimEvent
    result: AppendResult


@dataclass(frozen=True, slots=True)
class Waiting:
    """An event with a missing dependency, by its index among the lines."""

    turn: int
    one: SlimEvent
    event: Event
    result: AppendResult


class NewRoomAnswers(Answers):
    """Answers for rooms of which the database holds nothing.

    ``is_first`` False: it holds what this transaction wrote.
    """

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first

    def answer(self, question: Hashable) -> Any:
        """Return "nothing" without a query. The change set itself knows all equal states."""
        kind = question[0]  # type: ignore[index]  # questions are tuples
        if kind in NO_ANSWER and (self.is_first or kind == "digest"):
            return NO_ANSWER[kind]
        return super().answer(question)


@dataclass(slots=True)
class PlannedRoom:
    """The state of a room while it is planned."""

    room_id: str
    turn: int = 0
    turns: dict[int, Waiting] = field(default_factory=dict)
    waiting_for: dict[str, list[int]] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)


class RoomLines(NamedTuple):
    """Some lines of a room, of one version."""

    room: PlannedRoom
    version: str
    lines: Sequence[SlimEvent]


class RoomPlanner:
    """Plans the rooms of one transaction, one after the other, into one change set.

    ``names``, ``blocks``: shared with later planners.
    """

    def __init__(
        self,
        conn: Connection,
        database: Database,
        names: InternedNames,
        blocks: NidBlocks,
        server_name: str,
    ) -> None:
        """Initialise the planner.

        ``conn`` is in the transaction; another connection of ``database`` allocates nids for names.
        """
        self.connection = conn
        self._database = database
        self._server_name = server_name
        self._blocks = blocks
        self._extremities_max = max(database.config.forward_extremities_max, 1)
        self._caches = WriterCaches(
            events=EVENTS_REMEMBERED,
            groups=GROUPS_REMEMBERED,
            state_entries=STATE_ENTRIES_REMEMBERED,
            rooms=sys.maxsize,
            names=sys.maxsize,
        )
        self._caches.names = names
        for kept in (self._caches.missing, self._caches.visibility, self._caches.audiences):
            kept.limit = sys.maxsize  # an absent entry is absent in the database, too
        self._written: set[str] = set()
        self._redactions: dict[str, tuple[int, ...]] = {}
        self._fresh_rooms: set[int] = set()
        self._announced: set[str] = set()
        self.places: dict[str, int] = {}
        self.results: list[AppendResult] = []
        self.failed: list[FailedLine] = []
        self.change_set: ChangeSet = self._fresh()

    def _fresh(self) -> ChangeSet:
        change_set = self._new_change_set(NewRoomAnswers(is_first=not self._written))
        change_set.rooms.fresh_rooms |= self._fresh_rooms
        change_set.rooms.rows.update(
            (room_id, None) for room_id in self._announced if room_id not in self._caches.rooms
        )
        return change_set

    def _new_change_set(self, answers: Answers) -> ChangeSet:
        return ChangeSet(
            self._caches,
            self._blocks,
            self._server_name,
            extremities_max=self._extremities_max,
            answers=answers,
        )

    def begin(self, room_id: str) -> PlannedRoom:
        """Begin a room that the store does not have."""
        self._announced.add(room_id)
        self.change_set.rooms.rows[room_id] = None
        return PlannedRoom(room_id)

    async def plan(self, parts: Sequence[RoomLines]) -> None:
        """Plan the next lines of rooms; the database is queried once for all of them.

        Raise `CannotPlan` for a readmission, and for a second create event.
        """
        if any(one.readmit or one.second for part in parts for one in part.lines):
            raise CannotPlan
        events = [
            [event_of(one, part.room.room_id, part.version) for one in part.lines] for part in parts
        ]
        await self._prepare(
            list(chain.from_iterable(events)),
            list(chain.from_iterable(part.lines for part in parts)),
        )
        for part, some in zip(parts, events, strict=True):
            await self._plan_lines(part, some)

    async def _prepare(self, events: Sequence[Event], lines: Sequence[SlimEvent]) -> None:
        async with self._database.connection() as conn:
            await intern(conn, self._blocks, self._caches.names, events, self._server_name)
            for key in await members_known(
                conn, self._caches.names, {event.sender for event in events}
            ):
                self.change_set.names.state_keys.setdefault(key, None)
            await self._know(conn, events, lines)

    async def _plan_lines(self, part: RoomLines, events: Sequence[Event]) -> None:
        room = part.room
        for one, event in zip(part.lines, events, strict=True):
            room.turn += 1
            await self._try(room, room.turn, one, event)
            while room.ready:
                again = room.turns.pop(heapq.heappop(room.ready))
                await self._try(room, again.turn, again.one, again.event)

    def end(self, room: PlannedRoom) -> None:
        """Record the waiting lines as failed: all lines of the room were read."""
        self.failed += [
            FailedLine(room.room_id, one.one, one.result) for _, one in sorted(room.turns.items())
        ]

    def wrote(self, positions: dict[int, int]) -> None:
        """Go on with an empty change set, after this one was written."""
        change_set = self.change_set
        self._written |= {new.row.event_id for new in change_set.events.new_events.values()}
        for nid, (_, target) in change_set.events.new_waiting.items():
            self._redactions[target] = (*self._redactions.get(target, ()), nid)
        for target, nids in list(self._redactions.items()):
            left = tuple(nid for nid in nids if nid not in change_set.events.deleted_waiting)
            if left != nids:
                self._redactions[target] = left
        self._fresh_rooms |= change_set.rooms.fresh_rooms
        absorb(self._caches, change_set)
        set_positions(self._caches, change_set, positions)
        self.places.clear()
        self.change_set = self._fresh()
        for room_id, room in change_set.rooms.room_changes.items():
            if room.changed:
                again = RoomChanges.of(self._caches.rooms[room_id])
                again.group_digests = room.group_digests
                self.change_set.rooms.room_changes[room_id] = again

    # ---------------------------------------------------------------------------------------------
    # one line

    async def _try(self, room: PlannedRoom, turn: int, one: SlimEvent, event: Event) -> None:
        state_before: Any = one.state_before  # ids of events, as texts
        incoming = IncomingEvent(event, one.origin, state_before, refused=one.refused)
        result = await self._planned(incoming)
        if result.outcome == "missing_parents":
            room.turns[turn] = Waiting(turn, one, event, result)
            room.waiting_for.setdefault(result.missing[0], []).append(turn)
        elif result.is_stored:
            self.results.append(result)
            self.places.setdefault(event.event_id, one.place)
            for waiting in room.waiting_for.pop(event.event_id, ()):
                heapq.heappush(room.ready, waiting)
        else:
            self.failed.append(FailedLine(room.room_id, one, result))

    async def _planned(self, incoming: IncomingEvent) -> AppendResult:
        work = partial(plan_event, self.change_set, incoming)
        return await self._complete(work, incoming.event.event_id)

    async def _complete(self, work: Callable[[], AppendResult], event_id: EventId) -> AppendResult:
        """Plan, loading missing data until it succeeds."""
        for _ in range(ROUNDS_MAX):
            try:
                return work()
            except MissingData as needs:
                await self._load(event_id, needs)
        raise StorageCorrupt("planning does not come to an end", event_id=event_id)

    async def _load(self, event_id: EventId, needs: MissingData) -> None:
        if needs.kind in {"event_ids", "cited"} and (
            unknown := [str(one) for one in needs.keys if one not in self._written]
        ):
            self._absent(unknown)  # of an event that waited while a part was written
            if len(unknown) == len(needs.keys):
                return
        if needs.kind == "rooms" and not self._written:
            raise StorageCorrupt("a room was not announced", event_id=event_id)
        await on_demand.load(self.connection, self.change_set, needs)

    # ---------------------------------------------------------------------------------------------
    # missing data

    async def _know(
        self, conn: Connection, events: Iterable[Event], lines: Iterable[SlimEvent]
    ) -> None:
        """Record that the store lacks the events that these name (`_held`)."""
        own = {event.event_id for event in events}
        named = set[str]()
        for event, one in zip(events, lines, strict=True):
            named.update(references_of(event), one.state_before or ())
            if event.redacts is not None:
                named.add(event.redacts)
        unknown = {one for one in named - own if not self._is_known(one)}
        self._absent(unknown - await self._held(conn, unknown))
        self._absent(one for one in own if not self._is_known(one))

    async def _held(self, conn: Connection, event_ids: set[str]) -> set[str]:
        """Return which of these must be read from the tables.

        Raise `CannotPlan` if the store has any.
        """
        if event_ids and await conn.fetchvals(SQL_HELD_IDS, list(event_ids)):
            raise CannotPlan
        return set()

    def _is_known(self, event_id: str) -> bool:
        return (
            event_id in self.change_set.events.rows
            or event_id in self._caches.rows
            or event_id in self._written
        )

    def _absent(self, event_ids: Iterable[str]) -> None:
        change_set = self.change_set
        for event_id in event_ids:
            change_set.events.rows[event_id] = None
            change_set.events.missing[event_id] = self._caches.missing.get(event_id)
            change_set.events.waiting[event_id] = self._redactions.get(event_id, ())


# --------------------------------------------------------------------------------------------------
# Write planned rooms.
#
# The rows of events take their bytes from the table where they are staged: those of a rebuild from
# the live rows. The other rows are written as `append` writes them.

BYTES_DELETED: Final = (
    "the bytes that an import had staged are gone:"
    " the database has crashed, or its session was lost; run the import again"
)

LOADED_EVENT: Final = EVENTS.rows(
    "loaded_event",
    EVENTS.but("received_ts", "arrival_ordering", "encoding", "writer_nid", "json"),
    import_place="bigint",  # where the bytes are staged
)

LOAD_EVENTS: Final[NumberedStatement] = compose(
    """
INSERT INTO events (:loaded_event.columns, received_ts, encoding, writer_nid, json)
SELECT :loaded_event.values, :received_ts, 0, :writer_nid, staged.json
FROM :loaded_event.rows AS i
CROSS JOIN LATERAL (
    SELECT json
    FROM import_events
    WHERE import_number = :import_number AND place = i.import_place
    OFFSET 0
) AS staged
""",
    LOADED_EVENT,
    InputValue("received_ts", "bigint"),
    InputValue("writer_nid", "smallint"),
    InputValue("import_number", "int"),
)
SQL_LOAD_EVENTS: Final[LiteralString] = LOAD_EVENTS.sql


async def write_planned(
    planner: RoomPlanner, author: Author, number: int, *, is_last: bool = False
) -> WriteResult | None:
    """Write what is planned over the planner's connection; return None if that is nothing.

    ``number``: of the import that staged the bytes.
    """
    change_set = planner.change_set
    if not change_set.has_changes:
        return None
    now = time.time_ns() // 1_000_000
    written = await write_around(planner.connection, change_set, author, now)
    given = {
        "received_ts": now,
        "writer_nid": author.writer_nid,
        "import_number": number,
        "loaded_event": _events(change_set, planner, written),
    }
    tag = await planner.connection.execute(SQL_LOAD_EVENTS, *LOAD_EVENTS.bind(given))
    if int(tag.rpartition(" ")[2]) != len(change_set.events.new_events):
        raise DatabaseConflict(BYTES_DELETED)
    if not is_last:
        planner.wrote(written.positions)
    return written


def _events(change_set: ChangeSet, planner: RoomPlanner, written: WriteResult) -> ColumnValues:
    columns = new_columns_but_bytes(change_set)
    if not columns:
        return {}
    rows = [new.row for new in change_set.events.new_events.values()]
    columns["stream_ordering"] = [
        None if row.outlier else written.positions[row.event_nid] for row in rows
    ]
    columns["import_place"] = [planner.places[row.event_id] for row in rows]
    return columns
