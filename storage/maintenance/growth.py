"""How fast the database grows, and a forecast, from the events that it has.

The store keeps no past sizes. It has the time at which each event was received, and an index on it.
So growth is the number of events received in a period, times the bytes that an event takes today:
all tables and indexes, divided by all events. Two consequences: an import counts on the day of the
import, and purged events do not count.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection

DAY_MS: Final = 86_400_000
PERIODS_DAYS: Final = (1, 7, 30)
FORECAST_DAYS: Final = (30, 90, 365)

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
    """The size of the database in so many days, at the rate of the longest period."""

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


def forecast(database_bytes: int, measured: list[Growth]) -> list[Forecast]:
    """Return the expected size in 30, 90 and 365 days."""
    a_day = measured[-1].bytes_per_day
    return [Forecast(days, database_bytes + days * a_day) for days in FORECAST_DAYS]
