"""Filters reach an index: a read counts the rows of `events` that Postgres looked at."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import asyncpg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

import storage
from storage.pipeline.source.filters import HIGHEST, Chosen, Range, taken
from storage.pipeline.source.options import Options
from storage.pipeline.source.reader import FilteringReader
from storage.testing import SHAPES, GeneratedRoom, generate_room
from tests.pipeline.stores import SERVER, fill

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]
ROOMS, EVENTS = 20, 100
DAY_MS = 86_400_000
OTHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)
ROWS_READ = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'events'"
SPREAD = (
    "UPDATE events "
    f"SET received_ts = 1600000000000 + COALESCE(stream_ordering / {ROOMS} * {DAY_MS}, 0)"
)


@pytest.fixture
async def rooms(dsn: str) -> Sequence[GeneratedRoom]:
    """Twenty rooms, received in 100 days, 20 events a day, and one more room with outliers only."""
    made = [
        generate_room(SHAPES["small_chat"], EVENTS, seed=seed, sign=False) for seed in range(ROOMS)
    ]
    strange = generate_room(SHAPES["direct_chat"], 20, seed=99, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        for room in made:
            await store.append(room.pdus, room_version=room.room_version)
        await store.append(strange.pdus, room_version=strange.room_version, origin="outlier")
    connection = await asyncpg.connect(dsn)
    await connection.execute(SPREAD)
    await connection.execute("ANALYZE")
    await connection.close()
    return [*made, strange]


@pytest.fixture
async def watcher(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


async def looked_at(watcher: asyncpg.Connection) -> int:
    """How many rows all ended sessions have read: a session tells of them when it ends."""
    while await watcher.fetchval(OTHERS):
        await watcher.execute("SELECT pg_sleep(0.01)")
    return int(await watcher.fetchval(ROWS_READ))


def read(dsn: str, filters: list[Filter], **options: int | bool | str) -> list[str]:
    """The ids that a read with these filters gives, by the functions that Spark calls."""
    reader = FilteringReader(Options(dsn, pushdown=True, **options))  # type: ignore[arg-type]
    assert list(reader.pushFilters(filters)) == []
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return [event_id for batch in batches for event_id in batch.column("event_id").to_pylist()]


async def cost(
    watcher: asyncpg.Connection, dsn: str, filters: list[Filter]
) -> tuple[list[str], int]:
    before = await looked_at(watcher)
    found = await asyncio.to_thread(read, dsn, filters)
    return found, await looked_at(watcher) - before


async def stored(watcher: asyncpg.Connection, where: str) -> set[str]:
    return {
        row["event_id"] for row in await watcher.fetch(f"SELECT event_id FROM events WHERE {where}")
    }


async def test_a_day_of_receipt_is_read_by_its_index(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    begin = 1_600_000_000_000 + 40 * DAY_MS
    day = [GreaterThanOrEqual(("received_ts",), begin), LessThan(("received_ts",), begin + DAY_MS)]
    found, rows = await cost(watcher, dsn, day)
    assert set(found) == await stored(watcher, f"received_ts = {begin}")
    assert len(found) == len(set(found)) == ROOMS
    assert rows < 0.05 * ROOMS * EVENTS
    first = 1_600_000_000_000 - 1
    both_kinds = read(
        dsn, [GreaterThan(("received_ts",), first), LessThanOrEqual(("received_ts",), first + 1)]
    )
    assert (
        set(both_kinds)
        == await stored(watcher, f"received_ts = {first + 1}")
        > await stored(watcher, "outlier")
    )


async def test_a_room_is_read_by_its_index(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    for room in (rooms[7], rooms[-1]):
        found, rows = await cost(watcher, dsn, [EqualTo(("room_id",), room.room_id)])
        assert sorted(found) == sorted(event.event_id for event in room)
        assert rows <= 2 * len(found)
    two = (rooms[3].room_id, rooms[5].room_id, "!none:s1.test")
    found, rows = await cost(
        watcher, dsn, [In(("room_id",), two), GreaterThan(("stream_ordering",), 0)]
    )
    assert sorted(found) == sorted(
        event.event_id for room in (rooms[3], rooms[5]) for event in room
    )
    assert rows <= 2 * len(found)


async def test_a_range_of_the_stream_is_read_by_its_index(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    wanted = [GreaterThan(("stream_ordering",), 500), LessThanOrEqual(("stream_ordering",), 520)]
    found, rows = await cost(watcher, dsn, wanted)
    assert set(found) == await stored(watcher, "stream_ordering > 500 AND stream_ordering <= 520")
    assert 0 < len(found) == len(set(found))
    assert rows < 0.05 * ROOMS * EVENTS
    assert set(read(dsn, [GreaterThan(("stream_ordering",), 0)])) == await stored(
        watcher, "NOT outlier"
    )


async def test_events_are_read_by_their_ids(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    ids = (rooms[1].events[3].event_id, rooms[2].events[90].event_id, rooms[-1].events[4].event_id)
    found, rows = await cost(watcher, dsn, [In(("event_id",), (*ids, "$none"))])
    assert sorted(found) == sorted(ids)
    assert rows < 0.05 * ROOMS * EVENTS
    mine = [In(("event_id",), ids), EqualTo(("room_id",), rooms[2].room_id)]
    assert read(dsn, mine) == [ids[1]]
    assert sorted(read(dsn, [In(("event_id",), ids)], outliers=False)) == sorted(ids[:2])


async def test_filters_hold_between_tokens(dsn: str, rooms: Sequence[GeneratedRoom]) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        since = (await store.sync("@nobody:s1.test")).next_batch
    more = generate_room(SHAPES["small_chat"], EVENTS + 10, seed=4, sign=False)
    await fill(dsn, GeneratedRoom(more.room_id, more.room_version, more.events[EVENTS:], more.keys))
    new = [event.event_id for event in more.events[EVENTS:]]
    by_room, by_time = (
        EqualTo(("room_id",), more.room_id),
        GreaterThan(("received_ts",), 1_600_000_000_000),
    )
    for wanted in (
        [by_room],
        [by_time],
        [by_room, by_time],
        [In(("event_id",), tuple(event.event_id for event in more))],
    ):
        assert sorted(read(dsn, list(wanted), since=since, outliers=False)) == sorted(new)


async def test_nothing_passes_filters_that_contradict_each_other(
    dsn: str, rooms: Sequence[GeneratedRoom]
) -> None:
    contradictions: list[list[Filter]] = [
        [EqualTo(("room_id",), rooms[0].room_id), EqualTo(("room_id",), rooms[1].room_id)],
        [GreaterThan(("stream_ordering",), 9), LessThan(("stream_ordering",), 3)],
        [GreaterThan(("received_ts",), 1_600_000_000_000 + 1_000 * DAY_MS)],
    ]
    for filters in contradictions:
        assert read(dsn, filters) == []


async def test_spark_hands_the_filters_on(
    spark: SparkSession, dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    frame = spark.read.format("room_events").options(dsn=dsn, pushdown="true").load()
    begin = 1_600_000_000_000 + 40 * DAY_MS
    day = frame.where(
        f"received_ts >= {begin} AND received_ts < {begin + DAY_MS} AND type <> 'no such type'"
    )
    before = await looked_at(watcher)
    assert {row.event_id for row in day.collect()} == await stored(
        watcher, f"received_ts = {begin}"
    )
    assert await looked_at(watcher) - before < 0.05 * ROOMS * EVENTS
    assert frame.where("room_id = '!a:b' AND room_id = '!b:a'").collect() == []


def test_what_no_range_can_hold_is_left_to_spark() -> None:
    impossible = [
        GreaterThan(("received_ts",), HIGHEST),
        EqualTo(("received_ts",), None),
        In(("stream_ordering",), (1, 2)),
    ]
    assert taken(impossible, Chosen()) == (Chosen(), impossible)
    assert taken([EqualTo(("stream_ordering",), 7)], Chosen())[0] == Chosen(
        stream_ordering=Range(7, 7)
    )
