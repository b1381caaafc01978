"""Poll stream_positions to follow other writers when there is no replication connection.

Each process periodically reads `stream_positions`. Where another writer has moved, it reads that
writer's facts between and publishes them. It also moves the positions of idle writers, so that they
delay no reader: its own in streams in which it has nothing in flight, and those of writers without
a live session. All ids that a sequence has returned so far then belong to others, or were not used.
The sequence is read first, so a writer that starts in between takes a larger id.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import StorageError
from storage.observability.counters import Outage
from storage.streams.feed import StreamRow, whole_ids
from storage.streams.registry import Streams
from storage.streams.startup import join

logger: logging.Logger = logging.getLogger(__name__)

ROWS_AT_ONCE: Final = 1_000
EVERYTHING: Final = (1 << 63) - 1

SQL_SEQUENCES: Final[LiteralString] = """
SELECT s.stream_name, COALESCE(pg_sequence_last_value(s.sequence_name::regclass), 1) AS stream_id
FROM unnest($1::text[], $2::text[]) AS s (stream_name, sequence_name)
"""

SQL_MOVE_IDLE: Final[LiteralString] = """
WITH idle AS (
    SELECT p.stream_name, p.instance_name, s.stream_id
    FROM stream_positions p
    JOIN unnest($2::text[], $3::bigint[], $4::int[]) AS s (stream_name, stream_id, idle_epoch)
        USING (stream_name)
    WHERE p.stream_id < s.stream_id
        AND (
            (p.instance_name = $1::text AND p.epoch = s.idle_epoch)
            OR NOT EXISTS (
                SELECT FROM pg_stat_activity a
                    WHERE a.datname = current_database()
                        AND is_session_of(a.application_name, p.instance_name)
            )
        )
    FOR UPDATE OF p SKIP LOCKED  -- in use: its holder moves it, or a later poll
)
UPDATE stream_positions p
SET stream_id = idle.stream_id
FROM idle
WHERE p.stream_name = idle.stream_name AND p.instance_name = idle.instance_name
    AND p.stream_id < idle.stream_id
