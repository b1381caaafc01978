"""Rows of a data frame, staged in the database by tasks, until the driver stores their rooms.

Rooms span the partitions of a frame, and a task knows its own rows only. So a task stages the bytes
of its rows, and bundles of slim events, in the table `import_events`; what goes to the driver is
where the bundles are. The driver then has whole rooms, and stores them as an import does. Each
attempt at a task stages at places of its own: only those of the attempt that Spark has chosen are
read.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, LiteralString, Self

import pyarrow as pa
import uvloop

from storage.database.arrow import ArrowConnection
from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict, InvalidEvent
from storage.event import Event
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.append_events import BULK_TIMEOUT_MS, StoreTarget
from storage.pipeline.imports.bundle_files import BundleLocation
from storage.pipeline.imports.lines import POSITION, TAKEN, given_of_row, place_of, rows_of
from storage.pipeline.imports.room_bundles import BundledRoom
from storage.pipeline.imports.slim_event import packed, slim
from storage.pipeline.imports.validate import BUNDLE, CHUNK, LineValidator

SQL_BUNDLE: Final[LiteralString] = """
SELECT json
FROM import_events
WHERE import_number = $1::int AND place = $2::bigint
"""

Bundle = dict[str, Any]
"""Where the slim events of a room are: what `BundledRoom.add` takes, and ``room_id``."""


@dataclass(frozen=True, slots=True)
class StagingTask:
    """A task of a write.

    ``partition``: its place among the others; ``file``: a number that no other attempt has.
    """

    partition: int
    file: int


class RowStager:
    """Stages the rows of one task under the ``number`` of the write.

    A context manager. `DatabaseError`.
    """

    def __init__(
        self, target: StoreTarget, number: int, source: StagingTask, examiner: LineValidator
    ) -> None:
        self._target = target
        self._number = number
        self._source = source
        self._examiner = examiner
        self._line = 0
        self._rooms: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
        self._aside: list[tuple[int, bytes]] = []
        self.bundles: list[Bundle] = []
        self.refused: list[str] = []

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        try:
            self._conn = self._runner.run(self._opened())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()

    async def _opened(self) -> Connection:
        """One transaction as long as the task: while it lasts, no import takes the rows of this write for left over."""
        config = replace(self._target.config, pool_size_max=1, statement_timeout_ms=BULK_TIMEOUT_MS)
        database = await self._stack.enter_async_context(
            await Database.open(self._target.dsn, config=config)
        )
        conn = await self._stack.enter_async_context(database.transaction())
        await stages.work(conn, self._number)
        return conn

    def take(self, batch: pa.RecordBatch) -> None:
        """Stage these rows. What is wrong with one goes to ``refused``."""
        for start in range(0, batch.num_rows, CHUNK):
            for row in rows_of(batch.slice(start, CHUNK), (*TAKEN, POSITION)):
                self._add(row)
            self._put()

    def end(self) -> None:
        """Stage what is left of the bundles."""
        for (room_id, version), rows in self._rooms.items():
            if rows:
                self._emit(room_id, version, rows)
        self._put()

    def _add(self, row: dict[str, Any]) -> None:
        try:
            given = given_of_row(row)
        except InvalidEvent as error:
            self.refused.append(str(error))
            return
        event = self._examiner.parsed(given)
        if not isinstance(event, Event):
            self.refused.append(f"{event.event_id}: {event.reason}")
            return
        place = self._place()
        rank = (
            (row[POSITION] or 0)
            if POSITION in row
            else place_of(self._source.partition, self._line)
        )
        self._aside.append((place, event.raw))
        rows = self._rooms.setdefault((event.room_id, event.room_version.identifier), [])
        rows.append(slim(event, rank, place, given.origin, given.state_before))
        if len(rows) >= BUNDLE:
            self._emit(event.room_id, event.room_version.identifier, rows)

    def _place(self) -> int:
        self._line += 1
        return place_of(self._source.file, self._line)

    def _emit(self, room_id: str, version: str, rows: list[tuple[Any, ...]]) -> None:
        data, place, ranks = packed(rows), self._place(), [row[0] for row in rows]
        self._aside.append((place, data))
        where = {"file": "", "start": place, "length": len(data)}
        within = {"path_index": 0, "first": min(ranks), "last": max(ranks), "events": len(rows)}
        self.bundles.append({"room_id": room_id, "room_version": version, **within, **where})
        rows.clear()

    def _put(self) -> None:
        aside, self._aside = self._aside, []
        self._runner.run(stages.put(self._conn, self._number, aside))


class StagedBundles:
    """Reads the bundles of a write: the ``reader`` of a `BundledRoom`."""

    def __init__(self, conn: ArrowConnection, number: int) -> None:
        self._conn = conn
        self._number = number

    def get(self, place: BundleLocation) -> bytes:
        """What was staged there. `DatabaseConflict` if it is gone."""
        found = self._conn.rows(SQL_BUNDLE, self._number, place.start)
        if not found:
            raise DatabaseConflict(stages.GONE)
        data: bytes = found[0]["json"]
        return data


def gathered(bundles: Iterable[Bundle], reader: StagedBundles) -> Iterator[BundledRoom]:
    """The rooms of all bundles, in the order in which they begin."""
    rooms: dict[str, BundledRoom] = {}
    for bundle in sorted(bundles, key=lambda one: int(one["first"])):
        rooms.setdefault(bundle["room_id"], BundledRoom(bundle["room_id"], reader)).add(bundle)
    yield from rooms.values()
