"""Rebuild rooms, one after the other, in one session; or complete the state of a partial room."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, LiteralString, NamedTuple, Self, TypeVar

from storage.config import Config
from storage.database.archived_bytes import MAINTENANCE_MS
from storage.database.connection import Connection, Database
from storage.database.names import InternedNames
from storage.database.placeholders import fill
from storage.database.pool import begun
from storage.errors import ConstraintViolated, DatabaseConflict, StorageCorrupt
from storage.ids import EventId
from storage.maintenance.indexes import refuse_corrupt_indexes
from storage.maintenance.room_states import PART_ROOM_EVENTS
from storage.maintenance.totals import event_total
from storage.maintenance.verify.current import check_deltas
from storage.maintenance.verify.event_loader import Finding, VerifiedRoom, read_room
from storage.maintenance.verify.row_rules import check_row_rules
from storage.maintenance.verify.states import PART_IS_BROKEN, check_groups
from storage.observability.counters import Counted, Report, silent
from storage.persist.room_lock import lock_room
from storage.rebuild.arrivals import (
    SQL_FIRST_CREATE,
    SQL_OUTLIER_NIDS,
    SQL_TIMELINE_STEPS,
    RebuiltRoom,
    TimelineStepRow,
)
from storage.rebuild.completion import (
    SQL_MARK,
    Completion,
    KnownToReaders,
    PartialMarkRow,
    completion_of,
    end_of_completion,
    known_to_readers,
)
from storage.rebuild.match import Matching
from storage.rebuild.planner import NAMES_REMEMBERED, PlannedRoom, write_planned
from storage.rebuild.replan import CHUNK, RoomReplan
from storage.rebuild.shadow_tables import ShadowTables
from storage.rebuild.shared import repair_positions
from storage.rebuild.swap import Differences, swap
from storage.streams.invalidate_caches import register_writer
from storage.streams.stream_writer import Author

T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__name__)

SQL_ROOM_NID: Final[LiteralString] = """
SELECT room_nid
FROM rooms
WHERE room_id = $1::text
"""

SQL_CURRENT_GROUP: Final[LiteralString] = """
SELECT current_state_group
FROM rooms
WHERE room_id = $1::text
"""

# --------------------------------------------------------------------------------------------------
# Rows that break a rule (storage/maintenance/verify/row_rules.py), so that planning can read them.
# Their values may be wrong afterwards: the swap replaces those.

# A path of another form stops each statement that reads it. This one can be read: it leads to no
# group, so the state stays unreadable.
TEMPLATE_MAKE_PATHS_READABLE: Final[LiteralString] = """
UPDATE state_groups
SET path = NULL,
    back = '{-2147483647, 0}'
WHERE room_nid IN (SELECT room_nid FROM rooms WHERE room_id = $1::text) AND {is_broken}
"""

SQL_MAKE_PATHS_READABLE: Final[LiteralString] = fill(
    TEMPLATE_MAKE_PATHS_READABLE, is_broken=PART_IS_BROKEN
)

SQL_REGULAR_EVENTS: Final[LiteralString] = fill(
    """
UPDATE events e
SET outlier = e.stream_ordering IS NULL,
    depth = CASE WHEN e.stream_ordering IS NULL THEN COALESCE(e.depth, 0) ELSE e.depth END,
    topological_ordering = CASE WHEN e.stream_ordering IS NOT NULL
        THEN COALESCE(e.topological_ordering, 1) END,
    state_group_before = CASE WHEN e.stream_ordering IS NOT NULL
        THEN COALESCE(e.state_group_before, 0) END,
    audience = CASE WHEN e.stream_ordering IS NOT NULL THEN COALESCE(e.audience, 0) END
