"""Stage rows of a data frame in the database, until the driver stores their rooms.

Rooms span the partitions of a frame, and a task knows only its own rows. So a task stages the bytes
of its rows, and bundles of slim events, in the table `import_events`. Only the locations of the
bundles go to the driver. The driver then has whole rooms, and stores them as an import does. Each
attempt at a task stages at separate places, and only those of the attempt that Spark chose are
read.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, LiteralString, Self

import pyarrow as pa
import uvloop

from storage.codec import encode
from storage.database.arrow_results import ArrowConnection
from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict, InvalidEvent
from storage.event import Event
from storage.persist.write.stored_form import writers_dictionary
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.append_events import BULK_TIMEOUT_MS, StoreTarget
from storage.pipeline.imports.bundle_files import BundleLocation
from storage.pipeline.imports.lines import POSITION, TAKEN, given_of_row, place_of, rows_of
from storage.pipeline.imports.room_bundles import BundledRoom
from storage.pipeline.imports.slim_event import packed, slim_line
from storage.pipeline.imports.validate import BUNDLE, CHUNK, LineValidator

SQL_BUNDLE: Final[LiteralString] = """
SELECT json
FROM import_events
WHERE import_number = $1::int AND place = $2::bigint
"""

Bundle = dict[str, Any]
"""The location of the slim events of a room: the input of `BundledRoom.add`, and ``room_id``."""


@dataclass(frozen=True, slots=True)
class StagingTask:
    """A task of a write.

    ``partition``: its index among the tasks; ``file``: a number that no other attempt has.
    """

    partition: int
    file: int


class RowStager:
    """Stages the rows of one task under the ``number`` of the write.

    A context manager. Raises `DatabaseError`.
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
        self._aside: list[tuple[int, object]] = []
        self.bundles: list[Bundle] = []
        self.refused: list[str] = []

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        try:
            self._conn = self._runner.run(self._opened())
            self._dictionary = self._runner.run(writers_dictionary(self._conn))
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
        """Open one transaction for the whole task.

        While it lasts, no import treats the rows of this write as left over.
        """
        config = replace(self._target.config, pool_size_max=1, statement_timeout_ms=BULK_TIMEOUT_MS)
        database = await self._stack.enter_async_context(
            await Database.open(self._target.dsn, config=config)
        )
        conn = await self._stack.enter_async_context(database.transaction())
        await stages.work(conn, self._number)
        return conn

    def take(self, batch: pa.RecordBatch) -> None:
        """Stage these rows; add the defects of bad ones to ``refused``."""
        for start in range(0, batch.num_rows, CHUNK):
            for row in rows_of(batch.slice(start, CHUNK), (*TAKEN, POSITION)):
                self._add(row)
            self._put()

    def end(self) -> None:
        """Stage the remaining bundles."""
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
        stored = encode(event.raw, event.event_id, event.room_id, self._dictionary)
        self._aside.append((place, stored))
        key = event.room_id, event.room_version.identifier
        *earlier, (rank, last) = given.steps(rank)
        for at, step in earlier:  # far from the others of a bundle: overlapping ones share memory
            self._emit(*key, [slim_line(event, at, place, step)])
        rows = self._rooms.setdefault(key, [])
        rows.append(slim_line(event, rank, place, last))
        if len(rows) >= BUNDLE:
            self._emit(*key, rows)

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
        """Return the bundle staged there. Raise `DatabaseConflict` if it is gone."""
        found = self._conn.rows(SQL_BUNDLE, self._number, place.start)
        if not found:
            raise DatabaseConflict(stages.GONE)
        data: bytes = found[0]["json"]
        return data


def gathered(bundles: Iterable[Bundle], reader: StagedBundles) -> Iterator[BundledRoom]:
    """Yield the rooms of all bundles, in the order of their first ranks."""
    rooms: dict[str, BundledRoom] = {}
    for bundle in sorted(bundles, key=lambda one: int(one["first"])):
        rooms.setdefault(bundle["room_id"], BundledRoom(bundle["room_id"], reader)).add(bundle)
    yield from rooms.values()
