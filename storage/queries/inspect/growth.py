"""Growth: what arrived in a period, by room; and the live events of a room, by week.

A period is a range of positions of the events stream. Its ends are found by a search that looks at
sixteen events at a time, because events arrive in the order of their positions, with few
exceptions: `Store.readmit`, and clocks that were wrong. It ignores times in the future, and those
before that of an earlier event.

A range of up to `SAMPLES` positions is counted. Of a larger one every n-th position is read, and
the counts are estimates: a room with a hundredth of the events is off by about a tenth. The numbers
of a room are counted in the index, up to `COUNTED_MAX`.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import RoomId

DAY_MS: Final = 86_400_000
WEEK_MS: Final = 7 * DAY_MS
SAMPLES: Final = 20_000
COUNTED_MAX: Final = 200_000

SQL_POSITIONS_AT: Final[LiteralString] = """
WITH RECURSIVE search AS (
    SELECT t.ts, t.place, range.low, range.high, -(1::bigint << 62) AS low_ts,
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS high_ts
    FROM unnest($1::bigint[]) WITH ORDINALITY AS t (ts, place)
    CROSS JOIN (
        SELECT COALESCE(min(stream_ordering), 1) AS low,
            COALESCE(max(stream_ordering), 0) + 1 AS high
        FROM events
    ) AS range
    UNION ALL
    SELECT s.ts, s.place, CASE WHEN split.rows = 1 THEN s.high ELSE split.position + 1 END,
        COALESCE(split.next_position, s.high), split.ts, COALESCE(split.next_ts, s.high_ts)
    FROM search s
    CROSS JOIN LATERAL (  -- between the last event before the time, and the next one
        SELECT p.position, p.ts, p.next_position, p.next_ts, p.rows
        FROM (
            SELECT r.position, r.ts, lead(r.position) OVER (ORDER BY r.position) AS next_position,
                lead(r.ts) OVER (ORDER BY r.position) AS next_ts, count(*) OVER () AS rows
            FROM (
                SELECT i.position, i.ts, max(i.ts) OVER (ORDER BY i.position) AS latest_ts
                FROM (
                    SELECT s.low - 1 AS position, s.low_ts AS ts
                    UNION
                    SELECT e.stream_ordering, e.received_ts
                    FROM generate_series(0, 15) AS n
                    CROSS JOIN LATERAL (
                        SELECT x.stream_ordering, x.received_ts
                        FROM events x
                        WHERE x.stream_ordering >= s.low + (s.high - s.low) * n / 16
                            AND x.stream_ordering < s.high
                        ORDER BY x.stream_ordering
                        LIMIT 1
                    ) AS e
                    WHERE e.received_ts BETWEEN s.low_ts AND s.high_ts
                ) AS i
            ) AS r
            WHERE r.ts = r.latest_ts  -- a clock was wrong where it is earlier than one before it
        ) AS p
        WHERE p.ts < s.ts
        ORDER BY p.position DESC
        LIMIT 1
    ) AS split
    WHERE s.low < s.high
)
SELECT low
FROM search
WHERE low >= high
ORDER BY place
"""

SQL_COUNTED: Final[LiteralString] = """
SELECT r.room_id, count(*)::float8 AS events,
    count(*) FILTER (WHERE e.backfilled)::float8 AS history,
    sum(octet_length(e.json))::float8 AS stored_bytes
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.stream_ordering >= $1::bigint AND e.stream_ordering < $2::bigint
    AND ($4::text IS NULL OR r.room_id = $4::text)
GROUP BY r.room_id
ORDER BY events DESC, r.room_id
LIMIT $3::bigint
"""

SQL_SAMPLED: Final[LiteralString] = """
WITH sample AS MATERIALIZED (  -- spread over the range, at a varying distance
    SELECT $1::bigint + floor((n + (hashint4(n) & 1023) / 1024.0)
        * (($2::bigint - $1::bigint)::float8 / $5::int))::bigint AS position
    FROM generate_series(0, $5::int - 1) AS n
)
SELECT r.room_id, count(*) * (($2::bigint - $1::bigint)::float8 / $5::int) AS events,
    count(*) FILTER (WHERE e.backfilled) * (($2::bigint - $1::bigint)::float8 / $5::int) AS history,
    sum(octet_length(e.json)) * (($2::bigint - $1::bigint)::float8 / $5::int) AS stored_bytes
