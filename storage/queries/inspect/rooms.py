"""Rooms with the numbers that an operator looks at: active lately, by id, or the largest.

The list of active rooms reads the latest positions of the stream (`RECENT_MAX`). The list by id
continues after a room. A list by a number reads the table of rooms once, a row for each room.

The number of events is exact up to `COUNTED_MAX`. For a larger room it is the planner's estimate,
if the room is among the most common values of the last ANALYZE.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Literal, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.ids import EventId, RoomId
from storage.queries.events import event_json

# --------------------------------------------------------------------------------------------------
# Growth: what arrived in a period, by room; and the live events of a room, by week.
#
# A period is a range of positions of the events stream. Its ends are found by a search that looks
# at sixteen events at a time, because events arrive in the order of their positions, with few
# exceptions: `Store.readmit`, and clocks that were wrong. It ignores times in the future, and those
# before that of an earlier event.
#
# A range of up to `SAMPLES` positions is counted. Of a larger one every n-th position is read, and
# the counts are estimates: a room with a hundredth of the events is off by about a tenth. The
# numbers of a room are counted in the index, up to `COUNTED_MAX`.

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
    arguments = first, end, limit, room_id
    if end - first <= samples:
        rooms = await conn.fetch(SQL_COUNTED, *arguments, row=RoomGrowthRow)
        return PeriodGrowth(max(end - first, 0), is_exact=True, rooms=rooms)
    rooms = await conn.fetch(SQL_SAMPLED, *arguments, samples, row=RoomGrowthRow)
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


TEMPLATE_ROOMS: Final[LiteralString] = """
WITH
wanted AS MATERIALIZED (
    {source}
),
common AS MATERIALIZED (  -- the planner's statistics: rooms with many events
    SELECT unnest(s.most_common_vals::text::int[]) AS room_nid,
        unnest(s.most_common_freqs) AS share
    FROM pg_stats s
    WHERE s.schemaname = current_schema() AND s.tablename = 'events' AND s.attname = 'room_nid'
),
total AS MATERIALIZED (
    SELECT GREATEST(reltuples, 0)::float8 AS events
    FROM pg_class
    WHERE oid = to_regclass('events')
)
SELECT r.room_id, r.room_version, r.joined_count, r.invited_count,
    cardinality(r.forward_extremities) AS extremities,
    (
        SELECT count(*)::int
        FROM (SELECT FROM missing_events m WHERE m.room_nid = r.room_nid LIMIT $2::bigint) AS m
    ) AS gaps,
    (
        SELECT count(*)
        FROM (
            SELECT FROM events e WHERE e.room_nid = r.room_nid AND NOT e.outlier LIMIT $2::bigint
        ) AS e
    ) AS counted_events,
    (c.share * total.events)::bigint AS estimated_events,
    r.max_topological_ordering, r.last_stream_ordering,
    (
        SELECT e.received_ts FROM events e WHERE e.stream_ordering = r.last_stream_ordering
    ) AS last_received_ts,
    r.is_partial
FROM wanted w
JOIN rooms r USING (room_nid)
CROSS JOIN total
LEFT JOIN common c ON c.room_nid = r.room_nid
ORDER BY w.place
"""

PART_RECENT: Final[LiteralString] = """
    SELECT e.room_nid, -max(e.stream_ordering) AS place
    FROM (
        SELECT e.room_nid, e.stream_ordering
        FROM events e
        WHERE e.stream_ordering IS NOT NULL
        ORDER BY e.stream_ordering DESC
        LIMIT $3::bigint
    ) AS e
    GROUP BY e.room_nid
    ORDER BY 2
    LIMIT $1::bigint
"""

PART_BY_ID: Final[LiteralString] = """
    SELECT r.room_nid, row_number() OVER (ORDER BY r.room_id) AS place
    FROM (
        SELECT room_nid, room_id
        FROM rooms
        WHERE room_id > $3::text
        ORDER BY room_id
        LIMIT $1::bigint
    ) AS r
"""

PART_LARGEST: Final[LiteralString] = """
    SELECT r.room_nid, row_number() OVER (ORDER BY r.size DESC, r.room_nid) AS place
    FROM (
        SELECT room_nid, CASE $3::text
            WHEN 'members' THEN joined_count
            WHEN 'extremities' THEN cardinality(forward_extremities)
            ELSE max_topological_ordering
        END AS size
        FROM rooms
        ORDER BY size DESC, room_nid
        LIMIT $1::bigint
    ) AS r
"""

PART_REQUESTED: Final[LiteralString] = """
    SELECT r.room_nid, g.place
    FROM unnest($3::text[]) WITH ORDINALITY AS g (room_id, place)
    JOIN rooms r USING (room_id)
    LIMIT $1::bigint
