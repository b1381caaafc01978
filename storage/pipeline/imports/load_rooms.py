"""The second step of an import: load rooms into the store, in executors.

A task takes whole rooms, several small ones together. Rooms that the store does not have are
planned in memory (`plan_rooms`) and written in bulk (`bulk_write`), each whole or not at all. Rooms
that it has may come from an interrupted import, or get events after the first one. Their new lines
are ordered and appended in batches, as by the live path. So are those of a room with readmissions.
"""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby, islice
from typing import Any, Final, LiteralString

import pyarrow as pa

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_session
from storage.database.connection import Connection
from storage.database.migrate import HEAD_REVISION
from storage.database.names import InternedNames
from storage.errors import CommitUnknown, DatabaseConflict, DatabaseUnavailable
from storage.event import load
from storage.event.ndjson import OUTLIERS
from storage.ids import EventId
from storage.persist.model.caches import NidBlocks
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import AppendResult
from storage.persist.write.all_tables import WriteResult
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.append_events import (
    BATCH_MAX,
    ArrivedEvent,
    Loader,
    StoreTarget,
    TaskAttempt,
    spare_collector,
)
from storage.pipeline.imports.intern_names import BundleReader
from storage.pipeline.imports.lines import LineWithoutPdu as Line
from storage.pipeline.imports.lines import order
from storage.pipeline.imports.plan_rooms import BundledRoom, rooms_of
from storage.pipeline.imports.stage import StagedEvent, staged, transaction
from storage.pipeline.imports.validate import SQL_STORED, AlreadyStoredRow, needs
from storage.rebuild.planner import (
    NAMES_REMEMBERED,
    CannotPlan,
    FailedLine,
    RoomLines,
    RoomPlanner,
    SlimEvent,
    write_planned,
)
from storage.store.open import OpenWriter
from storage.streams.position_poller import learn_writers
from storage.streams.registry import STREAMS
from storage.streams.startup import SQL_LOCK
from storage.streams.stream_writer import InFlight

# --------------------------------------------------------------------------------------------------
# Write planned rooms.
#
# The rows of events take their bytes from the table where they are staged. The other rows are
# written as `append` writes them. A group of rooms, or one large room, is one transaction; so a
# room is stored whole or not at all. Positions are taken in a block, after everything is planned,
# and become visible with the commit, as those of any write (`storage.streams.stream_writer`).

SQL_STORED_ROOMS: Final[LiteralString] = """
SELECT room_id
FROM rooms
WHERE room_id = ANY($1::text[])
"""

LINES: Final = 1_000
WRITTEN_STREAMS: Final = ("events", "backfill", "caches")


