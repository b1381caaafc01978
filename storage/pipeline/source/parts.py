"""How a read is divided among tasks by the option ``partition_by``: whole rooms, or whole days.

  partition_by=room   task 0: rooms 1 to 7    task 1: room 8    task 2: rooms 9 to 400
  partition_by=day    task 0: 1 to 3 May      task 1: 4 May     task 2: 5 to 31 May

Tasks get about the same number of events. The number of a room's events is taken from its largest
topological position, which costs one pass over `rooms`; that of a day is counted in the index of
times of receipt.
"""

from typing import Final, LiteralString

from storage.database.arrow_results import ArrowConnection
from storage.pipeline.source.filters import ALL, Range, received_between

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

SQL_DAYS: Final[LiteralString] = """
SELECT floor(received_ts / $3::numeric)::bigint AS day, count(*) AS events
FROM events
WHERE received_ts BETWEEN $1::bigint AND $2::bigint
GROUP BY day
ORDER BY day
"""


def room_parts(conn: ArrowConnection, parts: int) -> list[tuple[int, int]]:
    """Return at most so many ranges of room nids (begin, end); they cover all rooms."""
    rows = conn.rows(SQL_ROOM_PARTS, parts)
    return [(row["first"], row["last"] + 1) for row in rows]


def day_parts(conn: ArrowConnection, parts: int, within: Range = ALL) -> list[tuple[int, int]]:
    """Return at most so many ranges of times of receipt (begin, end), in ms.

    They begin at midnight (UTC), or where ``within`` does, and cover all events there.
    """
    stored = received_between(conn)
    first, last = max(within.first, stored.first), min(within.last, stored.last)
    days = [(row["day"], row["events"]) for row in conn.rows(SQL_DAYS, first, last, DAY_MS)]
    total = sum(events for _, events in days)
    begins: dict[int, int] = {}
    before = 0
    for day, events in days:
        begins.setdefault(before * parts // total, day)
        before += events
    starts = [max(day * DAY_MS, first) for day in begins.values()]
    return list(zip(starts, [*starts[1:], last + 1], strict=True)) if starts else []
