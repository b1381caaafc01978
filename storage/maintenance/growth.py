"""How fast the database grows, and a forecast, from the events that it has.

The store keeps no past sizes. It has the time at which each event was received, and an index of
block ranges on it. So growth is the number of events received in a period, times the bytes that an
event takes today: all tables and indexes, divided by all events. Two consequences: an import counts
on the day of the import, and purged events do not count.

The forecast continues the median of the full days, so that one day with an import has no effect. A
young or small store has no forecast: its first day is the import, and most of its size are pages
that are almost empty.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

DAY_MS: Final = 86_400_000
PERIODS_DAYS: Final = (1, 7, 30)
FORECAST_DAYS: Final = (30, 90, 365)
EVENTS_MIN: Final = 1_000
"""Events of a store that has a forecast."""

SQL_RECEIVED: Final[LiteralString] = """
WITH
recent AS MATERIALIZED (
    SELECT floor(($1::bigint - received_ts) / 86400000.0)::int AS days_ago, count(*) AS events,
        min(received_ts) AS oldest_ts
    FROM events
    WHERE received_ts > $1::bigint - $2::int * 86400000::bigint
    GROUP BY 1
),
older AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM events WHERE received_ts <= $1::bigint - $2::int * 86400000::bigint
    ) AS is_there
)
SELECT d.days_ago, COALESCE(r.events, 0)::bigint AS events, CASE
        WHEN older.is_there THEN $1::bigint - $2::int * 86400000::bigint - 1
        ELSE (SELECT min(oldest_ts) FROM recent)
    END AS oldest_ts
FROM older
CROSS JOIN generate_series(0, $2::int - 1) AS d (days_ago)
LEFT JOIN recent r USING (days_ago)
ORDER BY d.days_ago
"""


class ReceivedRow(NamedTuple):
    """The events received in 24 hours, the last ones first.

    ``oldest_ts``: when the first event of all was received, or a time before the last 30 days, if
    it was received before them.
    """

    days_ago: int
    events: int
    oldest_ts: int | None


class Growth(NamedTuple):
    """Growth in the last days.

    ``days_measured`` is less than ``days`` in a younger store, and at least 1.
    """

    days: int
    days_measured: float
    events: int
    events_per_day: float
    bytes_per_day: int


class Forecast(NamedTuple):
    """The size of the database in so many days."""

    days: int
    database_bytes: int


async def received_days(conn: Connection, now_ms: int) -> list[ReceivedRow]:
    """Return the last 30 days. It reads the blocks that may have events of these days."""
    return await conn.fetch(SQL_RECEIVED, now_ms, PERIODS_DAYS[-1], row=ReceivedRow)


def growth(received: Sequence[ReceivedRow], bytes_per_event: float, now_ms: int) -> list[Growth]:
    """Return the growth of the last day, 7 days and 30 days, from `received_days`."""
    return [_growth(days, received, bytes_per_event, now_ms) for days in PERIODS_DAYS]


def _growth(
    days: int, received: Sequence[ReceivedRow], bytes_per_event: float, now_ms: int
) -> Growth:
    oldest_ts = received[0].oldest_ts
    age = 0.0 if oldest_ts is None else (now_ms - oldest_ts) / DAY_MS
    measured = min(float(days), max(age, 1.0))
    events = sum(row.events for row in received[:days])
    a_day = events / measured
    return Growth(days, round(measured, 2), events, round(a_day, 1), round(a_day * bytes_per_event))


def full_days(received: Sequence[ReceivedRow], now_ms: int) -> list[int]:
    """Return the events of each of the last 30 days that began after the first event."""
    return [
        row.events
        for row in received
        if row.oldest_ts is not None and now_ms - (row.days_ago + 1) * DAY_MS > row.oldest_ts
    ]


def forecast(
    database_bytes: int, bytes_per_event: float, events: int, days: list[int]
) -> list[Forecast]:
    """Return the expected size in 30, 90 and 365 days; nothing without enough history.

    ``days``: the result of `full_days`.
    """
    if not days or events < EVENTS_MIN:
        return []
    a_day = median(days) * bytes_per_event
    return [Forecast(ahead, round(database_bytes + ahead * a_day)) for ahead in FORECAST_DAYS]