class LoadedLines:
    """The outcomes of the lines of some rooms."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[FailedLine] = []

    def add(self, results: Sequence[AppendResult], failed: Sequence[FailedLine]) -> None:
        """Add the results of rooms, once they are committed."""
        self.outcomes.update(result.outcome for result in results)
        self.failed += failed


class BulkWriter:
    """The writer of rooms that the store does not have.

    ``number``: of the import; ``part``: events that are planned before they are written.
    """

    def __init__(self, store: OpenWriter, number: int, part: int) -> None:
        self._store = store
        self._number = number
        self._part = part
        self._names = InternedNames(sys.maxsize)
        self._blocks = NidBlocks()
        self._in_flight = InFlight(
            store.database, store.streams, WRITTEN_STREAMS, store.identity.writer_nid
        )

    async def load(self, rooms: Sequence[BundledRoom], loaded: LoadedLines) -> None:
        """Load the rooms in one transaction.

        Raise `CannotPlan` if the store has something of them; `DatabaseConflict`;
        `DatabaseUnavailable`.
        """
        if (
            len(self._names.principals) > NAMES_REMEMBERED
            or len(self._names.state_keys) > NAMES_REMEMBERED
        ):
            self._names.forget()
        await self._in_flight.ready()
        written = WriteResult({}, 0)
        with self._in_flight.writing():
            async with self._transaction() as conn:
                await stages.work(conn, self._number)
                planner = RoomPlanner(
                    conn,
                    self._store.database,
                    self._names,
                    self._blocks,
                    self._store.identity.server_name,
                )
                await self._refuse_stored_rooms(rooms)
                if len(rooms) == 1:
                    written = await self._room(planner, rooms[0]) or written
                else:
                    await _plan_small(planner, rooms)
                written = await self._write(planner, is_last=True) or written
            await learn_writers(
                self._store.database, self._store.streams, "events", written.writers
            )
            self._in_flight.answered()
        loaded.add(planner.results, planner.failed)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        try:
            async with self._store.database.transaction() as conn:
                self._in_flight.sent(conn)
                yield conn
        except CannotPlan:
            self._in_flight.answered()  # rolled back: there is nothing to find out
            raise

    async def _refuse_stored_rooms(self, rooms: Sequence[BundledRoom]) -> None:
        async with self._store.database.connection() as conn:
            if await conn.fetchvals(SQL_STORED_ROOMS, [room.room_id for room in rooms]):
                raise CannotPlan

    async def _room(self, planner: RoomPlanner, bundled: BundledRoom) -> WriteResult | None:
        written = None
        room = planner.begin(bundled.room_id)
        for version, lines in bundled.lines(LINES):
            await planner.plan([RoomLines(room, version, lines)])
            if len(planner.change_set.events.new_events) >= self._part:
                written = await self._write(planner)
        planner.end(room)
        return written

    async def _write(self, planner: RoomPlanner, *, is_last: bool = False) -> WriteResult | None:
        """Write what is planned into the open transaction; forget it the last time."""
        return await write_planned(planner, self._in_flight.author, self._number, is_last=is_last)


async def _plan_small(planner: RoomPlanner, rooms: Sequence[BundledRoom]) -> None:
    """Plan rooms that are written together: all of their lines are in memory at once."""
    begun = [(planner.begin(room.room_id), room) for room in rooms]
    await planner.plan(
        [
            RoomLines(planned, version, lines)
            for planned, room in begun
            for version, lines in room.lines(LINES)
        ]
    )
    for planned, _ in begun:
        planner.end(planned)


ATTEMPTS: Final = 3
CREATE: Final = ("m.room.create", "")

LOADED: Final = pa.schema(
    [
        ("place", pa.int64()),
        ("outcome", pa.string()),
        ("events", pa.int64()),
        ("event_id", pa.string()),
        ("reason", pa.string()),
        ("missing", pa.list_(pa.string())),
        ("pdu", pa.binary()),
    ]
)
"""The results: one row for each event that was not stored, and one per outcome for the others."""


def load_rooms(
    target: StoreTarget,
    number: int,
    work: str,
    attempt: TaskAttempt,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Store the rooms of sorted bundles in the folder ``work``; yield rows of `LOADED`.

    ``number``: of the import; ``attempt``: at the task.
    """
    spare_collector()
    with BundleReader(work) as reader, Loader(target, attempt) as loader:
        rooms = RoomLoader(loader, number, target.part)
        for group in grouped(rooms_of(batches, reader), target.part):
            if len(group) > 1:
                reader.fetch(place for room in group for place in room.places)
            yield from rooms.load(group)
        yield rooms.counts()


def grouped(rooms: Iterable[BundledRoom], part: int) -> Iterator[list[BundledRoom]]:
    """Yield groups of rooms that make up one write; a large room alone."""
    group: list[BundledRoom] = []
    events = 0
    for room in rooms:
        if group and events + room.events > part:
            yield group
            group, events = [], 0
        group.append(room)
        events += room.events
    if group:
        yield group


