"""Purges by time where a clock was wrong: nothing that arrived after the date goes."""

import logging
import time
from collections.abc import Sequence

import pytest

from storage import Config, Store
from storage.database import deployment
from storage.errors import PurgeRefused
from storage.maintenance.purge import cut_point, purge_history, purge_retention
from storage.maintenance.purge.cut_point import SQL_ROOM, CutPoint, PurgedRoomRow, before_time
from storage.testing import RoomBuilder
from tests.maintenance.purging import ALICE, chat, value
from tests.maintenance.rooms import SERVER, findings
from tests.small_limits import purges_in_batches

DAY = 86_400_000
TODAY = 20_000
"""The first day of a room, in days since 1970."""
AHEAD = 4_070_908_800_000  # 2099
CONFIG = Config(purge_pause_ms=0)
small_batches = purges_in_batches(20)


@pytest.fixture
def config() -> Config:
    return CONFIG


def at(day: int) -> int:
    """Return a time (ms) on a day of the room; day 0 is in 1970."""
    return (TODAY + day) * DAY if day else 0


async def arrived(store: Store, times: Sequence[int]) -> tuple[RoomBuilder, PurgedRoomRow]:
    """Store a room, event n of which arrived at ``times[n]``."""
    room = RoomBuilder("11")
    room.start(ALICE)
    for number in range(len(times) - len(room.events)):
        room.message(ALICE, f"message {number}")
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events e SET received_ts = i.ts FROM unnest($1::text[], $2::bigint[])"
            " AS i (event_id, ts) WHERE e.event_id = i.event_id",
            [event.event_id for event in room.events],
            list(times),
        )
        row = await conn.fetchrow(SQL_ROOM, room.room_id, row=PurgedRoomRow)
    assert row is not None
    return room, row


@pytest.mark.parametrize("small_pages", [True, False])
@pytest.mark.parametrize(
    "times, kept",
    [
        # in days; purged before day 20, on day 30
        ("1 2 3 4 5 6 7 8 19 20 21", "20 21"),
        ("1 2 3 4 5 6 7 0 21 22 23", "0 21 22 23"),
        ("1 2 3 4 5 6 7 21 0 22 23", "21 0 22 23"),
        ("1 2 3 4 5 6 21 22 23 24 0", "21 22 23 24 0"),
        ("1 2 3 4 5 6 7 0 0 0 0", "0 0 0 0"),
        ("1 2 3 4 0 0 5 6 7 21 22", "21 22"),
        ("0 0 0 0 21 22 23 24 0 25 26", "0 0 0 0 21 22 23 24 0 25 26"),
        ("0 0 1 2 3 4 21 22 23 24 25", "21 22 23 24 25"),
        ("1 2 3 99 4 5 6 7 21 22 23", "21 22 23"),
        ("1 2 3 99 0 4 5 99 21 22 23", "99 21 22 23"),
        ("1 2 3 99 0 21 22 23 24 25 26", "99 0 21 22 23 24 25 26"),
        ("1 2 3 4 5 6 7 99 99 99 99", "99 99 99 99"),
        ("99 99 1 2 3 4 5 6 21 22 23", "21 22 23"),
        ("1 2 3 4 5 6 7 8 9 99 0", "99 0"),
        ("1 2 3 4 5 6 7 8 9 10 11", "11"),
        ("99 99 99 99 99 99 99 99 99 99 99", "99 99 99 99 99 99 99 99 99 99 99"),
        ("21 22 23 24 25 26 27 28 28 28 29", "21 22 23 24 25 26 27 28 28 28 29"),
        # once, a clock was ahead by less than the time since
        ("1 2 25 3 4 5 6 7 8 26 27", "25 3 4 5 6 7 8 26 27"),
    ],
)
async def test_the_cut_where_clocks_were_wrong(
    store: Store, monkeypatch: pytest.MonkeyPatch, times: str, kept: str, *, small_pages: bool
) -> None:
    if small_pages:
        monkeypatch.setattr(cut_point, "PAGES", (1, 2))
    arrivals = [at(int(day)) for day in times.split()]
    room, row = await arrived(store, arrivals)
    async with store.database.connection() as conn:
        cut = await before_time(conn, room.room_id, row, at(20), at(30))
        positions = await conn.fetchvals("SELECT stream_ordering FROM events ORDER BY 1")
    first = len(arrivals) - len(kept.split())
    assert cut == CutPoint(first + 1, positions[first] - 1)


async def test_clocks_of_several_processes_differ_a_little(store: Store) -> None:
    """An event may be older than the one before it by less than the tolerance."""
    times = [at(number) - (number % 2) * 2_000 for number in range(1, 12)]
    times[7] = times[6] - deployment.TOLERANCE_MS
    room, row = await arrived(store, times)
    async with store.database.connection() as conn:
        cut = await before_time(conn, room.room_id, row, times[7] + 1, at(30))
    assert cut is not None
    assert cut.topological == 7