FROM sample
CROSS JOIN LATERAL (  -- one by one
    SELECT e.room_nid, e.backfilled, e.json
    FROM events e
    WHERE e.stream_ordering = sample.position
    OFFSET 0
) AS e
JOIN rooms r USING (room_nid)
WHERE $4::text IS NULL OR r.room_id = $4::text
GROUP BY r.room_id
ORDER BY events DESC, r.room_id
LIMIT $3::bigint
"""

SQL_WEEKS: Final[LiteralString] = """
SELECT width_bucket(e.stream_ordering, $2::bigint[]) AS week, count(*)::int AS events
FROM (
    SELECT e.stream_ordering
    FROM events e
    WHERE e.room_nid = (SELECT room_nid FROM rooms WHERE room_id = $1::text)
        AND NOT e.outlier AND NOT e.backfilled
        AND e.stream_ordering >= ($2::bigint[])[1]
    ORDER BY e.stream_ordering DESC
    LIMIT $3::bigint
) AS e
GROUP BY 1
ORDER BY 1
"""


class RoomGrowthRow(NamedTuple):
    """The events of a room in a period, and their bytes as stored.

    ``history`` of the ``events`` were fetched later, to fill a gap or to page back. The others are
    new.
    """

    room_id: RoomId
    events: float
    history: float
    stored_bytes: float


class PeriodGrowth(NamedTuple):
    """The rooms that grew most in a period.

    ``positions`` is the number of positions of the stream in it: one for each event, and few more.
    ``is_exact`` False: the numbers are estimated.
    """

    positions: int
    is_exact: bool
    rooms: Sequence[RoomGrowthRow]


class WeekRow(NamedTuple):
    """The live events of a room in a week; weeks are numbered from 1."""

    week: int
    events: int


def week_begins(now_ms: int, weeks: int) -> list[int]:
    """Return when each of the last weeks begins, the latest last, in milliseconds.

    A week is seven days of UTC. The last one ends with today, so all that arrives on one day is
    counted from the same times.
    """
    tomorrow = (now_ms // DAY_MS + 1) * DAY_MS
    return [tomorrow - (weeks - number) * WEEK_MS for number in range(weeks)]


async def positions_at(conn: Connection, times_ms: Sequence[int]) -> list[int]:
    """Return for each time the first position of an event that arrived then or later."""
    return await conn.fetchvals(SQL_POSITIONS_AT, list(times_ms))


async def room_growth(
    conn: Connection,
    first: int,
    end: int,
    *,
    room_id: RoomId | None = None,
    limit: int = 50,
    samples: int = SAMPLES,
) -> PeriodGrowth:
    """Return the rooms with most events at the positions from ``first`` up to ``end``, without it.

    ``room_id``: return this room alone. Outliers have no position and do not count.
    """
    given = first, end, limit, room_id
    if end - first <= samples:
        rooms = await conn.fetch(SQL_COUNTED, *given, row=RoomGrowthRow)
        return PeriodGrowth(max(end - first, 0), is_exact=True, rooms=rooms)
    rooms = await conn.fetch(SQL_SAMPLED, *given, samples, row=RoomGrowthRow)
    return PeriodGrowth(end - first, is_exact=False, rooms=rooms)


async def room_weeks(
    conn: Connection, room_id: RoomId, boundaries: Sequence[int], *, limit: int = COUNTED_MAX
) -> list[int | None]:
    """Return the number of live events of a room in each week, None where the limit ended it.

    ``boundaries`` are the positions at which the weeks begin; the last one has no end.
    """
    rows = await conn.fetch(SQL_WEEKS, room_id, list(boundaries), limit + 1, row=WeekRow)
    counts: dict[int, int] = dict(rows)
    weeks: list[int | None] = [counts.get(week + 1, 0) for week in range(len(boundaries))]
    if sum(counts.values()) > limit:
        oldest = min(counts)
        weeks[:oldest] = [None] * oldest
    return weeks
