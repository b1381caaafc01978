"""The data source: reads return the stored rows, in parts, filtered and followed.

Writes append.
"""

from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, In

import storage
from storage.pipeline.source.filters import Chosen, Options, taken
from storage.pipeline.source.rows import COLUMNS
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedRoom,
    RoomBuilder,
    build_room,
    deliver_with_gap,
    generate_room,
)
from tests.long_run import long_run
from tests.pipeline.stores import SERVER, fill, tables

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]


def read(spark: SparkSession, dsn: str, **options: Any) -> DataFrame:
    return spark.read.format("room_events").option("dsn", dsn).options(**options).load()


async def test_every_event_is_read_once(spark: SparkSession, dsn: str) -> None:
    room = deliver_with_gap(build_room(SHAPES["fork_heavy"], 60, sign=False), 20, 30)
    await fill(dsn, room)
    rows = read(spark, dsn, partitions=3).collect()
    async with storage.open(dsn, server_name=SERVER) as store:
        stored = await store.events([event.event_id for event in room])
    assert sorted(row.event_id for row in rows) == sorted(stored)
    for row in rows:
        event = stored[row.event_id]
        assert bytes(row.pdu) == event.raw
        assert (row.room_id, row.sender, row.type, row.state_key) == (
            event.room_id,
            event.sender,
            event.type,
            event.state_key,
        )
        assert (row.stream_ordering, row.topological_ordering) == (
            event.stream_ordering,
            event.topological_ordering,
        )
        assert (row.rejected, row.soft_failed, row.redacted_by) == (
            event.rejected,
            event.soft_failed,
            event.redacted_by,
        )
        assert (row.origin == "outlier") == event.outlier
    after_the_gap = {row.event_id: row.state_before for row in rows if row.state_before is not None}
    given = {
        event.event_id: sorted(event.state_before)
        for event in room
        if event.state_before is not None
    }
    assert given.items() <= after_the_gap.items()


async def test_columns_and_filters_reach_postgres(spark: SparkSession, dsn: str) -> None:
    rooms = [generate_room(SHAPES["small_chat"], 30, seed=seed, sign=False) for seed in (1, 2)]
    for room in rooms:
        await fill(dsn, room)
    one = read(spark, dsn, columns="event_id,type", pushdown="true").where("type = 'm.room.create'")
    assert one.columns == ["event_id", "type"]
    assert sorted(row.event_id for row in one.collect()) == sorted(
        room.events[0].event_id for room in rooms
    )
    both = read(spark, dsn, pushdown="true").where(
        f"room_id = '{rooms[0].room_id}' AND sender IN ('{one_sender(rooms[0])}') AND depth > 2"
    )
    assert 0 < both.count() <= 30
    assert {row.room_id for row in both.collect()} == {rooms[0].room_id}


def one_sender(room: GeneratedRoom) -> str:
    return str(storage.event.parse(room.events[0].pdu, room.room_version).sender)


async def test_only_what_is_new_since_a_token(spark: SparkSession, dsn: str) -> None:
    room = generate_room(SHAPES["small_chat"], 30, sign=False)
    first = GeneratedRoom(room.room_id, room.room_version, room.events[:20], room.keys)
    await fill(dsn, first)
    async with storage.open(dsn, server_name=SERVER) as store:
        since = (await store.sync("@nobody:s1.test")).next_batch
    await fill(dsn, room, "another")
    rows = read(spark, dsn, since=since, columns="event_id").collect()
    assert [row.event_id for row in rows] == [event.event_id for event in room.events[20:]]


