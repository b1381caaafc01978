"""Rebuild rooms, one after the other, in one session."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Final, LiteralString, NamedTuple, Self

from storage.config import Config
from storage.database.archived_bytes import MAINTENANCE_MS
from storage.database.connection import Database
from storage.database.names import InternedNames
from storage.database.pool import begun
from storage.errors import DatabaseConflict, StorageCorrupt, UnknownRoom
from storage.ids import RoomId
from storage.maintenance.verify.event_loader import SQL_ROOM, VerifiedRoom, VerifiedRoomRow
from storage.maintenance.verify.states import check_groups
from storage.persist.room_lock import lock_room
from storage.pipeline.imports.append_events import PART
from storage.pipeline.imports.load_rooms import write_planned
from storage.pipeline.imports.plan_rooms import NAMES_REMEMBERED, PlannedRoom
from storage.pipeline.rebuilding.arrivals import (
    SQL_FIRST_CREATE,
    SQL_LIVE_ROOM,
    SQL_OUTLIER_NIDS,
    SQL_TIMELINE_STEPS,
    LiveRoomRow,
    TimelineStepRow,
)
from storage.pipeline.rebuilding.match import Matching
from storage.pipeline.rebuilding.replan import CHUNK, RoomReplan
from storage.pipeline.rebuilding.shadow_tables import ShadowTables
from storage.pipeline.rebuilding.swap import swap
from storage.queries.gaps import refuse_partial
from storage.streams.invalidate_caches import register_writer
from storage.streams.stream_writer import Author

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

BEHIND: Final = 200
"""At most so many events are left to be planned while the room is locked."""

ROUNDS_MAX: Final = 20
HOLD_ATTEMPTS: Final = 10
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


class Rebuilder:
    """Rebuilds rooms.

    It takes two connections: one for the shadow tables, one that reads the live ones.
    """

    def __init__(self, database: Database, aside: ShadowTables, server_name: str) -> None:
        self._database = database
        self._aside = aside
        self._server_name = server_name
        self._names = InternedNames(NAMES_REMEMBERED)
        self._events_aside = 0
        self._rooms_aside = set[str]()

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

    async def rebuild(self, room_id: str) -> Rebuilt:
        """Rebuild one room.

        Raise `UnknownRoom`, or `PartialState` while members of the room are missing. Raise
        `StorageCorrupt`, and change nothing, if the input is unreadable.
        """
        async with self._database.connection() as reader:
            live = await reader.fetchrow(SQL_LIVE_ROOM, room_id, row=LiveRoomRow)
            if live is None:
                raise UnknownRoom(room_id)
            await refuse_partial(reader, RoomId(room_id))
        await self._make_room(room_id)
        matching = Matching(await self._wrong_groups(room_id))
        work = _Work(
            self._database,
            self._aside,
            live,
            server_name=self._server_name,
            names=self._names,
            matching=matching,
        )
        self._events_aside += EMPTIED_AFTER  # unless it comes to its end
        rebuilt = await work.run()
        self._rooms_aside.add(room_id)
        self._events_aside += work.planned - (0 if work.replay.has_foreign else EMPTIED_AFTER)
        return rebuilt

    async def _make_room(self, room_id: str) -> None:
        """Empty the shadow tables if they have much, something doubtful, or this room."""
        if self._events_aside >= EMPTIED_AFTER or room_id in self._rooms_aside:
            await self._aside.empty()
            self._events_aside = 0
            self._rooms_aside.clear()

    async def _wrong_groups(self, room_id: str) -> frozenset[int]:
        """Return the state groups of a room that are unreadable or contradict their columns."""
        async with self._database.transaction(isolation="repeatable_read", readonly=True) as conn:
            row = await conn.fetchrow(SQL_ROOM, room_id, row=VerifiedRoomRow)
            if row is None:
                raise UnknownRoom(room_id)
            findings = check_groups(conn, VerifiedRoom(row, self._server_name))
            return frozenset(
                [int(finding.subject[0].rpartition(" ")[2]) async for finding in findings]
            )


class _Work:
    """The rebuild of one room."""

    def __init__(
        self,
        database: Database,
        aside: ShadowTables,
        live: LiveRoomRow,
        *,
        server_name: str,
        names: InternedNames,
        matching: Matching,
    ) -> None:
        self._database = database
        self._aside = aside
        self._server_name = server_name
        self._live = live
        self._matching = matching
        self._position = 0
        self._is_held = False
        self.planned = 0
        self.replay = RoomReplan(aside, database, server_name, names, live)
        self._room: PlannedRoom = self.replay.begin(live.room_id)

    async def run(self) -> Rebuilt:
        """Plan until few events are left; then lock the room, plan these, and swap."""
        await self._plan_outliers()
        for _ in range(ROUNDS_MAX):
            if await self._plan_timeline() <= BEHIND:
                break
        if self.planned >= LARGE:
            await self._aside.count()
        for attempt in range(1, HOLD_ATTEMPTS + 1):
            self._is_held = False
            try:
                return await self._finish()
            except DatabaseConflict:
                if self._is_held or attempt == HOLD_ATTEMPTS:
                    raise
        raise StorageCorrupt("a rebuild neither ended nor failed", room_id=self._live.room_id)

    async def _finish(self) -> Rebuilt:
        room_id = self._live.room_id
        async with begun(self._aside.conn) as conn:
            async with self._aside.live():
                await lock_room(conn, room_id)
            self._is_held, since = True, time.perf_counter()
            await self._plan_outliers()
            await self._plan_timeline()
            self._complete()
            await self._match_current()
            aside_nid: int = await conn.fetchval(SQL_ROOM_NID, room_id)
            async with self._aside.live(large=self.planned >= LARGE):
                done = await swap(conn, self._live, aside_nid, self._matching, self._server_name)
        return Rebuilt(
            room_id, self.planned, done.events, done.others, (time.perf_counter() - since) * 1000
        )

    async def _plan_outliers(self) -> None:
        async with self._database.connection() as reader:
            first: list[int] = await reader.fetchvals(SQL_FIRST_CREATE, self._live.room_nid)
            nids: list[int] = await reader.fetchvals(SQL_OUTLIER_NIDS, self._live.room_nid)
        await self._plan(list(dict.fromkeys([*first, *nids])), outliers=True)

    async def _plan_timeline(self) -> int:
        """Plan what is new in the timeline, and return how many events that is."""
        async with self._database.connection() as reader:
            steps = await reader.fetch(
                SQL_TIMELINE_STEPS, self._live.room_nid, self._position, row=TimelineStepRow
            )
        if steps:
            self._position = steps[-1].position
        for is_readmission, some in groupby(steps, key=attrgetter("is_readmission")):
            nids = [step.event_nid for step in some]
            await (self._readmit(nids) if is_readmission else self._plan(nids))
        return len(steps)

    async def _readmit(self, nids: Sequence[int]) -> None:
        """Plan readmissions. Their events are written: `_plan` ends with a write."""
        for nid in nids:
            await self.replay.readmit(nid)
        await self._write()

    async def _plan(self, nids: Sequence[int], *, outliers: bool = False) -> None:
        for start in range(0, len(nids), CHUNK):
            await self.replay.take(self._room, nids[start : start + CHUNK], outliers=outliers)
            if len(self.replay.change_set.events.new_events) >= PART:
                await self._write()
        await self._write()
        self.planned += len(nids)

    async def _write(self) -> None:
        """Write what is planned into the shadow tables."""
        async with self._database.connection() as reader:
            await self._matching.match(reader, self.replay.change_set, self.replay.arrived)
        self.replay.arrived.clear()
        await self._aside.check()
        await write_planned(self.replay, AUTHOR, 0)

    def _complete(self) -> None:
        self.replay.end(self._room)
        for _, one, result in self.replay.failed:
            raise StorageCorrupt(
                f"an event cannot be planned again: {result.reason}",
                event_id=one.event_id,
                missing=list(result.missing),
            )

    async def _match_current(self) -> None:
        aside: int | None = await self._aside.conn.fetchval(SQL_CURRENT_GROUP, self._live.room_id)
        async with self._database.connection() as reader:
            live: int | None = await reader.fetchval(SQL_CURRENT_GROUP, self._live.room_id)
            if aside is not None and live is not None:
                await self._matching.match_current(reader, aside, live)