"""

SQL_RECENT: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_RECENT)
SQL_BY_ID: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_BY_ID)
SQL_LARGEST: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_LARGEST)
SQL_REQUESTED: Final[LiteralString] = fill(TEMPLATE_ROOMS, source=PART_REQUESTED)

RECENT_MAX: Final = 5_000
ROOMS_COUNTED_MAX: Final = 1_000

Size = Literal["members", "extremities", "depth"]


class RoomLine(NamedTuple):
    """A room.

    ``gaps`` and ``counted_events`` are at most `COUNTED_MAX`. ``estimated_events``: None for a room
    of which the planner knows no share. ``max_topological_ordering`` is the length of the longest
    path of the graph. ``last_received_ts`` is when the last live event arrived, None if there is
    none.
    """

    room_id: RoomId
    room_version: str
    joined_count: int
    invited_count: int
    extremities: int
    gaps: int
    counted_events: int
    estimated_events: int | None
    max_topological_ordering: int
    last_stream_ordering: int | None
    last_received_ts: int | None
    is_partial: bool

    @property
    def events(self) -> int:
        """Return the number of events: exact below `COUNTED_MAX`, else as well as it is known."""
        if self.counted_events < ROOMS_COUNTED_MAX:
            return self.counted_events
        return max(self.counted_events, self.estimated_events or 0)

    @property
    def is_exact(self) -> bool:
        """Return whether `events` was counted."""
        return self.counted_events < ROOMS_COUNTED_MAX


async def recent_rooms(conn: Connection, limit: int = 50) -> list[RoomLine]:
    """Return the rooms of the latest events, the latest first."""
    return await conn.fetch(SQL_RECENT, limit, ROOMS_COUNTED_MAX, RECENT_MAX, row=RoomLine)


async def rooms_after(conn: Connection, room_id: str = "", limit: int = 50) -> list[RoomLine]:
    """Return the next rooms by id after one that need not exist."""
    return await conn.fetch(SQL_BY_ID, limit, ROOMS_COUNTED_MAX, room_id, row=RoomLine)


async def largest_rooms(conn: Connection, size: Size, limit: int = 50) -> list[RoomLine]:
    """Return the rooms with most joined members, forward extremities, or depth."""
    return await conn.fetch(SQL_LARGEST, limit, ROOMS_COUNTED_MAX, size, row=RoomLine)


async def rooms_by_id(conn: Connection, room_ids: list[RoomId]) -> list[RoomLine]:
    """Return the stored ones of these rooms, in this order."""
    return await conn.fetch(SQL_REQUESTED, len(room_ids), ROOMS_COUNTED_MAX, room_ids, row=RoomLine)


# --------------------------------------------------------------------------------------------------
# Search by what an operator has at hand: an event id, the beginning of another id, or an alias.
#
# Ids are looked up in their indexes. That of event ids is a hash index: it knows whole ids only. An
# alias is looked for in the current canonical aliases, of at most `ALIASES_MAX` rooms: no table has
# the alias of a room by itself.

SQL_EVENT: Final[LiteralString] = """
SELECT e.event_id
FROM events e
WHERE e.event_id = $1::text
LIMIT 1
"""

SQL_ROOMS: Final[LiteralString] = """
SELECT r.room_id
FROM rooms r
WHERE r.room_id >= $1::text AND r.room_id < $1::text || chr(1114111)
ORDER BY r.room_id
LIMIT $2::bigint
"""

SQL_USERS: Final[LiteralString] = fill("""
SELECT found.user_id
FROM (
    (
        SELECT p.name AS user_id
        FROM principals p
        WHERE p.name >= $1::text AND p.name < $1::text || chr(1114111)
        ORDER BY p.name
        LIMIT $2::bigint
    )
    UNION
    (
        SELECT k.state_key
        FROM state_keys k
        WHERE k.type_nid = {TYPE_MEMBER} AND k.state_key >= $1::text
            AND k.state_key < $1::text || chr(1114111)
        ORDER BY k.state_key
        LIMIT $2::bigint
    )
) AS found
WHERE starts_with(found.user_id, '@')
ORDER BY found.user_id
LIMIT $2::bigint
""")

SQL_ALIASES: Final[LiteralString] = fill("""
SELECT r.room_id, r.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS hidden, e.json
FROM (
    SELECT c.room_nid, c.event_nid
    FROM current_state c
    WHERE c.state_key_nid = {KEY_CANONICAL_ALIAS}
    ORDER BY c.room_nid
    LIMIT $1::bigint
) AS c
CROSS JOIN LATERAL (  -- one by one: few events are aliases
    SELECT e.event_id, e.redacted_by, e.redacted_form, e.json
    FROM events e
    WHERE e.event_nid = c.event_nid
    OFFSET 0
) AS e
JOIN rooms r ON r.room_nid = c.room_nid
""")

MATCHES_MAX: Final = 20
ALIASES_MAX: Final = 20_000


class AliasRow(NamedTuple):
    """The canonical alias event of a room."""

    room_id: RoomId
    room_version: str
    event_id: EventId
    hidden: bool
    json: StoredBytes


async def events_called(conn: Connection, event_id: str) -> list[str]:
    """Return the id if an event of this id is stored, else nothing."""
    return await conn.fetchvals(SQL_EVENT, event_id)


async def rooms_like(conn: Connection, beginning: str, limit: int = MATCHES_MAX) -> list[str]:
    """Return ids of rooms with a beginning, in their order."""
    return await conn.fetchvals(SQL_ROOMS, beginning, limit)


async def users_like(conn: Connection, beginning: str, limit: int = MATCHES_MAX) -> list[str]:
    """Return ids of known users of any server with a beginning, in their order."""
    return await conn.fetchvals(SQL_USERS, beginning, limit)


async def rooms_by_alias(conn: Connection, alias: str, limit: int = MATCHES_MAX) -> list[RoomId]:
    """Return the rooms whose canonical alias event has this alias, also as an alternative."""
    rows = await conn.fetch(SQL_ALIASES, ALIASES_MAX, row=AliasRow)
    named = (row.room_id for row in rows if alias in _aliases(row))
    return list(islice(named, limit))


def _aliases(row: AliasRow) -> list[Any]:
    raw = decode(row.json, row.event_id, row.room_id)
    json = event_json(row.event_id, raw, row.room_version, redacted=row.hidden)
    content = json.get("content")
    if not isinstance(content, dict):
        return []
    others = content.get("alt_aliases")
    return [content.get("alias"), *(others if isinstance(others, list) else ())]


# --------------------------------------------------------------------------------------------------
# The writers of all streams: their positions, when they entered, and whether a process is live.

SQL_WRITERS: Final[LiteralString] = """
SELECT p.stream_name, p.instance_name, p.stream_id, p.entered_at, p.epoch,
    max(p.stream_id) OVER (PARTITION BY p.stream_name) - p.stream_id AS behind,
    EXISTS (
        SELECT
        FROM pg_stat_activity a
        WHERE a.datname = current_database()
            AND is_session_of(a.application_name, p.instance_name)
    ) AS is_live