class RoomLoader:
    """Stores rooms, in bulk where possible."""

    def __init__(self, loader: Loader, number: int, part: int) -> None:
        self._loader = loader
        self._number = number
        self._bulk = BulkWriter(loader.store, number, part)
        self._loaded = LoadedLines()

    def load(self, rooms: Sequence[BundledRoom]) -> Iterator[pa.RecordBatch]:
        """Store these rooms; yield those that were not stored."""
        self._loader.runner.run(self._load(rooms))
        failed, self._loaded.failed = self._loaded.failed, []
        if failed:
            yield self._loader.runner.run(self._rejects(failed))

    def counts(self) -> pa.RecordBatch:
        """Return a row for each outcome."""
        outcomes = self._loaded.outcomes + self._loader.outcomes  # of events that are stored
        return pa.RecordBatch.from_pylist(
            [{"outcome": name, "events": count} for name, count in sorted(outcomes.items())],
            schema=LOADED,
        )

    async def _load(self, rooms: Sequence[BundledRoom]) -> None:
        if await self._in_bulk(rooms):
            return
        for room in rooms:
            if len(rooms) == 1 or not await self._in_bulk([room]):
                await self._append(room)

    async def _in_bulk(self, rooms: Sequence[BundledRoom]) -> bool:
        """Return whether they were stored in bulk.

        Raise `DatabaseUnavailable` if the database cannot be reached.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                await self._bulk.load(rooms, self._loaded)
            except CannotPlan:
                return False
            except DatabaseConflict:
                if attempt == ATTEMPTS:
                    return False
            except (CommitUnknown, DatabaseUnavailable):
                if attempt == ATTEMPTS:
                    raise
            else:
                return True
        return False

    async def _append(self, room: BundledRoom) -> None:
        """Append a room by the live path, in the order of `line_order`, by ids alone.

        Stored events are skipped.
        """
        lines = [
            (version, one)
            for version, some in room.lines(BATCH_MAX)
            for one in await self._lacking(some)
        ]
        creates = [
            one.event_id
            for _, one in lines
            if (one.type, one.state_key) == CREATE and not one.second
        ]
        ordered = order(
            [
                Line(
                    _own_id(one),
                    one.origin in OUTLIERS,
                    [*needs(one, room.room_id, version), *(creates if one.second else ())],
                )
                for version, one in lines
            ]
        )
        queue = lines if ordered is None else [lines[index] for index in ordered]
        for is_readmission, group in groupby(queue, lambda line: line[1].readmit):
            some = list(group)
            await (
                self._readmit(room.room_id, some)
                if is_readmission
                else self._append_lines(room.room_id, some)
            )

    async def _append_lines(self, room_id: str, lines: Sequence[tuple[str, SlimEvent]]) -> None:
        queue = iter(lines)
        while some := list(islice(queue, BATCH_MAX)):
            pdus = await self._staged([(room_id, one) for _, one in some])
            arrivals = [
                _arrival(pdu, version, one) for pdu, (version, one) in zip(pdus, some, strict=True)
            ]
            slims = {one.place: one for _, one in some}
            self._loaded.failed += [
                FailedLine(room_id, slims[one.place], result)
                for one, result in await self._loader.appended(arrivals)
            ]

    async def _readmit(self, room_id: str, lines: Sequence[tuple[str, SlimEvent]]) -> None:
        for _, one in lines:
            result = await self._loader.readmitted(EventId(one.event_id))
            if not result.is_stored:
                self._loaded.failed.append(FailedLine(room_id, one, result))

    async def _lacking(self, lines: Sequence[SlimEvent]) -> list[SlimEvent]:
        """Return the lines that the store lacks; an outlier may still enter the timeline."""
        async with self._loader.store.database.connection() as conn:
            rows = await conn.fetch(
                SQL_STORED, [one.event_id for one in lines], row=AlreadyStoredRow
            )
        stored = {row.event_id: row.outlier for row in rows}
        lacking = [
            one
            for one in lines
            if one.event_id not in stored
            or one.readmit
            or (stored[one.event_id] and one.origin not in OUTLIERS)
        ]
        self._loaded.outcomes["duplicate"] += len(lines) - len(lacking)
        return lacking

    async def _staged(self, lines: Iterable[tuple[str, SlimEvent]]) -> list[bytes]:
        events = [StagedEvent(one.place, one.event_id, room_id) for room_id, one in lines]
        async with self._loader.store.database.connection() as conn:
            return await staged(conn, self._number, events)

    async def _rejects(self, failed: Sequence[FailedLine]) -> pa.RecordBatch:
        """Return a row for each failed event."""
        pdus = await self._staged((room_id, one) for room_id, one, _ in failed)
        rows: list[dict[str, Any]] = [
            {
                "place": one.place,
                "outcome": result.outcome,
                "events": 1,
                "event_id": one.event_id,
                "reason": result.reason,
                "missing": list(result.missing),
                "pdu": pdu,
            }
            for (_, one, result), pdu in zip(failed, pdus, strict=True)
        ]
        return pa.RecordBatch.from_pylist(rows, schema=LOADED)


def _own_id(event: SlimEvent) -> str:
    """Return the id by which other lines need this one: they need no readmission."""
    return f"readmit {event.event_id}" if event.readmit else event.event_id


def _arrival(pdu: bytes, version: str, slim_event: SlimEvent) -> ArrivedEvent:
    event = load(pdu, version, slim_event.event_id, redacted=not slim_event.valid)
    state_before: Any = slim_event.state_before  # ids of events, as texts
    return ArrivedEvent(
        IncomingEvent(event, slim_event.origin, state_before, refused=slim_event.refused),
        slim_event.place,
    )


# --------------------------------------------------------------------------------------------------
# Names of writers for the tasks of a load, registered before the first of them writes.
#
# A process that enters under a new name waits for running writes, and a large room is one write of
# many seconds. A task that begins beside it would wait, and keep others waiting. Under a name that
# is known, it enters at once (`storage.streams.startup`).

SQL_UNKNOWN: Final[LiteralString] = """
SELECT name
FROM unnest($1::text[]) AS name
WHERE NOT EXISTS (SELECT FROM writers WHERE instance_name = name)
    OR EXISTS (
        SELECT FROM unnest($2::text[]) AS stream
        WHERE NOT EXISTS (
            SELECT FROM stream_positions WHERE stream_name = stream AND instance_name = name
        )
    )
