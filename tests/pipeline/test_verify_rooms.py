"""Verification finds what is damaged, with the same words as in one process; a rebuild mends it."""

import asyncpg
import pytest
from pyspark.sql import SparkSession

import storage
from storage.database import Database
from storage.maintenance.verify import verify as verify_here
from storage.pipeline import rebuild, verify
from storage.testing import SHAPES, generate_room
from tests.maintenance.damaging import blind
from tests.pipeline.stores import SERVER, fill, tables

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


async def test_damage_is_found_and_mended(spark: SparkSession, dsn: str) -> None:
    rooms = [
        generate_room(SHAPES["join_leave_storm"], 30, seed=seed, sign=False) for seed in range(3)
    ]
    for room in rooms:
        await fill(dsn, room)
    sound = await logical(dsn)
    connection = await asyncpg.connect(dsn)
    of_first = "(SELECT room_nid FROM rooms WHERE room_id = $1)"
    await connection.execute(
        f"DELETE FROM visibility WHERE room_nid = {of_first}", rooms[0].room_id
    )
    await connection.execute(
        f"DELETE FROM current_state WHERE room_nid = {of_first}", rooms[1].room_id
    )
    await connection.close()
    found = {
        (row.check, row.room_id, row.found, row.expected) for row in verify(spark, dsn).collect()
    }
    async with await Database.open(dsn) as database:
        expected = {
            (one.check, one.room_id, one.found, one.expected)
            async for one in verify_here(database, server_name=SERVER)
        }
    assert found == expected
    assert {room_id for _, room_id, _, _ in found} >= {rooms[0].room_id, rooms[1].room_id}
    assert verify(spark, dsn, room_ids=[rooms[2].room_id]).count() == 0
    assert rebuild(spark, dsn, room_ids=[rooms[0].room_id, rooms[1].room_id]) == {}
    assert verify(spark, dsn).count() == 0
    assert await logical(dsn) == sound


async def test_an_index_that_lies_is_named_and_stops_a_rebuild(
    spark: SparkSession, dsn: str
) -> None:
    await fill(dsn, generate_room(SHAPES["join_leave_storm"], 30, seed=1, sign=False))
    connection = await asyncpg.connect(dsn)
    await blind(connection, "events_room_topological_idx")
    await blind(connection, "receipts_pkey")  # of no room: rooms are verified all the same
    found = [(row.check, row.subject) for row in verify(spark, dsn).collect()]
    assert found == [("indexes", ["events_room_topological_idx"]), ("indexes", ["receipts_pkey"])]
    with pytest.raises(storage.StorageCorrupt, match="REINDEX"):
        rebuild(spark, dsn)
    await connection.execute("REINDEX INDEX events_room_topological_idx")
    assert [row.subject for row in verify(spark, dsn).collect()] == [["receipts_pkey"]]
    await connection.close()


async def logical(dsn: str) -> dict[str, object]:
    """The tables without how many rows they have: a rebuild numbers audiences anew."""
    return {name: rows for name, rows in (await tables(dsn)).items() if name != "counts"}


def test_a_room_that_is_not_there_is_named(spark: SparkSession, dsn: str) -> None:
    with pytest.raises(storage.UnknownRoom):
        verify(spark, dsn, room_ids=["!nowhere:s1.test"])