FROM stream_positions p
ORDER BY p.stream_name, p.instance_name
"""

SQL_PURGED: Final[LiteralString] = """
SELECT stream_name, purged_upto
FROM purged_streams
ORDER BY stream_name
"""

SQL_LOST: Final[LiteralString] = """
SELECT stream_name, lost_after, lost_upto
FROM lost_positions
ORDER BY stream_name, lost_upto
"""


class WriterPositionRow(NamedTuple):
    """The position of a writer in a stream.

    ``behind``: how far it is behind the furthest writer of the stream, in positions. ``is_live``: a
    session of a process with this name is open, on this server.
    """

    stream_name: str
    instance_name: str
    stream_id: int
    entered_at: int
    epoch: int
    behind: int
    is_live: bool


class PurgedStreamRow(NamedTuple):
    """The position up to which facts of a stream may be deleted."""

    stream_name: str
    purged_upto: int


class LostRangeRow(NamedTuple):
    """Positions that a restore of the database removed."""

    stream_name: str
    lost_after: int
    lost_upto: int


async def writers(conn: Connection) -> list[WriterPositionRow]:
    return await conn.fetch(SQL_WRITERS, row=WriterPositionRow)


async def purged_streams(conn: Connection) -> list[PurgedStreamRow]:
    """Return the streams with deleted facts."""
    return await conn.fetch(SQL_PURGED, row=PurgedStreamRow)


async def lost_ranges(conn: Connection) -> list[LostRangeRow]:
    """Return the gaps that restores left in the streams."""
    return await conn.fetch(SQL_LOST, row=LostRangeRow)


# --------------------------------------------------------------------------------------------------
# The statements that run in this database now, the longest first.
#
# Postgres shows the text of another role's statements only to a member of pg_read_all_stats.

SQL_RUNNING: Final[LiteralString] = """
SELECT a.pid, a.application_name, COALESCE(a.state, '') AS state,
    (extract(epoch FROM clock_timestamp() - COALESCE(a.query_start, a.backend_start))
        * 1000)::bigint AS running_ms,
    COALESCE(a.wait_event_type || ': ' || a.wait_event, '') AS waits_for,
    COALESCE(left(a.query, 2000), '') AS query
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.backend_type = 'client backend'
    AND a.pid <> pg_backend_pid() AND a.state <> 'idle'
ORDER BY a.query_start
LIMIT $1::bigint
"""


class RunningRow(NamedTuple):
    """A session that runs a statement, or has a transaction open."""

    pid: int
    application_name: str
    state: str
    running_ms: int
    waits_for: str
    query: str


async def running(conn: Connection, limit: int = 20) -> list[RunningRow]:
    """Return the sessions that are not idle, the longest statement first."""
    return await conn.fetch(SQL_RUNNING, limit, row=RunningRow)