"""

SQL_POSITIONS: Final[LiteralString] = """
SELECT stream_name, instance_name, stream_id, entered_at
FROM stream_positions
"""


class LastIdRow(NamedTuple):
    """The last id that the sequence of a stream has returned."""

    stream_name: str
    stream_id: int


class FollowedPositionRow(NamedTuple):
    """The position of a writer in a stream, and its start."""

    stream_name: str
    instance_name: str
    stream_id: int
    entered_at: int


async def follow(
    database: Database,
    streams: Streams,
    *,
    every_ms: int,
    read_streams: Collection[str] | None = None,
) -> None:
    """Poll until cancelled.

    After any error of the store, log it and poll again the next time. A file of the DSN, for
    example, may be missing for a moment. `Measures.streams_polled_at` has the time of the last poll
    that ended well.

    ``read_streams`` are the streams whose facts are read; of the others only positions are read.
    None: all streams, and those that are defined meanwhile.
    """
    outage = Outage(logger, "the database")
    while True:
        await asyncio.sleep(every_ms / 1000)
        try:
            await follow_once(database, streams, read_streams)
        except StorageError as error:
            outage.failed(f"the positions of the streams cannot be read: {error}")
        else:
            outage.recovered()
            database.measures.streams_polled_at = time.monotonic()


async def follow_once(
    database: Database, streams: Streams, read_streams: Collection[str] | None = None
) -> None:
    """Move idle writers, catch up with the others, and settle own writes with lost responses."""
    for settle in list(streams.unsettled):
        await settle()
    async with database.connection() as conn:
        if not streams.read_only:
            await move_idle(conn, streams)
        rows = await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow)
        _meet(streams, rows)
        for row in rows:
            if row.stream_name in streams:
                if _is_read(streams, row, read_streams):
                    await _catch_up(conn, streams, row)
                else:
                    _move(streams, row)
    if streams.read_only:
        streams.keep_up()
    if read_streams is None and (
        streams.to_enter or any(row.stream_name not in streams for row in rows)
    ):
        await join(database, streams)


async def follow_writer(
    conn: Connection, streams: Streams, stream_name: str, instance_name: str
) -> None:
    """Catch up with one writer of one stream now, without waiting for the next poll."""
    rows = await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow)
    _meet(streams, rows)
    for row in rows:
        if (row.stream_name, row.instance_name) == (stream_name, instance_name):
            await _catch_up(conn, streams, row)


def _is_read(
    streams: Streams, row: FollowedPositionRow, read_streams: Collection[str] | None
) -> bool:
    """Return whether the facts of a writer are read, beside its position."""
    is_requested = read_streams is None or row.stream_name in read_streams
    return is_requested and row.instance_name != streams.instance_name


async def learn_writers(
    database: Database, streams: Streams, stream_name: str, writers: int
) -> None:
    """Learn the writers of a stream that this process does not know yet.

    ``writers`` is their total number. Call it after a write and before its position is published. A
    write sees every writer that may have taken a smaller id, because nobody becomes a writer during
    a write (`storage.streams.startup`). So the linear position never passes an unknown writer.
    """
    if writers <= len(streams[stream_name].positions()):
        return
    async with database.connection() as conn:
        _meet(streams, await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow))


async def missed_rows(
    conn: Connection, streams: Streams, names: Sequence[str]
) -> dict[str, tuple[int, list[StreamRow]]]:
    """Read the facts that this process committed without publishing them.

    Return by stream its position in the table, and its facts up to there. Learn all writers, so
    that the positions may be published.
    """
    positions = await conn.fetch(SQL_POSITIONS, row=FollowedPositionRow)
    _meet(streams, positions)
    missed: dict[str, tuple[int, list[StreamRow]]] = {}
    for row in positions:
        if row.stream_name in names and row.instance_name == streams.instance_name:
            stream = streams[row.stream_name]
            published = stream.positions()[row.instance_name]
            rows = await stream.declaration.read(
                conn, published, row.stream_id, row.instance_name, EVERYTHING
            )
            missed[row.stream_name] = row.stream_id, rows
    return missed


def _meet(streams: Streams, rows: Iterable[FollowedPositionRow]) -> None:
    """Add new writers, before any position passes the ids that they may have in flight."""
    for row in rows:
        if (
            row.stream_name in streams
            and row.instance_name not in streams[row.stream_name].positions()
        ):
            streams.meet(row.stream_name, row.instance_name, row.entered_at)


async def move_idle(conn: Connection, streams: Streams) -> None:
    """Move the positions of idle writers: of this process, and of processes that have ended."""
    names = list(streams)
    sequences = [streams[name].declaration.sequence for name in names]
    last_ids = await conn.fetch(SQL_SEQUENCES, names, sequences, row=LastIdRow)
    lagging = [
        row
        for row in last_ids
        if any(at < row.stream_id for at in streams[row.stream_name].positions().values())
    ]
    if lagging:
        idle = [
            None
            if streams.is_writing(row.stream_name)
            else streams.writer_epochs.get(row.stream_name, 0)
            for row in lagging
        ]
        names, numbers = [row.stream_name for row in lagging], [row.stream_id for row in lagging]
        await conn.execute(SQL_MOVE_IDLE, streams.instance_name, names, numbers, idle)


async def _catch_up(conn: Connection, streams: Streams, row: FollowedPositionRow) -> None:
    """Publish the facts of another writer up to its position in the table."""
    stream = streams[row.stream_name]
    position = stream.positions().get(row.instance_name, 0)
    limit = ROWS_AT_ONCE
    while position < row.stream_id:
        page = await stream.declaration.read(
            conn, position, row.stream_id, row.instance_name, limit
        )
        whole = whole_ids(page, limit)
        if whole is None:
            whole, position = page, row.stream_id
        elif whole:
            position = whole[-1].stream_id
        else:
            limit *= 2
            continue
        streams.advance(row.stream_name, row.instance_name, position, whole, local=False)


def _move(streams: Streams, row: FollowedPositionRow) -> None:
    """Move a writer to its position in the table, without reading its facts."""
    own = row.instance_name == streams.instance_name
    if not (own and streams.is_writing(row.stream_name)):
        streams.advance(row.stream_name, row.instance_name, row.stream_id, (), local=own)