async def test_an_event_that_ends_a_purge_is_named(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock was ahead: the purge ends there until the date has passed it, and says so."""
    times = [1, 2, 25, 3, 4, 5, 6, 7, 8, 26, 27]
    room, row = await arrived(store, [at(day) for day in times])
    async with store.database.connection() as conn:
        for date, is_told in ((20, True), (26, False)):
            caplog.clear()
            await before_time(conn, room.room_id, row, at(date), at(30))
            told = [one for one in caplog.records if one.levelno == logging.WARNING]
            assert bool(told) is is_told
            for one in told:
                assert one.__dict__["event_id"] == room.events[2].event_id
                assert "2024-10-29" in one.getMessage()
                assert "--before" in one.getMessage()


@pytest.mark.parametrize("clock", [0, 789_000_000_000, AHEAD])
@pytest.mark.parametrize("number", [1, 5, 59])
async def test_nothing_of_today_is_purged(store: Store, clock: int, number: int) -> None:
    """Sixty events of today; some were received when the clock said 1970, 1995 or 2099."""
    room, now = chat(57), time.time_ns() // 1_000_000
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = CASE WHEN topological_ordering BETWEEN 61 - $1::int"
            " AND 60 THEN $2::bigint ELSE $3::bigint END",
            number,
            clock,
            now - 1_000,
        )
    purged = await purge_history(
        store.database, room.room_id, server_name=SERVER, before_ts=now - DAY, local=True
    )
    assert purged.events == 0
    assert await value(store, "SELECT count(*) FROM events WHERE NOT outlier") == len(room.events)


async def test_a_room_that_began_under_a_wrong_clock_is_kept(store: Store) -> None:
    """All of its first events say 1970, and only those of another room say when they arrived."""
    other, room, now = chat(20), RoomBuilder("11", seed=7), time.time_ns() // 1_000_000
    await store.append(other.pdus)
    room.start(ALICE)
    for number in range(20):
        room.message(ALICE, str(number))
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = 0 FROM rooms r WHERE r.room_nid = events.room_nid"
            " AND r.room_id = $1::text AND topological_ordering < 15",
            room.room_id,
        )
    purged = await purge_history(
        store.database, room.room_id, server_name=SERVER, before_ts=now - DAY, local=True
    )
    assert purged.events == 0


@pytest.mark.parametrize("clock", [0, 789_000_000_000])
async def test_the_first_event_of_a_store_in_1970_is_kept(store: Store, clock: int) -> None:
    """No other event says when it arrived."""
    room, now = chat(10), time.time_ns() // 1_000_000
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = $1::bigint WHERE topological_ordering < 3", clock
        )
    purged = await purge_history(
        store.database, room.room_id, server_name=SERVER, before_ts=now - DAY, local=True
    )
    assert purged.events == 0


async def test_retention_keeps_what_is_young_and_purges_what_is_old(store: Store) -> None:
    """Three days old, 1970 and 2099 among them; then events of today, with 1970 among them."""
    room, now = chat(57), time.time_ns() // 1_000_000
    room.state_event(ALICE, "m.room.retention", {"max_lifetime": 2 * DAY})
    await store.append(room.pdus)
    times = [now - 3 * DAY] * 30 + [now - 1_000] * (len(room.events) - 30)
    times[10], times[20], times[40] = 0, AHEAD, 0
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = ($1::bigint[])[topological_ordering]", times
        )
    purged = [one.events async for one in purge_retention(store.database, server_name=SERVER)]
    assert purged == [30]
    assert await findings(store) == []


@pytest.mark.parametrize("clock", ["time", "SQL_DATABASE_CLOCK"])
async def test_a_clock_that_is_ahead_purges_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: str
) -> None:
    """The clock of the process that purges, or that of Postgres: the earlier one counts."""
    room = chat(20)
    room.state_event(ALICE, "m.room.retention", {"max_lifetime": 2 * DAY})
    await store.append(room.pdus)
    if clock == "time":
        monkeypatch.setattr(time, "time_ns", lambda: AHEAD * 1_000_000)
    else:
        monkeypatch.setattr(deployment, clock, f"SELECT {AHEAD}::bigint")
    assert [one async for one in purge_retention(store.database, server_name=SERVER)] == []
    with pytest.raises(PurgeRefused, match="future"):
        await purge_history(
            store.database, room.room_id, server_name=SERVER, before_ts=AHEAD - DAY, local=True
        )
    assert "the clock of this process and that of Postgres differ" in caplog.text
