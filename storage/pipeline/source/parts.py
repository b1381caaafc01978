"""How a read is divided among tasks by the option ``partition_by``: whole rooms, or whole days.

  partition_by=room   task 0: rooms 1 to 7    task 1: room 8    task 2: rooms 9 to 400
  partition_by=day    task 0: 1 to 3 May      task 1: 4 May     task 2: 5 to 31 May

Tasks get about the same number of events. The number of a room's events is taken from its largest
topological position, which costs one pass over `rooms`; that of a day is counted, which costs one
pass over `events`, or over the blocks that may have events of the period.
"""

from typing import Final, LiteralString

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.source.filters import ALL, SQL_BY_INDEX, Range

DAY_MS: Final = 86_400_000

SQL_ROOM_PARTS: Final[LiteralString] = """
WITH sized AS (
    SELECT room_nid, GREATEST(max_topological_ordering, 1) AS size
    FROM rooms
),
placed AS (
    SELECT room_nid, sum(size) OVER (ORDER BY room_nid) - size AS before, sum(size) OVER () AS total
    FROM sized
)
SELECT min(room_nid)::bigint AS first, max(room_nid)::bigint AS last
FROM placed
GROUP BY floor(before * $1::bigint / total)
ORDER BY first
"""

SQL_RECEIPTS: Final[LiteralString] = """
SELECT COALESCE(min(received_ts), 0)::bigint AS first,
    COALESCE(max(received_ts), -1)::bigint AS last
FROM events
WHERE received_ts BETWEEN $1::bigint AND $2::bigint
"""

SQL_DAYS: Final[LiteralString] = """
SELECT floor(received_ts / $3::numeric)::bigint AS day, count(*) AS events,
    min(received_ts) AS first, max(received_ts) AS last
FROM events
WHERE received_ts BETWEEN $1::bigint AND $2::bigint
GROUP BY day
ORDER BY day
"""


def received_between(conn: ArrowConnection, period: Range) -> Range:
    """Return the first and last time of receipt in a period; an empty range if there is none.

    It reads the blocks that may have events of the period.
    """
    conn.execute(SQL_BY_INDEX)
    [row] = conn.rows(SQL_RECEIPTS, *period)
    return Range(row["first"], row["last"])


def room_parts(conn: ArrowConnection, parts: int) -> list[tuple[int, int]]:
    """Return at most so many ranges of room nids (begin, end); they cover all rooms."""
    rows = conn.rows(SQL_ROOM_PARTS, parts)
    return [(row["first"], row["last"] + 1) for row in rows]


def day_parts(conn: ArrowConnection, parts: int, within: Range = ALL) -> list[tuple[int, int]]:
    """Return at most so many ranges of times of receipt (begin, end), in ms.

    They begin at midnight (UTC), or where ``within`` does, and cover all events there.
    """
    if within != ALL:
        conn.execute(SQL_BY_INDEX)
    days = conn.rows(SQL_DAYS, *within, DAY_MS)
    if not days:
        return []
    total = sum(row["events"] for row in days)
    begins: dict[int, int] = {}
    before = 0
    for row in days:
        begins.setdefault(before * parts // total, row["day"])
        before += row["events"]
    starts = [max(day * DAY_MS, days[0]["first"]) for day in begins.values()]
    return list(zip(starts, [*starts[1:], days[-1]["last"] + 1], strict=True))
