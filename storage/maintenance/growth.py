"""How fast the database grows, and a forecast, from the events that it has.

The store keeps no past sizes. It has the time at which each event was received, and an index on it.
So growth is the number of events received in a period, times the bytes that an event takes today:
all tables and indexes, divided by all events. Two consequences: an import counts on the day of the
import, and purged events do not count.

The forecast continues the median of the full days, so that one day with an import has no effect. A
young or small store has no forecast: its first day is the import, and most of its size are pages
that are almost empty.
"""

from statistics import median
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

DAY_MS: Final = 86_400_000
PERIODS_DAYS: Final = (1, 7, 30)
FORECAST_DAYS: Final = (30, 90, 365)
EVENTS_MIN: Final = 1_000
"""Events of a store that has a forecast."""

SQL_RECEIVED: Final[LiteralString] = """
SELECT
    p.days,
    count(e.received_ts) AS events,
    (SELECT min(received_ts) FROM events) AS oldest_ts
FROM unnest($2::int[]) AS p (days)
LEFT JOIN events e
    ON e.received_ts > $1::bigint - p.days * 86400000::bigint AND e.received_ts <= $1::bigint
GROUP BY p.days
ORDER BY p.days
"""


SQL_FULL_DAYS: Final[LiteralString] = """
SELECT count(e.received_ts) AS events
FROM generate_series(0, $2::int - 1) AS d (days_ago)
LEFT JOIN events e ON e.received_ts > $1::bigint - (d.days_ago + 1) * 86400000::bigint
    AND e.received_ts <= $1::bigint - d.days_ago * 86400000::bigint
WHERE $1::bigint - (d.days_ago + 1) * 86400000::bigint > (SELECT min(received_ts) FROM events)
GROUP BY d.days_ago
ORDER BY d.days_ago
"""


class ReceivedRow(NamedTuple):
    """The events received in the last days, and when the first event of all was received."""

    days: int
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


async def growth(conn: Connection, bytes_per_event: float, now_ms: int) -> list[Growth]:
    """Return the growth of the last day, 7 days and 30 days. It reads the index of 30 days."""
    rows = await conn.fetch(SQL_RECEIVED, now_ms, list(PERIODS_DAYS), row=ReceivedRow)
    return [_growth(row, bytes_per_event, now_ms) for row in rows]


def _growth(row: ReceivedRow, bytes_per_event: float, now_ms: int) -> Growth:
    age = 0.0 if row.oldest_ts is None else (now_ms - row.oldest_ts) / DAY_MS
    measured = min(float(row.days), max(age, 1.0))
    a_day = row.events / measured
    return Growth(
        row.days, round(measured, 2), row.events, round(a_day, 1), round(a_day * bytes_per_event)
    )


async def full_days(conn: Connection, now_ms: int) -> list[int]:
    """Return the events received on each of the last 30 days that began after the first event."""
    return await conn.fetchvals(SQL_FULL_DAYS, now_ms, PERIODS_DAYS[-1])


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
