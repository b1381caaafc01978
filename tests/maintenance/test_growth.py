"""Growth is counted from the time at which events were received."""

import pytest

import storage
from storage.database import Database
from storage.maintenance.growth import (
    DAY_MS,
    Forecast,
    forecast,
    full_days,
    growth,
    received_days,
)
from storage.testing import RoomBuilder

ALICE = "@alice:s1.test"
NOW = 100 * DAY_MS


async def received(dsn: str, *ages_days: float) -> None:
    """Store a room whose events were received that many days ago."""
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    while len(room.events) < len(ages_days):
        room.message(ALICE)
    assert len(room.events) == len(ages_days)
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            await conn.execute(
                """
                UPDATE events SET received_ts = t.ts
                FROM unnest($1::bigint[]) WITH ORDINALITY AS t (ts, number)
                WHERE events.stream_ordering = (
                    SELECT stream_ordering FROM events ORDER BY stream_ordering
                    OFFSET t.number - 1 LIMIT 1)
                """,
                [round(NOW - age * DAY_MS) for age in ages_days],
            )


@pytest.mark.parametrize(
    "ages,expected",
    [
        (
            [0, 0.5, 0.99, 1, 6.5, 7.5, 29, 31, 50],
            [(1, 1.0, 3, 3.0, 300), (7, 7.0, 5, 0.7, 71), (30, 30.0, 7, 0.2, 23)],
        ),
        (
            [0, 0.5, 2, 3, 3.5, 4, 5, 6, 10],
            [(1, 1.0, 2, 2.0, 200), (7, 7.0, 8, 1.1, 114), (30, 10.0, 9, 0.9, 90)],
        ),
        (
            [0.001] * 9,
            [(1, 1.0, 9, 9.0, 900), (7, 1.0, 9, 9.0, 900), (30, 1.0, 9, 9.0, 900)],
        ),
        (
            [40.0] * 9,
            [(1, 1.0, 0, 0.0, 0), (7, 7.0, 0, 0.0, 0), (30, 30.0, 0, 0.0, 0)],
        ),
    ],
    ids=["old", "ten days", "new", "silent"],
)  # fmt: skip
async def test_growth_by_period(
    dsn: str, ages: list[float], expected: list[tuple[float, ...]]
) -> None:
    await received(dsn, *ages)
    async with await Database.open(dsn) as database, database.connection() as conn:
        found = growth(await received_days(conn, NOW), 100.0, NOW)
    assert [tuple(one) for one in found] == expected


@pytest.mark.parametrize(
    "ages,days",
    [
        ([0.5, 0.99, 1.5, 2, 2.5, 2.6, 2.7, 3.2, 3.5], [2, 1, 4]),
        ([0.001] * 9, []),
        ([0.5] * 8 + [1.0], []),
        ([0.5] * 8 + [1.01], [8]),
        ([*([40.0] * 8), 29.5], [*([0] * 29), 1]),
    ],
    ids=["three days", "new", "a day", "more than a day", "silent"],
)
async def test_the_full_days_after_the_first_event(
    dsn: str, ages: list[float], days: list[int]
) -> None:
    await received(dsn, *ages)
    async with await Database.open(dsn) as database, database.connection() as conn:
        assert full_days(await received_days(conn, NOW), NOW) == days


def test_the_forecast_continues_the_median_day() -> None:
    assert forecast(5_000, 2.5, 1_000, [10, 90_000, 20]) == [
        Forecast(days, 5_000 + days * 50) for days in (30, 90, 365)
    ]
    assert forecast(5_000, 2.5, 1_000, []) == []
    assert forecast(5_000, 2.5, 999, [10, 20]) == []


async def test_an_empty_store_does_not_grow(dsn: str) -> None:
    async with await Database.open(dsn) as database, database.connection() as conn:
        found = growth(await received_days(conn, NOW), 0.0, NOW)
    assert [(one.events, one.bytes_per_day) for one in found] == [(0, 0)] * 3
