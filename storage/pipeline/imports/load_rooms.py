"""The second step of an import: load rooms into the store, in executors.

A task takes whole rooms, several small ones together. Rooms that the store does not have are
planned in memory (`plan_rooms`) and written in bulk (`bulk_write`), each whole or not at all. Rooms
that it has may come from an interrupted import, or get events after the first one. Their new lines
are ordered and appended in batches, as by the live path. So are those of a room with readmissions.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Final

import pyarrow as pa

from storage.errors import CommitUnknown, DatabaseConflict, DatabaseUnavailable
from storage.event import load
from storage.event.ndjson import OUTLIERS
from storage.ids import EventId
from storage.persist.model.incoming import IncomingEvent
from storage.pipeline.imports.append_events import (
    BATCH_MAX,
    ArrivedEvent,
    Loader,
    StoreTarget,
    TaskAttempt,
    spare_collector,
)
from storage.pipeline.imports.bulk_write import BulkWriter, LoadedLines
from storage.pipeline.imports.bundle_files import BundleReader
from storage.pipeline.imports.line_order import LineWithoutPdu as Line
from storage.pipeline.imports.line_order import order
from storage.pipeline.imports.plan_rooms import CannotPlan, FailedLine
from storage.pipeline.imports.room_bundles import BundledRoom, rooms_of
from storage.pipeline.imports.slim_event import SlimEvent, needs
from storage.pipeline.imports.stage import StagedEvent, staged
from storage.pipeline.imports.validate import SQL_HELD, AlreadyStoredRow

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
            rows = await conn.fetch(SQL_HELD, [one.event_id for one in lines], row=AlreadyStoredRow)
        held = {row.event_id: row.outlier for row in rows}
        lacking = [
            one
            for one in lines
            if one.event_id not in held
            or one.readmit
            or (held[one.event_id] and one.origin not in OUTLIERS)
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


def _own_id(one: SlimEvent) -> str:
    """Return the id by which other lines need this one: they need no readmission."""
    return f"readmit {one.event_id}" if one.readmit else one.event_id


def _arrival(pdu: bytes, version: str, one: SlimEvent) -> ArrivedEvent:
    event = load(pdu, version, one.event_id, redacted=not one.valid)
    state_before: Any = one.state_before  # ids of events, as texts
    return ArrivedEvent(
        IncomingEvent(event, one.origin, state_before, refused=one.refused), one.place
    )
