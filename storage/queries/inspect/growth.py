"""Growth: what arrived in a period, by room; and the live events of a room, by week.

A period is a range of positions of the events stream. Its ends are found by bisection, because
events arrive in the order of their positions, with few exceptions (`Store.readmit`).

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
WITH RECURSIVE bisection AS (
    SELECT t.ts, t.place, range.low, range.high
    FROM unnest($1::bigint[]) WITH ORDINALITY AS t (ts, place)
    CROSS JOIN (
        SELECT COALESCE(min(stream_ordering), 1) AS low,
            COALESCE(max(stream_ordering), 0) + 1 AS high
        FROM events
    ) AS range
    UNION ALL
    SELECT b.ts, b.place, CASE WHEN probe.ts < b.ts THEN middle.at + 1 ELSE b.low END,
        CASE WHEN probe.ts < b.ts THEN b.high ELSE middle.at END
    FROM bisection b
    CROSS JOIN LATERAL (SELECT (b.low + b.high) / 2 AS at) AS middle
    CROSS JOIN LATERAL (  -- a readmitted event is older than its neighbours
        SELECT COALESCE(max(next.received_ts), b.ts) AS ts
        FROM (
            SELECT e.received_ts
            FROM events e
            WHERE e.stream_ordering >= middle.at
            ORDER BY e.stream_ordering
            LIMIT 8
        ) AS next
    ) AS probe
    WHERE b.low < b.high
)
SELECT low
FROM bisection
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
