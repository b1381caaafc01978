"""Filters reach an index: a read counts the rows of `events` that Postgres looked at."""

import asyncio
import itertools
import re
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
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

import storage
from storage.config import Config
from storage.database.session import pinned
from storage.pipeline.source import filters as filters_module
from storage.pipeline.source.filters import HIGHEST, LOWEST, Chosen, Options, Range, taken
from storage.pipeline.source.reader import FilteringReader
from storage.pipeline.source.token_bounds import Bound, Bounds
from storage.testing import SHAPES, GeneratedRoom, generate_room
from tests.pipeline.stores import SERVER, fill
from tests.postgres import no_autovacuum

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
        await no_autovacuum(store.database)
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
    """The number of rows that all ended sessions have read. A session reports them at its end."""
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


async def copied(dsn: str) -> int:
    """Store copies of all events, received in later years; return how many events there are.

    A search for a period reads ranges of 8 pages: without the copies, each is a sixteenth of all.
    The session ends here, so that it counts the rows that it reads before those of a test.
    """
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        """
        CREATE TEMP TABLE copies AS
        SELECT n, e.* FROM events e, generate_series(1, 30) AS n
        WHERE NOT e.outlier ORDER BY n, e.received_ts;
        UPDATE copies
        SET event_nid = event_nid + n * 1000000, event_id = '$' || n || event_id,
            stream_ordering = stream_ordering + n * 1000000,
            received_ts = received_ts + n * 31536000000;
        ALTER TABLE copies DROP COLUMN n;
        SET session_replication_role = replica;
        INSERT INTO events SELECT * FROM copies;
        """
    )
    await connection.execute("VACUUM FULL ANALYZE events")
    total = int(await connection.fetchval("SELECT count(*) FROM events"))
    await connection.close()
    return total


async def test_a_day_of_receipt_is_read_by_its_index(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    total = await copied(dsn)
    begin = 1_600_000_000_000 + 40 * DAY_MS
    day = [GreaterThanOrEqual(("received_ts",), begin), LessThan(("received_ts",), begin + DAY_MS)]
    found, rows = await cost(watcher, dsn, day)
    assert set(found) == await stored(watcher, f"received_ts = {begin}")
    assert len(found) == len(set(found)) == ROOMS
    assert rows < 0.05 * total
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


OTHER_COLUMNS: list[tuple[list[Filter], str]] = [
    ([GreaterThan(("origin_server_ts",), 1_700_000_090_000)], "origin_server_ts > 1700000090000"),
    ([LessThan(("topological_ordering",), 4)], "topological_ordering < 4"),
    ([GreaterThanOrEqual(("topological_ordering",), LOWEST)], "TRUE"),
    ([EqualTo(("depth",), 7)], "claimed_depth(depth, topological_ordering) = 7"),
    ([IsNull(("state_key",))], "state_key_nid IS NULL"),
    ([IsNotNull(("state_key",))], "state_key_nid IS NOT NULL"),
    (
        [In(("state_key",), ("", "@none:s1.test"))],
        "state_key_nid IN (SELECT state_key_nid FROM state_keys WHERE state_key = '')",
    ),
    (
        [StringStartsWith(("type",), "m.room.me")],
        "type_nid IN (SELECT type_nid FROM event_types WHERE type LIKE 'm.room.me%')",
    ),
    (
        [StringEndsWith(("sender",), ":s2.test")],
        "sender_nid IN (SELECT principal_nid FROM principals WHERE name LIKE '%:s2.test')",
    ),
    ([EqualTo(("soft_failed",), True)], "soft_failed"),
    ([Not(EqualTo(("soft_failed",), True))], "NOT soft_failed"),
]


async def test_filters_on_other_columns_are_those_of_sql(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom]
) -> None:
    """Postgres returns the rows that pass, and no others."""
    await watcher.execute("UPDATE events SET soft_failed = true WHERE event_nid % 50 = 7")
    for wanted, sql in OTHER_COLUMNS:
        found = read(dsn, wanted, partitions=1)
        expected = await stored(watcher, sql)
        assert (set(found), len(found)) == (expected, len(expected)), sql
        assert len(expected) > 0, sql
    both = [*OTHER_COLUMNS[5][0], *OTHER_COLUMNS[7][0]]
    assert set(read(dsn, both, partitions=1)) == await stored(
        watcher, f"{OTHER_COLUMNS[5][1]} AND {OTHER_COLUMNS[7][1]}"
    )


def test_what_contradicts_or_is_not_known_is_left_to_spark() -> None:
    left: list[Filter] = [
        IsNull(("state_key",)),
        StringStartsWith(("type",), "m.space."),
        EqualTo(("soft_failed",), False),
        EqualTo(("soft_failed",), None),
        Not(EqualTo(("type",), "m.room.member")),
        Not(IsNull(("state_key",))),
        IsNotNull(("type",)),
        StringContains(("type",), "m"),
        StringEndsWith(("type",), "m"),
        StringStartsWith(("type",), "a\0"),
        EqualTo(("type",), "a\0"),
    ]
    first: list[Filter] = [
        IsNotNull(("state_key",)),
        StringStartsWith(("type",), "m.room."),
        EqualTo(("soft_failed",), True),
    ]
    chosen, rest = taken([*first, *left], Chosen())
    assert chosen == Chosen(has_state_key=True, type_prefix="m.room.", soft_failed=True)
    assert rest == left


