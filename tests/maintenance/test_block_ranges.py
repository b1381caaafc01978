"""The index of block ranges: a summary that lacks rows is found, and nothing else is reported."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
import pytest

from storage import Store
from storage.database.connection import Database
from storage.errors import StorageCorrupt
from storage.maintenance.indexes import (
    IndexMismatch,
    block_ranges,
    index_mismatches,
    refuse_corrupt_indexes,
)
from storage.maintenance.indexes.block_ranges import (
    HIGHEST,
    LOWEST,
    Keys,
    Period,
    PeriodRow,
    difference,
    keys_of,
    periods_of,
    ranges_read,
)
from storage.testing import build_room
from tests.cli.running import room_storage_beside
from tests.maintenance.rooms import LIVELY, findings

INDEX = "events_received_idx"
DAY_MS = 86_400_000
EVENTS = 300

READY = "UPDATE pg_index SET indisready = $1::boolean WHERE indexrelid = $2::text::regclass"
ONE_PAGE = f"ALTER INDEX {INDEX} SET (pages_per_range = 1)"
IN_ORDER = f"1600000000000 + event_nid * {DAY_MS // 10}"
IN_NO_ORDER = f"1600000000000 + event_nid * 7919 % 365 * {DAY_MS}"
BLOCKS = "SELECT (ctid::text::point)[0]::int AS block, event_nid FROM events ORDER BY event_nid"


@pytest.fixture
async def admin(dsn: str, store: Store) -> AsyncIterator[asyncpg.Connection]:
    """A room whose events were received in the order of their blocks, which are ranges of one."""
    room = build_room(LIVELY, EVENTS, seed=4, sign=False)
    await store.append(room.pdus, room_version=room.version)
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute("ALTER TABLE events SET (fillfactor = 50)")
        await conn.execute(ONE_PAGE)
        await received_at(conn, IN_ORDER)
        yield conn
    finally:
        await conn.close()


async def received_at(conn: asyncpg.Connection, ts: str) -> None:
    """Give all events other times of receipt.

    By UPDATE, summaries would have the old times as well, if any transaction is older than it.
    """
    async with conn.transaction():
        await conn.execute("CREATE TEMPORARY TABLE copied ON COMMIT DROP AS SELECT * FROM events")
        await conn.execute(f"UPDATE copied SET received_ts = {ts}")
        await conn.execute("TRUNCATE events")
        await conn.execute("INSERT INTO events SELECT * FROM copied ORDER BY event_nid")
    await conn.execute(f"REINDEX INDEX {INDEX}")


@asynccontextmanager
async def unnoticed(conn: asyncpg.Connection) -> AsyncIterator[None]:
    """Change rows in the block without a change of the index."""
    await conn.execute(READY, False, INDEX)
    yield
    await conn.execute(READY, True, INDEX)


async def of_index(store: Store) -> list[IndexMismatch]:
    return [
        mismatch for mismatch in await index_mismatches(store.database) if mismatch.name == INDEX
    ]


async def moved(conn: asyncpg.Connection, nid: int, ts: str) -> None:
    """Give an event another time of receipt; its row stays in its block, which is half empty."""
    before = await conn.fetchval(f"SELECT block FROM ({BLOCKS}) b WHERE event_nid = $1", nid)
    await conn.execute(f"UPDATE events SET received_ts = {ts} WHERE event_nid = $1", nid)
    after = await conn.fetchval(f"SELECT block FROM ({BLOCKS}) b WHERE event_nid = $1", nid)
    assert after == before, "the row is in another range: the test says nothing"


async def middle(conn: asyncpg.Connection) -> list[int]:
    """The events of a block in the middle."""
    blocks = await conn.fetch(BLOCKS)
    assert blocks[-1]["block"] > 10
    return [row["event_nid"] for row in blocks if row["block"] == 7]


async def test_sound_summaries_say_nothing(store: Store, admin: asyncpg.Connection) -> None:
    assert await of_index(store) == []
    await admin.execute("ANALYZE events")
    assert await of_index(store) == []
    await admin.execute("SELECT brin_desummarize_range($1::text::regclass, 7)", INDEX)
    assert await of_index(store) == []
    more = build_room(LIVELY, EVENTS, seed=5, sign=False)
    await store.append(more.pdus, room_version=more.version)
    assert await of_index(store) == []
    assert await findings(store) == []


async def test_an_empty_table_is_sound(store: Store) -> None:
    assert await index_mismatches(store.database) == []


@pytest.mark.parametrize(
    "at,ts",
    [
        (-1, "received_ts + 1"),
        (0, "received_ts - 1"),
        (2, f"received_ts + 20 * {DAY_MS}"),
        (2, "0"),
        (2, "9000000000000"),
    ],
    ids=["after the last", "before the first", "in another range", "before all", "after all"],
)
async def test_one_row_that_a_summary_lacks_is_found(
    dsn: str, store: Store, admin: asyncpg.Connection, at: int, ts: str
) -> None:
    nids = await middle(admin)
    assert await of_index(store) == []
    rows = await admin.fetchval("SELECT count(*) FROM events")
    async with unnoticed(admin):
        await moved(admin, nids[at], ts)
    [mismatch] = await of_index(store)
    assert mismatch.table_name == "events"
    assert f"{rows - 1} of {rows} rows are found by received_ts" in mismatch.found
    named = [finding for finding in await findings(store) if finding.check == "indexes"]
    assert [finding.subject for finding in named] == [(INDEX,)]
    assert f"REINDEX INDEX CONCURRENTLY {INDEX}" in named[0].expected
    with pytest.raises(StorageCorrupt, match=f"REINDEX INDEX CONCURRENTLY {INDEX};"):
        await refuse_corrupt_indexes(store.database, "a test", ["events"])
    done = await room_storage_beside("verify", "--repair", "--dsn", dsn)
    assert done.returncode == 1
    assert f"REINDEX INDEX CONCURRENTLY {INDEX}" in done.stderr
    await admin.execute(f"REINDEX INDEX CONCURRENTLY {INDEX}")
    assert await of_index(store) == []


async def test_what_it_lacks_is_missed_by_a_read(store: Store, admin: asyncpg.Connection) -> None:
    """What the check is for: without the index the row is there."""
    nids = await middle(admin)
    async with unnoticed(admin):
        await moved(admin, nids[-1], "9000000000000")
    found = []
    for path in ("enable_seqscan", "enable_bitmapscan"):
        async with admin.transaction():
            await admin.execute(f"SET LOCAL {path} = off")
            found.append(
                await admin.fetchval(  # a statement of its own, so it has a plan of its own
                    "SELECT count(*) FROM events WHERE received_ts > 8000000000000"
                    f" /* without {path} */"
                )
            )
    assert found == [0, 1]


async def test_rows_in_no_order_are_compared_in_longer_periods(
    store: Store, admin: asyncpg.Connection
) -> None:
    """As after an import: each range has events of the whole year."""
    await received_at(admin, IN_NO_ORDER)
    nids = await middle(admin)
    assert await of_index(store) == []
    async with unnoticed(admin):
        await moved(admin, nids[-1], "9000000000000")
    assert len(await of_index(store)) == 1


async def test_the_index_that_it_replaces_is_not_searched_in_its_place(
    store: Store, admin: asyncpg.Connection
) -> None:
    """As between the two steps of the migration."""
    await admin.execute("CREATE INDEX events_received_ts_idx ON events (received_ts)")
    assert await index_mismatches(store.database) == []
    await admin.execute("ANALYZE events")
    assert await index_mismatches(store.database) == []
    nids = await middle(admin)
    async with unnoticed(admin):
        await moved(admin, nids[-1], "9000000000000")
    assert [mismatch.name for mismatch in await index_mismatches(store.database)] == [INDEX]


async def test_other_keys_are_not_taken_for_compared(
    store: Store, admin: asyncpg.Connection
) -> None:
    await admin.execute("CREATE INDEX of_two ON events USING brin (received_ts, event_nid)")
    await admin.execute("CREATE INDEX of_text ON events USING brin (event_id)")
    await admin.execute(
        "CREATE INDEX of_some ON events USING brin ((received_ts / 2)) WHERE NOT outlier"
    )
    found = {mismatch.name: mismatch.found for mismatch in await index_mismatches(store.database)}
    assert set(found) == {"of_two", "of_text"}
    assert all(text.startswith("not compared") for text in found.values())


async def test_a_plan_that_does_not_search_by_it_is_no_agreement(
    store: Store, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_ranges, "THROUGH_BLOCK_RANGES", "SET LOCAL enable_bitmapscan = off")
    assert [mismatch.found for mismatch in await of_index(store)] == [
        "not compared: Postgres does not search by it"
    ]


async def test_many_periods_take_several_statements(
    dsn: str, store: Store, admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_ranges, "TOGETHER", 3)
    async with await Database.open(dsn) as database:
        assert await index_mismatches(database) == []
    nids = await middle(admin)
    async with unnoticed(admin):
        await moved(admin, nids[-1], "9000000000000")
    assert len(await of_index(store)) == 1


def test_the_periods_between_keys() -> None:
    rows = [
        PeriodRow(0, is_key=False, rows=5),
        PeriodRow(1, is_key=True, rows=1),
        PeriodRow(1, is_key=False, rows=2),
        PeriodRow(2, is_key=True, rows=3),
        PeriodRow(2, is_key=False, rows=4),
    ]
    assert periods_of([10, 20], rows) == [
        Period(LOWEST, 9, 5),
        Period(10, 10, 1),
        Period(11, 19, 2),
        Period(20, 20, 3),
        Period(21, HIGHEST, 4),
    ]
    assert periods_of([], rows[:1]) == [Period(LOWEST, HIGHEST, 5)]
    assert periods_of([LOWEST, HIGHEST], [PeriodRow(2, is_key=True, rows=1)]) == [
        Period(HIGHEST, HIGHEST, 1)
    ]


@pytest.mark.parametrize(
    "ranges,always,size",
    [
        ([Keys(n * 10, n * 10 + 9) for n in range(100)], 0.0, 200),
        ([Keys(n * 10, n * 10 + 9) for n in range(5_000)], 0.0, 1_250),
        ([Keys(n * 10, n * 10 + 9) for n in range(100)], 20.0, 13),
        ([Keys(n, 1_000 - n) for n in range(100)], 0.0, 7),
        ([Keys(n, 1_000 - n) for n in range(100)], 100.0, 2),
        ([Keys(5, 5)] * 50, 0.0, 1),
    ],
    ids=["in order", "many", "without summaries", "in no order", "both", "one time"],
)
def test_the_searches_are_bounded(ranges: Sequence[Keys], always: float, size: int) -> None:
    keys = keys_of(ranges, always)
    assert len(keys) == size
    read = ranges_read(ranges, keys) + (2 * len(keys) + 1) * always
    assert read <= block_ranges.READS_MAX * len(ranges)
    assert keys[-1] == max(one.last for one in ranges)
    assert len(keys) <= block_ranges.KEYS_MAX


def test_the_difference_names_the_first_period() -> None:
    periods = [Period(1, 5, 10), Period(6, 6, 2), Period(7, 9, 3)]
    assert difference("ts", periods, [10, 2, 3]) is None
    found = difference("ts", periods, [10, 1, 0])
    assert found == "11 of 15 rows are found by ts: some from 6 to 6 are missed"