"""

SQL_PATIENCE: Final[LiteralString] = """
SET LOCAL lock_timeout = '1s'
"""

SQL_WRITERS: Final[LiteralString] = """
WITH named AS (
    INSERT INTO writers (instance_name, schema_revision)
    SELECT name, $2::text
    FROM unnest($1::text[]) AS name
    WHERE name NOT IN (SELECT instance_name FROM writers)
    ON CONFLICT (instance_name) DO NOTHING
    RETURNING 1
)
SELECT count(*) AS writers FROM named
"""

SQL_POSITIONS: Final[LiteralString] = """
WITH sequence AS (
    SELECT stream_name, COALESCE(pg_sequence_last_value(name::regclass), 1) AS last
    FROM unnest($2::text[], $3::text[]) AS s (stream_name, name)
),
entered AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id, entered_at)
    SELECT s.stream_name, name, s.last, s.last
    FROM unnest($1::text[]) AS name
    CROSS JOIN sequence s
    ON CONFLICT (stream_name, instance_name) DO NOTHING
    RETURNING 1
)
SELECT count(*) AS positions FROM entered
"""


def register_names(dsn: str, names: Sequence[str], *, config: Config) -> None:
    """Register writers that are not known, if no write runs for longer than a second.

    Otherwise a task does so itself, when it can. Raise `DatabaseError`.
    """
    with arrow_session(dsn, config=config) as conn:
        unknown = [row["name"] for row in conn.rows(SQL_UNKNOWN, list(names), list(STREAMS))]
        if unknown:  # else there is no reason to lock the table
            with suppress(DatabaseConflict), transaction(conn):
                _register(conn, unknown)


def _register(conn: ArrowConnection, names: list[str]) -> None:
    conn.execute(SQL_PATIENCE)
    conn.execute(SQL_LOCK)
    conn.rows(SQL_WRITERS, names, HEAD_REVISION)
    sequences = [one.sequence for one in STREAMS.values()]
    conn.rows(SQL_POSITIONS, names, list(STREAMS), sequences)