FROM {events} AS i
WHERE e.event_nid = i.event_nid AND (
    e.outlier <> (e.stream_ordering IS NULL) OR e.outlier <> (e.topological_ordering IS NULL)
    OR e.outlier <> (e.state_group_before IS NULL) OR e.outlier <> (e.audience IS NULL)
    OR COALESCE(e.depth, e.topological_ordering) IS NULL
)
""",
    events=PART_ROOM_EVENTS,
)

SQL_REGULAR_GROUPS: Final[LiteralString] = """
UPDATE state_groups
SET key_nids = NULL, event_nids = NULL, member_key_nids = NULL, member_event_nids = NULL
WHERE room_nid = $1::int AND event_nid IS NOT NULL
    AND COALESCE(key_nids, event_nids, member_key_nids, member_event_nids) IS NOT NULL
"""

SQL_SET_BYTES: Final[LiteralString] = """
UPDATE events e
SET json = i.json
FROM unnest($1::bigint[], $2::bytea[]) AS i (event_nid, json)
WHERE e.event_nid = i.event_nid
"""

BEHIND: Final = 200
"""At most so many events are left to be planned while the room is locked."""

PART: Final = 5_000
"""So many events are planned before they are written."""

ROUNDS_MAX: Final = 20
ATTEMPTS: Final = 10
CONNECTIONS: Final = 2
STATEMENT_TIMEOUT_MS: Final = 3_600_000
EMPTIED_AFTER: Final = 10_000
"""Events of finished rooms in the shadow tables before these are emptied."""

LARGE: Final = 5_000
"""From so many events on, the shadow tables are analysed for the swap."""

AUTHOR: Final = Author(1, "aside", 0)
"""The writer of the shadow tables; no other session sees it."""


class Rebuilt(NamedTuple):
    """The result of a rebuild: changed rows of events, and others.

    ``held_ms``: how long writers of the room waited, at most.
    """

    room_id: str
    planned: int
    events: int
    others: int
    held_ms: float


async def rebuild(
    database: Database,
    room_id: str,
    *,
    server_name: str,
    indexes_compared: bool = False,
    report: Report = silent,
) -> Rebuilt:
    """Rebuild one room in a session of its own. ``server_name``: its users are local.

    ``indexes_compared``: the caller has called `refuse_corrupt_indexes`. Raise `UnknownRoom`. Raise
    `StorageCorrupt`, and change nothing, if an index is corrupt or the input is unreadable.
    """
    if not indexes_compared:
        await refuse_corrupt_indexes(database, "a repair", report=report)
    await register_writer(database)
    async with ShadowTables.opened(database) as shadow:
        return await Rebuilder(database, shadow, server_name).rebuild(room_id, report=report)


async def repair(
    database: Database, findings: Iterable[Finding], *, server_name: str, report: Report = silent
) -> list[str]:
    """Repair what all rooms share, then each room that has repairable findings; return these rooms.

    Known names and numbers come first: a rebuild needs them. A room that cannot be rebuilt stays as
    it is, with a warning. The caller has called `refuse_corrupt_indexes`.
    """
    wanted = dict.fromkeys(one.room_id for one in findings if one.repairable)
    if None in wanted:
        await repair_positions(database, indexes_compared=True)
    rooms: list[str] = [room_id for room_id in wanted if room_id is not None]
    counted = Counted(report, "repair", len(rooms), "rooms")
    for room_id in rooms:
        try:
            await rebuild(
                database,
                room_id,
                server_name=server_name,
                indexes_compared=True,
                report=lambda one: counted.within(one.share),
            )
        except (StorageCorrupt, ConstraintViolated) as error:  # other rooms are repaired
            logger.warning("a room is not repaired: %s", error, extra={"room_id": room_id})
        counted.add()
    return rooms


async def complete(
    database: Database, room_id: str, state: Sequence[EventId], *, server_name: str
) -> bool:
    """Complete the state of a room; return False if it is not partial.

    ``state``: the ids of the whole state before the join, of stored events; ids of events that are
    not stored, or rejected, are left out. ``server_name``: its users are local. Raise
    `UnknownRoom`, or `StorageCorrupt` if an event cannot be planned again: nothing has changed
    then.
    """
    await register_writer(database)
    async with ShadowTables.opened(database) as shadow:
        return await Rebuilder(database, shadow, server_name).complete(room_id, state)


@dataclass(frozen=True, slots=True)
class RebuildInput:
    """A room and its damage, as of one moment.

    ``is_renamed``: accepted events may have other ids than their bytes; else only rejected ones.
    ``wrong_groups``: state groups that are unreadable or contradict their columns.
    """

    room: RebuiltRoom
    is_renamed: bool
    wrong_groups: frozenset[int]
    has_wrong_deltas: bool
    mark: PartialMarkRow | None


class Rebuilder:
    """Rebuilds rooms.

    It takes two connections: one for the shadow tables, one that reads the live ones.
    """

    def __init__(self, database: Database, shadow: ShadowTables, server_name: str) -> None:
        self._database = database
        self._shadow = shadow
        self._server_name = server_name
        self._names = InternedNames(NAMES_REMEMBERED)
        self._shadow_events = 0
        self._shadow_rooms = set[str]()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, dsn: str, server_name: str, config: Config | None = None
    ) -> AsyncIterator[Self]:
        """Open a rebuilder with its own connections; ``config`` None: the environment's."""
        config = replace(
            config or Config.from_env(),
            statement_timeout_ms=STATEMENT_TIMEOUT_MS,
            archive_timeout_ms=MAINTENANCE_MS,
            pool_size_max=CONNECTIONS,
            instance_name="spark maintenance",
        )
        async with (
            await Database.open(dsn, config=config) as database,
            database.connection() as conn,
        ):
            await register_writer(database)
            yield cls(database, await ShadowTables.of(conn), server_name)

    async def rebuild(self, room_id: str, *, report: Report = silent) -> Rebuilt:
        """Rebuild one room.

        Raise `UnknownRoom`. Raise `StorageCorrupt`, and change nothing, if the input is unreadable.
        """

        async def work(entered: RebuildInput) -> Rebuilt:
            return await self._attempt(entered, None, report)

        return await self._until_done(room_id, work)

    async def complete(self, room_id: str, state: Sequence[EventId]) -> bool:
        """Plan a partial room again, with the whole state before its join (`complete`)."""

        async def work(entered: RebuildInput) -> bool:
            if entered.mark is None:
                return False
            async with self._database.connection() as reader:
                completion = await completion_of(reader, entered.room.room_nid, entered.mark, state)
            await self._attempt(entered, completion, silent)
            return True

        return await self._until_done(room_id, work)

    async def _until_done(self, room_id: str, work: Callable[[RebuildInput], Awaitable[T]]) -> T:
        """Attempt work on a room until no other session disturbs it."""
        await self._make_regular(room_id)
        are_compared = False
        for attempt in range(1, ATTEMPTS + 1):
            entered = await self._input(room_id)
            entered = replace(entered, is_renamed=entered.is_renamed or are_compared)
            try:
                return await work(entered)
            except DatabaseConflict:
                if attempt == ATTEMPTS:
                    raise
            except StorageCorrupt:
                if entered.is_renamed:
                    raise
                are_compared = True  # the id of each event with its bytes, which takes time
        raise StorageCorrupt("a rebuild neither ended nor failed", room_id=room_id)

    async def _attempt(
        self, entered: RebuildInput, completion: Completion | None, report: Report
    ) -> Rebuilt:
        room_id = entered.room.room_id
        await self._make_room(room_id)
        async with self._database.connection() as reader:
            total = await event_total(reader, [room_id])
        work = _Work(
            self._database,
            self._shadow,
            entered,
            completion,
            server_name=self._server_name,
            names=self._names,
            counted=Counted(report, "rebuild", total.rows, "events", is_estimate=True),
        )
        self._shadow_events += EMPTIED_AFTER  # unless it comes to its end
        rebuilt = await work.run()
        self._shadow_rooms.add(room_id)
        is_doubtful = work.replay.has_foreign or entered.mark is not None
        self._shadow_events += work.planned - (0 if is_doubtful else EMPTIED_AFTER)
        return rebuilt

    async def _make_regular(self, room_id: str) -> None:
        """Make rows that break a rule readable, if there are any."""
        async with self._database.connection() as reader:
            await reader.execute(SQL_MAKE_PATHS_READABLE, room_id)
            room = await read_room(reader, room_id, self._server_name)
            if await anext(check_row_rules(reader, room), None) is None:
                return

        async def work(conn: Connection) -> None:
            room_nid = await lock_room(conn, room_id)
            await conn.execute(SQL_REGULAR_EVENTS, room_nid)
            await conn.execute(SQL_REGULAR_GROUPS, room_nid)

        await self._database.run(work)

    async def _make_room(self, room_id: str) -> None:
        """Empty the shadow tables if they have much, something doubtful, or this room."""
        if self._shadow_events >= EMPTIED_AFTER or room_id in self._shadow_rooms:
            await self._shadow.empty()
            self._shadow_events = 0
            self._shadow_rooms.clear()

    async def _input(self, room_id: str) -> RebuildInput:
        """Read what the tables have, in one snapshot. Raise `UnknownRoom`."""
        async with self._database.transaction(isolation="repeatable_read", readonly=True) as conn:
            room = await read_room(conn, room_id, self._server_name)
            return RebuildInput(
                RebuiltRoom(room.nid, room_id, room.row.room_version),
                room.stored_version != room.row.room_version,
                await _wrong_groups(conn, room),
                await anext(check_deltas(conn, room), None) is not None,
                await conn.fetchrow(SQL_MARK, room.nid, row=PartialMarkRow),
            )