@pytest.mark.parametrize("most", [6, pytest.param(None, marks=long_run)])
async def test_a_stream_goes_on_from_its_checkpoint(
    spark: SparkSession, dsn: str, tmp_path: Path, most: int | None
) -> None:
    room = deliver_with_gap(build_room(SHAPES["fork_heavy"], 24, sign=False), 8, 12)
    events = list(room)
    for number in range(3):
        part = GeneratedRoom(
            room.room_id,
            room.room_version,
            tuple(events[number * 12 : number * 12 + 12]),
            room.keys,
        )
        await fill(dsn, part, f"w{number % 2}")
        limits = {} if most is None else {"maxEventsPerBatch": str(most)}
        frame = (
            spark.readStream.format("room_events")
            .options(dsn=dsn, columns="event_id,stream_ordering", partitions="2", **limits)
            .load()
        )
        query = (
            frame.writeStream.format("parquet")
            .option("path", str(tmp_path / "out"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        query.stop()
    read_back = [
        row.event_id
        for row in spark.read.parquet(str(tmp_path / "out")).orderBy("stream_ordering").collect()
    ]
    in_stream = (
        read(spark, dsn, columns="event_id,stream_ordering")
        .where("stream_ordering is not null")
        .orderBy("stream_ordering")
    )
    assert read_back == [row.event_id for row in in_stream.collect()]
    assert len(read_back) == len(set(read_back)) > 20


async def test_what_is_written_is_appended(spark: SparkSession, dsn: str, another_dsn: str) -> None:
    room = generate_room(SHAPES["small_chat"], 40, sign=False)
    await fill(dsn, room)
    frame = read(spark, dsn, partitions=1)
    frame.coalesce(1).write.format("room_events").options(dsn=another_dsn, server_name=SERVER).mode(
        "append"
    ).save()
    assert await tables(another_dsn) == await tables(dsn)


async def test_rooms_that_span_partitions_are_copied_whole(
    spark: SparkSession, dsn: str, another_dsn: str
) -> None:
    """Each partition has a part of each room, and the tasks of the later ones run first or last."""
    odd = SHAPES["small_chat"].replaced(odd=ODD_SOME)
    rooms = [
        generate_room(odd, 40, seed=seed, version=("10", "12")[seed % 2], sign=False)
        for seed in range(3)
    ]
    rooms.append(deliver_with_gap(build_room(SHAPES["fork_heavy"], 40, seed=7, sign=False), 12, 20))
    for room in rooms:
        await fill(dsn, room)
    frame = read(spark, dsn, partitions=8)
    assert frame.rdd.getNumPartitions() == 8
    mixed = frame.repartition(8, "event_id")
    mixed.write.format("room_events").options(dsn=another_dsn, server_name=SERVER).mode(
        "append"
    ).save()
    assert await logical(another_dsn) == await logical(dsn)
    frame.write.format("room_events").options(dsn=another_dsn, server_name=SERVER).mode(
        "append"
    ).save()
    assert await logical(another_dsn) == await logical(dsn)


async def logical(dsn: str) -> dict[str, Any]:
    """Return all tables, without traces of the order of arrival.

    Those are state groups that outliers had, and positions that were reordered.
    """
    found = await tables(dsn)
    return {
        **found,
        "counts": {
            name: found["counts"][name]
            for name in ("rooms", "events", "missing_events", "current_state")
        },
    }


async def test_nothing_is_stored_where_a_row_is_no_event(spark: SparkSession, dsn: str) -> None:
    room = generate_room(SHAPES["small_chat"], 20, sign=False)
    frame = spark.createDataFrame(
        [(pdu,) for pdu in [*room.pdus, b"no event"]], "pdu binary"
    ).repartition(2)
    writing = (
        frame.write.format("room_events")
        .options(dsn=dsn, server_name=SERVER, room_version=room.room_version)
        .mode("append")
    )
    with pytest.raises(Exception, match="1 event was not stored, nothing was stored"):
        writing.save()
    connection = await asyncpg.connect(dsn)
    assert await connection.fetchval("SELECT count(*) FROM events") == 0
    writing.option("rejects", "ignore").save()
    assert await connection.fetchval("SELECT count(*) FROM events") == len(room)
    assert await connection.fetchval("SELECT count(*) FROM import_events") == 0
    await connection.close()


async def test_what_cannot_be_written_is_told(spark: SparkSession, dsn: str) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(room.user(1))
    frame = spark.createDataFrame([(room.pdus[-1],)], "pdu binary")
    writing = (
        frame.write.format("room_events")
        .options(dsn=dsn, server_name=SERVER, room_version="11")
        .mode("append")
    )
    with pytest.raises(Exception, match="1 event was not stored"):
        writing.save()
    writing.option("rejects", "ignore").save()


@pytest.mark.parametrize(
    "given,told",
    [
        ({}, "dsn"),
        ({"dsn": "x", "dns": "y"}, "dns"),
        ({"dsn": "x", "columns": "jsn"}, "jsn"),
        ({"dsn": "x", "partitions": "0"}, "partitions"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], told: str) -> None:
    with pytest.raises(storage.InputError, match=told):
        Options.of(given)


def test_which_filters_postgres_applies() -> None:
    filters = [
        In(("type",), ("a", "b")),
        EqualTo(("type",), "b"),
        EqualTo(("audience",), 3),
        GreaterThan(("type",), "a"),
    ]
    chosen, left = taken(filters, Chosen())
    assert chosen == Chosen(type=("b",))
    assert left == filters[2:]


def test_all_columns_are_read_unless_told_otherwise() -> None:
    assert Options.of({"DSN": "x"}).columns == COLUMNS
