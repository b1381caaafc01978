"""Tokens and streams across a restore: positions continue far higher, and readers skip the gap.

Lost facts do not count as known.
"""

import os
from collections.abc import AsyncIterator
from typing import Any, LiteralString

import asyncpg
import pytest

pytest.importorskip("pyspark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import storage
from storage.database.arrow_results import ArrowConnection
from storage.errors import ResyncNeeded
from storage.pipeline.source.filters import Options
from storage.pipeline.source.reader import EventReader
from storage.pipeline.source.stream import EventStream
from storage.streams.restore_detection import JUMP
from storage.testing import SHAPES, GeneratedRoom, generate_room
from tests.pipeline.stores import SERVER, fill
from tests.postgres import with_database

STATEMENTS_MAX = 12
"""Of a part; in stretches of 20,000 numbers, 2^30 are 53,687, and a gap is longer."""


@pytest.fixture
async def restored(
    dsn: str, server_dsn: str, worker_id: str
) -> AsyncIterator[tuple[str, GeneratedRoom, str]]:
    """Yield a copy of a database with 20 events of a room, the room, the original's last offset.

    The original got 10 more events.
    """
    room = generate_room(SHAPES["direct_chat"], 40, seed=5, sign=False)
    await fill(dsn, part_of(room, 20))
    copy = f"storage_test_restored_{os.getpid()}_{worker_id}"
    connection = await asyncpg.connect(server_dsn)
    try:
        await connection.execute(
            f"CREATE DATABASE {copy} TEMPLATE {await name_of(dsn)} STRATEGY wal_log"
        )
        await fill(dsn, part_of(room, 30))
        late = stream_of(dsn).latestOffset(stream_of(dsn).initialOffset(), ReadAllAvailable())
        yield with_database(server_dsn, copy), room, late["token"]
        await connection.execute(f"DROP DATABASE {copy} WITH (FORCE)")
    finally:
        await connection.close()


async def name_of(dsn: str) -> str:
    connection = await asyncpg.connect(dsn)
    try:
        return str(await connection.fetchval("SELECT current_database()"))
    finally:
        await connection.close()


def part_of(room: GeneratedRoom, count: int) -> GeneratedRoom:
    return GeneratedRoom(room.room_id, room.room_version, room.events[:count], room.keys)


def stream_of(dsn: str, **options: str) -> EventStream:
    return EventStream(
        Options.of(
            {"dsn": dsn, "columns": "event_id,stream_ordering", "partitions": "2", **options}
        )
    )


def batch(stream: EventStream, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[str, int]]:
    """What a batch of the query reads, in the order of its parts."""
    return [
        (row["event_id"], row["stream_ordering"])
        for part in stream.partitions(start, end)
        for rows in stream.read(part)
        for row in rows.to_pylist()
    ]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked for; the asking goes on as ever."""
    asked: list[str] = []
    table = ArrowConnection.table

    def counted(self: ArrowConnection, sql: LiteralString, *args: Any) -> Any:
        asked.append(sql)
        return table(self, sql, *args)

    monkeypatch.setattr(ArrowConnection, "table", counted)
    return asked


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(7)], ids=["all", "seven"])
async def test_a_stream_goes_on_above_the_gap(
    restored: tuple[str, GeneratedRoom, str], limit: Any, statements: list[str]
) -> None:
    dsn, room, _ = restored
    stream = stream_of(dsn)
    before = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert len(batch(stream, stream.initialOffset(), before)) == 20
    await fill(dsn, room, "after")
    read: list[tuple[str, int]] = []
    start = before
    while (end := stream.latestOffset(start, limit)) != start:
        statements.clear()
        read += batch(stream, start, end)
        assert len(statements) <= 2 * STATEMENTS_MAX
        start = end
    assert [event_id for event_id, _ in read] == [event.event_id for event in room.events[20:]]
    assert all(position > JUMP for _, position in read)


async def test_a_stream_in_small_batches_passes_a_writer_that_fell_behind(dsn: str) -> None:
    """A query without a checkpoint also reads facts from before a restore.

    Its offsets are current, though writers had lost positions there.
    """
    room = generate_room(SHAPES["direct_chat"], 40, seed=5, sign=False)
    await fill(dsn, part_of(room, 10), "one")
    connection = await asyncpg.connect(dsn)
    try:
        one: int = await connection.fetchval("SELECT max(stream_ordering) FROM events")
        await fill(dsn, part_of(room, 20), "two")
        await connection.execute(
            "UPDATE stream_positions SET stream_id = $1 "
            "WHERE instance_name = 'one' AND stream_name = 'events'",
            one,
        )
        await connection.execute("UPDATE deployment SET incarnation = 'another'")
        await fill(dsn, room, "two")
        gaps = await connection.fetch("SELECT * FROM lost_positions WHERE stream_name = 'events'")
    finally:
        await connection.close()
    assert [
        dict(zip(gap["instance_names"], gap["kept_upto"], strict=True))["one"] for gap in gaps
    ] == [one]
    stream = stream_of(dsn)
    read: list[str] = []
    start = stream.initialOffset()
    while (end := stream.latestOffset(start, ReadMaxRows(3))) != start:
        read += [event_id for event_id, _ in batch(stream, start, end)]
        start = end
    assert read == [event.event_id for event in room]


async def test_a_whole_read_does_not_look_through_the_gap(
    restored: tuple[str, GeneratedRoom, str], statements: list[str]
) -> None:
    dsn, room, _ = restored
    await fill(dsn, room, "after")
    reader = EventReader(
        Options.of({"dsn": dsn, "columns": "event_id", "partitions": "1", "outliers": "false"})
    )
    [stretch] = reader.partitions()
    found = [row["event_id"] for rows in reader.read(stretch) for row in rows.to_pylist()]
    assert found == [event.event_id for event in room]
    assert len(statements) <= STATEMENTS_MAX


async def test_an_offset_of_what_is_lost_is_refused(
    restored: tuple[str, GeneratedRoom, str],
) -> None:
    """In the original it was read; in the copy its positions are nobody's."""
    dsn, room, late = restored
    async with storage.open(dsn, server_name=SERVER):
        pass  # the restore is noticed
    stream = stream_of(dsn)
    with pytest.raises(ResyncNeeded, match="restored from"):
        stream.latestOffset({"token": late}, ReadAllAvailable())
    with pytest.raises(ResyncNeeded):
        stream.partitions(stream.initialOffset(), {"token": late})
    with pytest.raises(ResyncNeeded):
        stream_of(dsn, since=late).initialOffset()
    for name in ("since", "upto"):
        with pytest.raises(ResyncNeeded):
            EventReader(Options.of({"dsn": dsn, name: late})).partitions()
    assert len(
        batch(
            stream,
            stream.initialOffset(),
            stream.latestOffset(stream.initialOffset(), ReadAllAvailable()),
        )
    ) == len(room.events[:20])