async def _wrong_groups(conn: Connection, room: VerifiedRoom) -> frozenset[int]:
    return frozenset(
        [int(finding.subject[0].rpartition(" ")[2]) async for finding in check_groups(conn, room)]
    )


@dataclass(slots=True)
class _Work:
    """One attempt at a room."""

    database: Database
    shadow: ShadowTables
    entered: RebuildInput
    completion: Completion | None
    server_name: str
    names: InternedNames
    counted: Counted
    planned: int = 0
    position: int = 0
    matching: Matching = field(init=False)
    replay: RoomReplan = field(init=False)
    planned_room: PlannedRoom = field(init=False)

    def __post_init__(self) -> None:
        self.matching = Matching(self.room.room_nid, self.entered.wrong_groups)
        self.replay = RoomReplan(
            self.shadow,
            self.database,
            self.room,
            server_name=self.server_name,
            names=self.names,
            given={} if self.completion is None else self.completion.given,
        )
        self.planned_room = self.replay.begin(self.room.room_id)

    @property
    def room(self) -> RebuiltRoom:
        return self.entered.room

    async def run(self) -> Rebuilt:
        """Plan until few events are left; then lock the room, plan these, and swap."""
        await self.replay.prepare(is_renamed=self.entered.is_renamed)
        await self._plan_outliers()
        for _ in range(ROUNDS_MAX):
            if await self._plan_timeline() <= BEHIND:
                break
        if self.planned >= LARGE:
            await self.shadow.count()
        for attempt in range(1, ATTEMPTS + 1):
            is_locked = False
            try:
                async with begun(self.shadow.conn) as conn:
                    async with self.shadow.live():
                        await lock_room(conn, self.room.room_id)
                    is_locked = True
                    return await self._finish(conn)
            except DatabaseConflict:
                if is_locked or attempt == ATTEMPTS:
                    raise
        raise StorageCorrupt("a rebuild neither ended nor failed", room_id=self.room.room_id)

    async def _finish(self, conn: Connection) -> Rebuilt:
        """Plan the last events and swap. The room is locked."""
        since = time.perf_counter()
        async with self.database.connection() as reader:
            mark = await reader.fetchrow(SQL_MARK, self.room.room_nid, row=PartialMarkRow)
        if mark != self.entered.mark:
            raise DatabaseConflict("the room became partial or complete during the rebuild")
        await self._plan_outliers()
        await self._plan_timeline()
        self._check_all_planned()
        await self._match_current()
        shadow_nid: int = await conn.fetchval(SQL_ROOM_NID, self.room.room_id)
        async with self.shadow.live(large=self.planned >= LARGE):
            known = await self._known(conn)
            done = await swap(
                conn,
                Differences(
                    self.room,
                    shadow_nid,
                    self.matching,
                    self.server_name,
                    self.replay,
                    has_wrong_deltas=self.entered.has_wrong_deltas,
                ),
                is_completion=known is not None,
            )
            if self.completion is not None and known is not None:
                await end_of_completion(conn, self.room, self.completion, known)
        held_ms = (time.perf_counter() - since) * 1000
        return Rebuilt(self.room.room_id, self.planned, done.events, done.others, held_ms)

    async def _known(self, conn: Connection) -> KnownToReaders | None:
        return None if self.completion is None else await known_to_readers(conn, self.room.room_nid)

    async def _plan_outliers(self) -> None:
        async with self.database.connection() as reader:
            first: list[int] = await reader.fetchvals(SQL_FIRST_CREATE, self.room.room_nid)
            nids: list[int] = await reader.fetchvals(SQL_OUTLIER_NIDS, self.room.room_nid)
        await self._plan(list(dict.fromkeys([*first, *nids])), outliers=True)

    async def _plan_timeline(self) -> int:
        """Plan what is new in the timeline, and return how many events that is."""
        async with self.database.connection() as reader:
            steps = await reader.fetch(
                SQL_TIMELINE_STEPS, self.room.room_nid, self.position, row=TimelineStepRow
            )
        if steps:
            self.position = steps[-1].position
        mark = None if self.completion is not None else self.entered.mark
        for (is_readmission, is_marking), some in groupby(
            steps,
            key=lambda step: (
                step.is_readmission,
                mark is not None and step.event_nid == mark.event_nid,
            ),
        ):
            nids = [step.event_nid for step in some]
            if is_readmission:
                await self._readmit(nids)
                continue
            if is_marking and mark is not None:
                await self.replay.mark_partial(mark.join_event_id)
            await self._plan(nids)
        return len(steps)

    async def _readmit(self, nids: Sequence[int]) -> None:
        """Plan readmissions. Their events are written: `_plan` ends with a write."""
        for nid in nids:
            await self.replay.readmit(nid)
        await self._write()

    async def _plan(self, nids: Sequence[int], *, outliers: bool = False) -> None:
        for start in range(0, len(nids), CHUNK):
            chunk = nids[start : start + CHUNK]
            await self.replay.take(self.planned_room, chunk, outliers=outliers)
            if len(self.replay.change_set.events.new_events) >= PART:
                await self._write()
            self.counted.add(len(chunk))
        await self._write()
        self.planned += len(nids)

    async def _write(self) -> None:
        """Write what is planned into the shadow tables."""
        async with self.database.connection() as reader:
            await self.matching.match(reader, self.replay.change_set, self.replay.arrived)
        self.replay.arrived.clear()
        await self.shadow.check()
        await write_planned(self.replay, AUTHOR, 0)
        renamed = self.replay.renamed
        if renamed:
            await self.shadow.conn.execute(SQL_SET_BYTES, list(renamed), list(renamed.values()))

    def _check_all_planned(self) -> None:
        self.replay.end(self.planned_room)
        for _, line, result in self.replay.failed:
            raise StorageCorrupt(
                f"an event cannot be planned again: {result.reason}",
                event_id=line.event_id,
                missing=list(result.missing),
            )

    async def _match_current(self) -> None:
        shadow: int | None = await self.shadow.conn.fetchval(SQL_CURRENT_GROUP, self.room.room_id)
        async with self.database.connection() as reader:
            live: int | None = await reader.fetchval(SQL_CURRENT_GROUP, self.room.room_id)
            if shadow is not None and live is not None:
                await self.matching.match_current(reader, shadow, live)
