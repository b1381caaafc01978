"""Plan rooms that the store does not have, in memory, with `storage.persist.plan.event`.

The database has nothing of such a room except what the load itself has written. So data that is not
in memory does not exist, and no query is needed. Events come as slim ones, in the order of the
lines. A line with a missing dependency waits until that is stored, and is then stored before all
later lines. So each step takes the first line that lacks nothing (see `line_order`).

A room that is too large to plan at once is written in parts, in one transaction. Data that the
caches have dropped by then is read from the written parts.
"""

import heapq
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import Any, Final, LiteralString, NamedTuple, Protocol

import pyarrow as pa

from storage.database.connection import Connection, Database
from storage.database.names import InternedNames
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.event.model import references_of
from storage.ids import EventId
from storage.persist.commit.publish import absorb, set_positions
from storage.persist.load.on_demand import load
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import Answers, MissingData
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import RoomChanges
from storage.persist.plan.event import plan_event
from storage.pipeline.imports.intern_names import BundleLocation, intern, missing_members
from storage.pipeline.imports.validate import SlimEvent, event_of, unpacked

SQL_STORED_IDS: Final[LiteralString] = """
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
        if any(line.readmit or line.second for part in parts for line in part.lines):
            raise CannotPlan
        events = [
            [event_of(line, part.room.room_id, part.version) for line in part.lines]
            for part in parts
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
            for key in await missing_members(
                conn, self._caches.names, {event.sender for event in events}
            ):
                self.change_set.names.state_keys.setdefault(key, None)
            await self._know(conn, events, lines)

    async def _plan_lines(self, part: RoomLines, events: Sequence[Event]) -> None:
        room = part.room
        for line, event in zip(part.lines, events, strict=True):
            room.turn += 1
            await self._try(room, room.turn, line, event)
            while room.ready:
                again = room.turns.pop(heapq.heappop(room.ready))
                await self._try(room, again.turn, again.one, again.event)

    def end(self, room: PlannedRoom) -> None:
        """Record the waiting lines as failed: all lines of the room were read."""
        self.failed += [
            FailedLine(room.room_id, turn.one, turn.result)
            for _, turn in sorted(room.turns.items())
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

    async def _try(self, room: PlannedRoom, turn: int, line: SlimEvent, event: Event) -> None:
        state_before: Any = line.state_before  # ids of events, as texts
        incoming = IncomingEvent(event, line.origin, state_before, refused=line.refused)
        result = await self._planned(incoming)
        if result.outcome == "missing_parents":
            room.turns[turn] = Waiting(turn, line, event, result)
            room.waiting_for.setdefault(result.missing[0], []).append(turn)
        elif result.is_stored:
            self.results.append(result)
            self.places.setdefault(event.event_id, line.place)
            for waiting in room.waiting_for.pop(event.event_id, ()):
                heapq.heappush(room.ready, waiting)
        else:
            self.failed.append(FailedLine(room.room_id, line, result))

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
            unknown := [str(key) for key in needs.keys if key not in self._written]
        ):
            self._absent(unknown)  # of an event that waited while a part was written
            if len(unknown) == len(needs.keys):
                return
        if needs.kind == "rooms" and not self._written:
            raise StorageCorrupt("a room was not announced", event_id=event_id)
        await load(self.connection, self.change_set, needs)

    # ---------------------------------------------------------------------------------------------
    # missing data

    async def _know(
        self, conn: Connection, events: Iterable[Event], lines: Iterable[SlimEvent]
    ) -> None:
        """Record that the store lacks the events that these name (`_refuse_stored`)."""
        own = {event.event_id for event in events}
        named = set[str]()
        for event, line in zip(events, lines, strict=True):
            named.update(references_of(event), line.state_before or ())
            if event.redacts is not None:
                named.add(event.redacts)
        unknown = {event_id for event_id in named - own if not self._is_known(event_id)}
        self._absent(unknown - await self._refuse_stored(conn, unknown))
        self._absent(event_id for event_id in own if not self._is_known(event_id))

    async def _refuse_stored(self, conn: Connection, event_ids: set[str]) -> set[str]:
        """Return which of these must be read from the tables.

        Raise `CannotPlan` if the store has any.
        """
        if event_ids and await conn.fetchvals(SQL_STORED_IDS, list(event_ids)):
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
# The bundles of a room, which can be read in order several times.


class RoomBundle(NamedTuple):
    """A bundle: its room version, its path, its ranks, and its location."""

    version: str
    path_index: int
    first: int
    last: int
    place: BundleLocation


class BundleSource(Protocol):
    """Reads bundles: from files, or from the database."""

    def get(self, place: BundleLocation) -> bytes: ...


class BundledRoom:
    """A room's bundles in order of path and rank. It keeps none of them in memory."""

    def __init__(self, room_id: str, reader: BundleSource) -> None:
        self.room_id = room_id
        self.events: Any = 0
        self._reader = reader
        self._pieces: list[RoomBundle] = []

    def add(self, bundle: Mapping[str, Any]) -> None:
        """Add a bundle: a row of `storage.pipeline.imports.validate.EXAMINED`."""
        place = BundleLocation(bundle["file"], bundle["start"], bundle["length"])
        self._pieces.append(
            RoomBundle(
                bundle["room_version"], bundle["path_index"], bundle["first"], bundle["last"], place
            )
        )
        self.events += bundle["events"]

    @property
    def places(self) -> Iterator[BundleLocation]:
        return (piece.place for piece in self._pieces)

    def lines(self, most: int) -> Iterator[tuple[str, list[SlimEvent]]]:
        """Yield all lines with the room version, ``most`` at a time."""
        for version, lines in self._ranges():
            while chunk := list(islice(lines, most)):
                yield version, chunk

    def _ranges(self) -> Iterator[tuple[str, Iterator[SlimEvent]]]:
        """Merge bundles with overlapping ranks (parallel files); only these share the memory."""
        together: list[RoomBundle] = []
        for piece in sorted(self._pieces, key=lambda bundle: (bundle.path_index, bundle.first)):
            if together and not (
                piece.path_index == together[0].path_index
                and piece.first <= max(bundle.last for bundle in together)
            ):
                yield together[0].version, self._merged(together)
                together = []
            together.append(piece)
        if together:
            yield together[0].version, self._merged(together)

    def _merged(self, pieces: Iterable[RoomBundle]) -> Iterator[SlimEvent]:
        opened = [self._opened(piece) for piece in pieces]
        return (
            iter(opened[0])
            if len(opened) == 1
            else iter(heapq.merge(*opened, key=attrgetter("rank")))
        )

    def _opened(self, piece: RoomBundle) -> list[SlimEvent]:
        lines = list(unpacked(self._reader.get(piece.place)))
        return (
            lines
            if all(a.rank <= b.rank for a, b in pairwise(lines))
            else sorted(lines, key=attrgetter("rank"))
        )


def rooms_of(batches: Iterable[pa.RecordBatch], reader: BundleSource) -> Iterator[BundledRoom]:
    """Yield the rooms of sorted bundles (`storage.pipeline.imports.validate.EXAMINED`)."""
    room: BundledRoom | None = None
    for batch in batches:
        for row in batch.to_pylist():
            if room is not None and row["room_id"] != room.room_id:
                yield room
                room = None
            room = room or BundledRoom(row["room_id"], reader)
            room.add(row)
    if room is not None:
        yield room
