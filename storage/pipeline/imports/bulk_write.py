"""Writing planned rooms: the rows of events take their bytes from where they were put aside; the rest is the live path's write.

One transaction a group of rooms, or a large room; so each room is there whole or not at all. Positions are taken in a block, after
everything is planned, and become visible with the commit, as those of any write (`storage.streams.in_flight`).
"""

import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, LiteralString

from storage.database.array_text import array_text
from storage.database.connection import Connection
from storage.database.names import InternedNames
from storage.errors import DatabaseConflict
from storage.persist.model.change_set import ChangeSet, NidBlocks
from storage.persist.model.results import AppendResult
from storage.persist.write.all_tables import WriteResult, write_around
from storage.persist.write.event_columns import event_columns
from storage.pipeline.imports import stage as stages
from storage.pipeline.imports.plan_rooms import NAMES_REMEMBERED, CannotPlan, RoomPlanner
from storage.pipeline.imports.room_bundles import BundledRoom
from storage.pipeline.imports.slim_event import SlimEvent
from storage.store.open import OpenWriter
from storage.streams.in_flight import Author, InFlight
from storage.streams.position_poller import learn_writers

SQL_LOAD_EVENTS: Final[LiteralString] = """
INSERT INTO events (event_nid, stream_ordering, topological_ordering, depth, origin_server_ts,
    received_ts,
    state_group_before, state_group_after, audience, redacted_by, room_nid, sender_nid, type_nid,
        state_key_nid,
    encoding, writer_nid, membership, outlier, backfilled, soft_failed, redacted_form, event_id,
        rejected, prev_events, auth_events,
    json, ineffective, relates_to, rel_type_nid, replaces, has_url, after_gap)
SELECT i.event_nid, i.stream_ordering, i.topological_ordering, i.depth, i.origin_server_ts,
    $1::bigint,
    i.state_group_before, i.state_group_after, i.audience, i.redacted_by, i.room_nid, i.sender_nid,
        i.type_nid, i.state_key_nid,
    0, $2::smallint, i.membership, i.outlier, i.backfilled, i.soft_failed, i.redacted_form,
        i.event_id, i.rejected,
    i.prev_events::bigint[], i.auth_events::bigint[], staged.json, i.ineffective, i.relates_to,
        i.rel_type_nid, i.replaces, i.has_url,
    i.after_gap
FROM unnest($4::text::bigint[], $5::text::bigint[], $6::text::bigint[], $7::text::bigint[],
    $8::text::bigint[], $9::text::bigint[],
    $10::text::bigint[], $11::text::bigint[], $12::text::bigint[], $13::text::int[],
        $14::text::int[], $15::text::int[],
    $16::text::int[], $17::text::smallint[], $18::text::boolean[], $19::text::boolean[],
        $20::text::boolean[], $21::text::boolean[],
    $22::text::text[], $23::text::text[], $24::text::text[], $25::text::text[], $26::text::bigint[],
        $27::text::boolean[],
    $28::text::bigint[], $29::text::int[], $30::text::boolean[], $31::text::boolean[],
        $32::text::boolean[])
    AS i (event_nid, stream_ordering, topological_ordering, depth, origin_server_ts,
        state_group_before, state_group_after, audience,
        redacted_by, room_nid, sender_nid, type_nid, state_key_nid, membership, outlier, backfilled,
            soft_failed, redacted_form,
        event_id, rejected, prev_events, auth_events, place, ineffective, relates_to, rel_type_nid,
            replaces, has_url, after_gap)
CROSS JOIN LATERAL (
    SELECT json FROM import_events WHERE import_number = $3::int AND place = i.place OFFSET 0
) AS staged
"""

SQL_KNOWN: Final[LiteralString] = """
SELECT room_id
FROM rooms
WHERE room_id = ANY($1::text[])
"""

LINES: Final = 1_000
STREAMS: Final = ("events", "backfill", "caches")


class LoadedLines:
    """What became of the lines of some rooms."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failed: list[tuple[SlimEvent, AppendResult]] = []

    def add(
        self, results: Sequence[AppendResult], failed: Sequence[tuple[SlimEvent, AppendResult]]
    ) -> None:
        """Once they are committed."""
        self.outcomes.update(result.outcome for result in results)
        self.failed += failed


class BulkWriter:
    """Writes rooms that the store does not hold.

    ``number``: of the import; ``part`` events are planned before they are written.
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
        """All of them in one transaction.

        `CannotPlan` if the store holds something of them; `DatabaseConflict`,
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
                for room in rooms:
                    written = await self._room(planner, room) or written
                written = await self._write(planner, is_last=True) or written
            await learn_writers(
                self._store.database, self._store.streams, "events", written.writers
            )
            self._in_flight.answered()
        loaded.add(planner.results, planner.failed)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        async with self._store.database.transaction() as conn:
            self._in_flight.sent(conn)
            yield conn

    async def _room(self, planner: RoomPlanner, bundled: BundledRoom) -> WriteResult | None:
        written = None
        room = planner.begin(bundled.room_id)
        async with self._store.database.connection() as aside:
            if await aside.fetchvals(SQL_KNOWN, [bundled.room_id]):
                raise CannotPlan
        for version, lines in bundled.lines(LINES):
            await planner.plan(room, version, lines)
            if len(planner.change_set.new_events) >= self._part:
                written = await self._write(planner)
        planner.end(room)
        return written

    async def _write(self, planner: RoomPlanner, *, is_last: bool = False) -> WriteResult | None:
        """What is planned, into the open transaction; the last time nothing of it is remembered."""
        return await write_planned(planner, self._in_flight.author, self._number, is_last=is_last)


async def write_planned(
    planner: RoomPlanner, author: Author, number: int, *, is_last: bool = False
) -> WriteResult | None:
    """Write what is planned over the planner's connection; None if that is nothing.

    ``number``: of the import that put the bytes aside.
    """
    change_set = planner.change_set
    if not change_set.has_changes:
        return None
    now = time.time_ns() // 1_000_000
    written = await write_around(planner.connection, change_set, author, now)
    tag = await planner.connection.execute(
        SQL_LOAD_EVENTS, now, author.writer_nid, number, *_rows(change_set, planner, written)
    )
    if int(tag.rpartition(" ")[2]) != len(change_set.new_events):
        raise DatabaseConflict(stages.GONE)
    if not is_last:
        planner.wrote(written.positions)
    return written


def _rows(change_set: ChangeSet, planner: RoomPlanner, written: WriteResult) -> list[object]:
    new = change_set.new_events.values()
    nids, *columns = event_columns([one.row for one in new])
    return [
        nids,
        array_text(
            [None if one.row.outlier else written.positions[one.row.event_nid] for one in new]
        ),
        *columns,
        array_text([planner.places[one.row.event_id] for one in new]),
        array_text([one.row.ineffective for one in new]),
        *map(array_text, change_set.new_relations),
        array_text(change_set.new_urls),
        array_text([nid in change_set.after_gaps or None for nid in change_set.new_events]),
    ]
