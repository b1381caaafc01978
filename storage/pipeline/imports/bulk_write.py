"""Write planned rooms.

The rows of events take their bytes from the table where they are staged. The other rows are written
as `append` writes them. A group of rooms, or one large room, is one transaction; so a room is
stored whole or not at all. Positions are taken in a block, after everything is planned, and become
visible with the commit, as those of any write (`storage.streams.in_flight`).
"""

import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, LiteralString

from storage.database.columns import EVENTS
from storage.database.connection import Connection
from storage.database.names import InternedNames
from storage.database.placeholders import ColumnValues, InputValue, NumberedStatement, compose
from storage.errors import DatabaseConflict
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.nid_blocks import NidBlocks
from storage.persist.model.results import AppendResult
from storage.persist.write.all_tables import WriteResult, write_around
from storage.persist.write.event_columns import new_columns_but_bytes
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.plan_rooms import (
    NAMES_REMEMBERED,
    CannotPlan,
    FailedLine,
    RoomLines,
    RoomPlanner,
)
from storage.pipeline.imports.room_bundles import BundledRoom
from storage.store.open import OpenWriter
from storage.streams.in_flight import Author, InFlight
from storage.streams.position_poller import learn_writers

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

SQL_KNOWN: Final[LiteralString] = """
SELECT room_id
FROM rooms
WHERE room_id = ANY($1::text[])
"""

LINES: Final = 1_000
STREAMS: Final = ("events", "backfill", "caches")


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
            store.database, store.streams, STREAMS, store.identity.writer_nid
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
                await self._refuse_known(rooms)
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

    async def _refuse_known(self, rooms: Sequence[BundledRoom]) -> None:
        async with self._store.database.connection() as aside:
            if await aside.fetchvals(SQL_KNOWN, [room.room_id for room in rooms]):
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
        raise DatabaseConflict(stages.GONE)
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
