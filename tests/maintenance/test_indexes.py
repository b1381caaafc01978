"""Corrupt indexes: the check finds and names each one of the schema, and reports no sound data."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from decimal import Decimal
from typing import Any

import asyncpg
import pytest

import storage
from storage import Store, UserId
from storage.database.connection import Database
from storage.errors import StorageCorrupt
from storage.maintenance.indexes import compare, index_mismatches, refuse_corrupt_indexes
from storage.maintenance.indexes.block_ranges import block_range_indexes
from storage.maintenance.indexes.catalogue import indexes
from storage.maintenance.indexes.compare import Entries, Rows, difference
from storage.maintenance.verify import Finding, verify
from storage.testing import Odd, RoomBuilder, build_room, deliver_with_gap
from tests.conftest import _fresh_database
from tests.long_run import long_run
from tests.maintenance.damaging import BLOCK_RANGES, INDEXES, blind, exchange
from tests.maintenance.rooms import LIVELY, SERVER, deliver

LOCAL = UserId("@user1:s1.test")


@pytest.fixture(scope="module")
def filled_dsn(server_dsn: str, template_name: str, worker_id: str) -> Iterator[str]:
    """A lively room with a gap, and something in every index that has a predicate.

    Each test leaves it sound.
    """
    with asyncio.Runner() as runner:
        databases = AsyncExitStack()
        dsn = runner.run(
            databases.enter_async_context(
                _fresh_database(server_dsn, template_name, f"{worker_id}_indexes")
            )
        )
        runner.run(_fill(dsn))
        yield dsn
        runner.run(databases.aclose())


async def _fill(dsn: str) -> None:
    room = build_room(
        LIVELY.replaced(odd=Odd(rejected=0.03, early_redaction=0.02)), 200, seed=11, sign=False
    )
    delivery = deliver_with_gap(room, 60, 70)
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, replace(delivery, events=delivery.events[:-5]), batch=40)
        await store.account_data.set(LOCAL, "m.direct", {})
        await store.to_device.send({LOCAL: {"device": {"n": 1}}})
        await store.receipts.set(room.room_id, "m.read", LOCAL, room.events[0].event_id, {})
        await store.append([delivery.events[-1].pdu], room_version=room.version, origin="outlier")
        old = build_room(LIVELY, 20, seed=12, sign=False, version="1")
        await deliver(store, deliver_with_gap(old, 5, 6), batch=40)
        await store.append(two_links().pdus)


def two_links() -> RoomBuilder:
    """A room with a join that cites power levels and join rules, neither of which cites the other.

    So its position in the chain cover has two links.
    """
    room = RoomBuilder("11", seed=13)
    room.start(LOCAL)
    room.power_levels(LOCAL, users={LOCAL: 100})
    room.join("@user2:s2.test")
    return room


@pytest.fixture
async def database(filled_dsn: str) -> AsyncIterator[Database]:
    async with await Database.open(filled_dsn) as opened:
        yield opened


@pytest.fixture
async def admin(filled_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    conn = await asyncpg.connect(filled_dsn)
    try:
        yield conn
    finally:
        await conn.close()


async def found_by_verify(database: Database) -> list[Finding]:
    return [finding async for finding in verify(database, server_name=SERVER)]


async def test_the_schema_has_these_indexes(database: Database) -> None:
    async with database.connection() as conn:
        entries = [index.name for index in await indexes(conn)]
        ranges = [index.name for index in await block_range_indexes(conn)]
    assert sorted([*entries, *ranges]) == INDEXES
    assert set(ranges) == BLOCK_RANGES


async def test_sound_indexes_say_nothing(database: Database, admin: asyncpg.Connection) -> None:
    """However little is known about the tables, and after they were analysed."""
    assert await index_mismatches(database) == []
    await admin.execute("VACUUM ANALYZE")
    assert await index_mismatches(database) == []
    await refuse_corrupt_indexes(database, "a test")


async def test_an_index_with_the_same_key_and_more_rows_is_not_read_instead(
    store: Store,
) -> None:
    """As beside a schema that was taken back in part. To Postgres, `IS NOT NULL` costs nothing."""
    await store.append(build_room(LIVELY, 150, seed=8).pdus)
    async with store.database.connection() as conn:
        for number in range(40):  # the index of the schema gets longer than the other one
            await conn.execute("UPDATE events SET in_order_ts = $1", number)
        await conn.execute("CREATE INDEX wider ON events (room_nid, origin_server_ts)")
        await conn.execute("ANALYZE")
    assert await index_mismatches(store.database) == []
    async with store.database.transaction() as conn:
        await conn.execute("SET LOCAL random_page_cost = 400")  # as if it were much longer
        assert await compare.mismatches_in_snapshot(conn) == []


async def test_indexes_of_large_tables_are_compared_one_by_one(
    database: Database, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "PAGES_TOGETHER", 0)
    assert await index_mismatches(database) == []
    lacks = await blind(admin, "events_out_of_order_idx")
    try:
        assert [mismatch.found for mismatch in await index_mismatches(database)] == [
            f"0 entries for {lacks} rows"
        ]
    finally:
        await admin.execute("REINDEX INDEX events_out_of_order_idx")


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=long_run) if number % 3 else index
        for number, index in enumerate(sorted({*INDEXES} - BLOCK_RANGES))
    ],
)
async def test_an_index_that_lacks_rows_is_named(
    database: Database, admin: asyncpg.Connection, index: str
) -> None:
    before = await found_by_verify(database)
    assert all(finding.check != "indexes" for finding in before)
    try:
        lacks = await blind(admin, index)
        assert lacks, "no row belongs in this index: the test says nothing"
        found = await found_by_verify(database)
        named = [finding for finding in found if finding.check == "indexes"]
        assert [finding.subject for finding in named] == [(index,)]
        assert named[0].found == f"0 entries for {lacks} rows"
        assert f"REINDEX INDEX CONCURRENTLY {index}" in named[0].expected
        assert set(found) - set(named) <= set(before)
        with pytest.raises(StorageCorrupt, match=f"REINDEX INDEX CONCURRENTLY {index};"):
            await refuse_corrupt_indexes(database, "a test")
    finally:
        await admin.execute(f"REINDEX INDEX {index}")
    assert await index_mismatches(database) == []


@pytest.mark.parametrize(
    "index,definition,found",
    [
        # As after a change of collation.
        (
            "principals_name_key",
            "principals (name DESC)",
            "entries out of order",
        ),
        ("events_event_id_idx", "events USING hash ((event_id || 'x'))", "0 entries for"),
        ("rooms_room_id_key", "rooms ((room_id || 'x'))", "not those of the rows"),
        (
            "state_groups_known_digest_idx",
            "state_groups ((digest - digest % 1000)) WHERE digest IS NOT NULL",
            "entries",
        ),
        ("events_pkey", "events (event_nid) WHERE event_nid % 7 <> 0", "entries for"),
        ("events_out_of_order_idx", "events (room_nid, depth) WHERE NOT outlier", "entries"),
        (
            "events_room_stream_idx",
            "events (room_nid, stream_ordering) WHERE NOT outlier",
            "entries for",
        ),
    ],
)
async def test_an_index_with_other_entries_is_named(
    dsn: str, index: str, definition: str, found: str
) -> None:
    await _fill(dsn)
    admin = await asyncpg.connect(dsn)
    try:
        await exchange(admin, index, definition)
    finally:
        await admin.close()
    async with await Database.open(dsn) as database:
        named = {mismatch.name: mismatch.found for mismatch in await index_mismatches(database)}
    assert set(named) == {index}
    assert found in named[index]


@pytest.mark.parametrize(
    "of_keys,of_rows,rows,found",
    [
        ((0, None, 0), (0, None, 0), (0, None, None), None),
        ((3, 7, 0), (3, 8, 0), (3, 7, 8), None),
        ((2, 7, 0), (3, 8, 0), (3, 7, 8), "2 entries for 3 rows"),
        ((3, 7, 0), (4, 8, 0), (3, 7, 8), "4 entries for 3 rows"),
        ((3, 7, 1), (3, 8, 0), (3, 7, 8), "1 of 3 entries out of order"),
        ((3, 7, 0), (3, 8, 2), (3, 7, 8), "2 of 3 entries out of order"),
        ((3, 6, 0), (3, 8, 0), (3, 7, 8), "3 entries, some of them not those of the rows"),
        ((3, 7, 0), (3, 9, 0), (3, 7, 8), "3 entries, some of them not those of the rows"),
    ],
)
def test_each_difference_counts(
    of_keys: Sequence[Any], of_rows: Sequence[Any], rows: Sequence[Any], found: str | None
) -> None:
    assert difference((Entries(*of_keys), Entries(*of_rows)), Rows(*rows)) == found


def test_what_cannot_be_compared_is_no_agreement() -> None:
    assert difference(None, Rows(Decimal(0), None, None)) is not None