@pytest.mark.parametrize("analysed", [False, True])
async def test_the_plan_of_a_period_has_its_index_alone(
    dsn: str, watcher: asyncpg.Connection, analysed: bool
) -> None:
    """Before ANALYZE, other indexes seem to have few of the events."""
    await fill(dsn, generate_room(SHAPES["small_chat"], EVENTS, seed=1, sign=False))
    if analysed:
        await watcher.execute("ANALYZE")
    chosen = Chosen(received_ts=Range(1, 2))
    bounds = Bounds((Bound(1, False, 0, HIGHEST), Bound(1, True, 0, HIGHEST)))
    given = *bounds.columns(), *chosen.columns(), 1, -1, 3, filters_module.SORTED_EVENTS
    session = await asyncpg.connect(dsn, server_settings=pinned(Config()))
    async with session.transaction():
        await session.execute(filters_module.SQL_BY_INDEX)
        lines = await session.fetch(
            f"EXPLAIN (COSTS OFF) {filters_module.SQL_NIDS_BY_RECEIPT}", *given
        )
    await session.close()
    plan = "\n".join(line[0] for line in lines)
    assert "Bitmap Index Scan on events_received_idx" in plan
    assert len(set(re.findall(r"events_\w+", plan))) == 1, plan


async def test_pages_of_receipts(
    dsn: str,
    watcher: asyncpg.Connection,
    rooms: Sequence[GeneratedRoom],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some pages end within a day, whose events all have the same time, and some at its end."""
    after = 1_600_000_000_000 + 90 * DAY_MS
    expected = await watcher.fetch(
        f"SELECT event_id FROM events WHERE received_ts >= {after} ORDER BY received_ts, event_nid"
    )
    for size, sorted_together in ((7, 7), (7, 20), (3, 1_000)):
        monkeypatch.setattr(filters_module, "RANGE", size)
        monkeypatch.setattr(filters_module, "SORTED_EVENTS", sorted_together)
        found = read(dsn, [GreaterThanOrEqual(("received_ts",), after)], partitions=1)
        assert found == [row["event_id"] for row in expected]


def parts_of(
    dsn: str, filters: list[Filter], **options: str | int
) -> list[list[dict[str, object]]]:
    """The rows that each task reads."""
    given = {"dsn": dsn, "pushdown": "true", **{name: str(one) for name, one in options.items()}}
    reader = FilteringReader(Options.of(given))
    assert list(reader.pushFilters(filters)) == []
    return [
        [row for batch in reader.read(part) for row in batch.to_pylist()]
        for part in reader.partitions()
    ]


@pytest.mark.usefixtures("rooms")
async def test_a_wrong_clock_leaves_no_task_with_everything(
    dsn: str, watcher: asyncpg.Connection
) -> None:
    """One event was received in 1970, one in 2099, and all others within 100 days."""
    for clock, end in ((0, "min"), (4_070_908_800_000, "max")):
        await watcher.execute(
            "UPDATE events SET received_ts = $1"
            f" WHERE stream_ordering = (SELECT {end}(stream_ordering) FROM events)",
            clock,
        )
    filters: list[Filter] = [GreaterThanOrEqual(("received_ts",), 0)]
    parts = parts_of(dsn, filters, partitions=8)
    assert sum(map(len, parts)) == len(await stored(watcher, "true"))
    assert max(map(len, parts)) < sum(map(len, parts)) / 4


@pytest.mark.parametrize("by", ["room", "day"])
async def test_a_task_has_whole_rooms_or_days(
    dsn: str, watcher: asyncpg.Connection, rooms: Sequence[GeneratedRoom], by: str
) -> None:
    day = [GreaterThanOrEqual(("received_ts",), 1_600_000_000_000 + 40 * DAY_MS)]
    some = [In(("room_id",), tuple(room.room_id for room in rooms[2:9]))]
    ids = [In(("event_id",), tuple(event.event_id for event in rooms[3].events[:30]))]
    wanted: list[list[Filter]] = [[], list(day), list(some), list(ids)]
    for filters in wanted:
        parts = parts_of(dsn, filters, partition_by=by, partitions=4)
        read_ids = [str(row["event_id"]) for rows in parts for row in rows]
        assert sorted(read_ids) == sorted(read(dsn, filters, partitions=1))
        tasks_of: dict[object, set[int]] = {}
        for task, rows in enumerate(parts):
            for row in rows:
                received = row["received_ts"]
                assert isinstance(received, int)
                key = row["room_id"] if by == "room" else received // DAY_MS
                tasks_of.setdefault(key, set()).add(task)
        assert all(len(tasks) == 1 for tasks in tasks_of.values())
        if not filters:
            assert len(parts) == 4
            assert max(map(len, parts)) <= len(read_ids) / 4 + (2 * EVENTS if by == "room" else 60)


async def test_the_rooms_of_a_task_come_one_after_another(
    dsn: str, rooms: Sequence[GeneratedRoom]
) -> None:
    for rows in parts_of(dsn, [], partition_by="room", partitions=3):
        names = [row["room_id"] for row in rows]
        changes = sum(a != b for a, b in itertools.pairwise(names))
        assert changes + 1 == len(set(names)) > 1


async def test_a_new_database_has_no_parts(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER):
        pass
    for by in ("room", "day"):
        assert parts_of(dsn, [], partition_by=by) == []


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
    total = await copied(dsn)
    frame = spark.read.format("room_events").options(dsn=dsn, pushdown="true").load()
    begin = 1_600_000_000_000 + 40 * DAY_MS
    day = frame.where(
        f"received_ts >= {begin} AND received_ts < {begin + DAY_MS} AND type <> 'no such type'"
        " AND sender LIKE '%.test' AND NOT soft_failed AND depth > 0"
    )
    before = await looked_at(watcher)
    found = {row.event_id for row in day.collect()}
    assert await looked_at(watcher) - before < 0.05 * total
    assert found == await stored(watcher, f"received_ts = {begin}")
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
