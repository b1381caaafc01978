"""The cut of a purge: a topological position, and a stream position.

A live event is purged if it is below the topological position and arrived by the stream position.
Backfilled history is purged by the topological position alone, as it never came down a sync, but
only if it was stored when the job began. So new events are never purged while a job runs, and
`purged_streams` never passes the position of the named event.

By time, the cut is below the first live event that arrived at the date or later, in the order of
arrival. The clock may have been wrong at some arrivals:

    the time of an event             it is
    later than now, or before 2014   impossible
    earlier than that of one before  impossible, if by more than `TOLERANCE_MS`
    any other                        possible

"One before" is one of the room, or, before its first event, of the whole store. If no such event
arrived by a right clock, a time since 2014 that is too early counts as possible. An event with an
impossible time counts as arrived with the next one whose time is possible, and as just arrived if
there is none. Example, with a purge before day 20; 30 is in the future:

    10  11  30  12  0  19  |  0  21  22    the 0 at the cut may have arrived on day 20 or 21

The events are read in pages from the oldest one on, as far as the cut: about those that go.
"""

import logging
from datetime import UTC, datetime
from itertools import chain, repeat
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.deployment import TOLERANCE_MS
from storage.errors import PurgeRefused, UnknownEvent

logger: logging.Logger = logging.getLogger(__name__)

PAGES: Final = (100, 1_000, 10_000)
"""Events that a statement reads: the first, the second, and each further one."""

FIRST_TS: Final = 1_388_534_400_000
"""The year 2014: no event of Matrix arrived before. Clocks that were not set say 1970 or 1995."""

NONE_YET: Final = -(1 << 62)
"""Below every stream position and time."""

SQL_ROOM: Final[LiteralString] = """
SELECT r.room_nid, r.room_version,
    (
        SELECT max(e.topological_ordering)
        FROM unnest(r.forward_extremities) AS n (event_nid)
        CROSS JOIN LATERAL (SELECT x.topological_ordering FROM events x
            WHERE x.event_nid = n.event_nid OFFSET 0) AS e
    ) AS highest
FROM rooms r
WHERE r.room_id = $1::text
"""

SQL_EVENT: Final[LiteralString] = """
SELECT room_nid, topological_ordering, stream_ordering
FROM events
WHERE event_id = $1::text
"""

SQL_LAST: Final[LiteralString] = """
SELECT event_id, topological_ordering, stream_ordering, received_ts
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled
ORDER BY stream_ordering DESC
LIMIT 1
"""

SQL_AFTER: Final[LiteralString] = """
SELECT event_id, topological_ordering, stream_ordering, received_ts
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering > $2::bigint
ORDER BY stream_ordering
LIMIT 2
"""

SQL_BEFORE: Final[LiteralString] = """
SELECT max(e.received_ts)
FROM generate_series(0, 61) AS n
CROSS JOIN LATERAL (
    SELECT received_ts
    FROM events
    WHERE stream_ordering <= $1::bigint - (1::bigint << n)
    ORDER BY stream_ordering DESC
    LIMIT 1
) AS e
WHERE e.received_ts <= $2::bigint
"""
"""Of some events that arrived before one, at growing distances: few arrived by a wrong clock."""

SQL_ARRIVALS: Final[LiteralString] = """
WITH
page AS MATERIALIZED (
    SELECT stream_ordering, received_ts
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering > $2::bigint
    ORDER BY stream_ordering
    LIMIT $7::int
),
possible AS MATERIALIZED (
    SELECT stream_ordering, received_ts
    FROM (
        SELECT stream_ordering, received_ts,
            max(received_ts) FILTER (WHERE received_ts <= $5::bigint)
                OVER (ORDER BY stream_ordering) AS latest_ts
        FROM page
    ) AS p
    WHERE received_ts <= $5::bigint AND received_ts >= GREATEST(latest_ts, $3::bigint) - $6::bigint
),
new AS (
    SELECT min(stream_ordering) AS stream_ordering
    FROM possible
    WHERE received_ts >= $4::bigint
),
old AS (
    SELECT max(p.stream_ordering) AS stream_ordering, max(p.received_ts) AS latest_ts
    FROM possible p
    CROSS JOIN new
    WHERE new.stream_ordering IS NULL OR p.stream_ordering < new.stream_ordering
)
SELECT (SELECT max(stream_ordering) FROM page) AS upto,
    old.stream_ordering AS old_upto,
    old.latest_ts,
    new.stream_ordering IS NOT NULL AS is_reached
FROM old
CROSS JOIN new
"""


class PurgedRoomRow(NamedTuple):
    """A room; ``highest``: the largest topological ordering of its forward extremities, or None."""

    room_nid: int
    room_version: str
    highest: int | None


class CutEventRow(NamedTuple):
    """The positions of an event; None for an outlier."""

    room_nid: int
    topological_ordering: int | None
    stream_ordering: int | None


class LiveRow(NamedTuple):
    """A live event, its positions, and when it arrived (ms)."""

    event_id: str
    topological_ordering: int
    stream_ordering: int
    received_ts: int


class ArrivalsRow(NamedTuple):
    """The result for a page of live events and a time; ``upto`` None: the page is empty.

    ``old_upto`` is the last event that arrived before the time, of those with a possible time;
    ``latest_ts`` when. ``is_reached``: an event arrived at the time or later.
    """

    upto: int | None
    old_upto: int | None
    latest_ts: int | None
    is_reached: bool


class CutPoint(NamedTuple):
    """Purge below ``topological``, and of live events those up to ``stream``."""

    topological: int
    stream: int


async def before_event(
    conn: Connection, room_id: str, room: PurgedRoomRow, event_id: str
) -> CutPoint:
    """Return the cut below an event.

    Raise `UnknownEvent`. Raise `PurgeRefused` for an event of another room, without a topological
    position, or above the forward extremities.
    """
    row = await conn.fetchrow(SQL_EVENT, event_id, row=CutEventRow)
    if row is None:
        raise UnknownEvent(event_id)
    if row.room_nid != room.room_nid:
        raise PurgeRefused(f"{event_id} is an event of another room", room_id=room_id)
    if row.topological_ordering is None or row.stream_ordering is None:
        raise PurgeRefused(
            f"{event_id} has no position in the timeline (an outlier): name another event",
            room_id=room_id,
        )
    if room.highest is None or row.topological_ordering > room.highest:
        raise PurgeRefused(
            f"{event_id} is above the forward extremities: name an event that was accepted",
            room_id=room_id,
        )
    return CutPoint(row.topological_ordering, row.stream_ordering - 1)


async def before_time(
    conn: Connection, room_id: str, room: PurgedRoomRow, before_ts: int, now_ts: int
) -> CutPoint | None:
    """Return the cut below the first live event that arrived at a time (ms) or later.

    Return the cut below the last event if none did, and None if there is no live event. The time of
    receipt counts, because a sender can claim any time. Log a warning if a time that is
    impossible for the events after it ends the purge. Raise `PurgeRefused` for a time in the
    future.
    """
    if before_ts > now_ts:
        raise PurgeRefused("the date lies in the future", room_id=room_id)
    last = await conn.fetchrow(SQL_LAST, room.room_nid, row=LiveRow)
    if last is None:
        return None
    first = await conn.fetch(SQL_AFTER, room.room_nid, NONE_YET, row=LiveRow)
    before = await conn.fetchval(SQL_BEFORE, first[0].stream_ordering, now_ts)
    floor_ts = max(before or FIRST_TS, FIRST_TS)
    old_upto, latest_ts = await _arrived_before(conn, room.room_nid, floor_ts, before_ts, now_ts)
    following = await conn.fetch(SQL_AFTER, room.room_nid, old_upto, row=LiveRow)
    if len(following) > 1:
        cut, after = following
        has_old_time = latest_ts - TOLERANCE_MS <= after.received_ts < before_ts
        if has_old_time and after.received_ts < cut.received_ts - TOLERANCE_MS:
            _note_clock(room_id, cut, after)
    return _bounded(following[0] if following else last, room)


async def _arrived_before(
    conn: Connection, room_nid: int, latest_ts: int, before_ts: int, now_ts: int
) -> tuple[int, int]:
    """Return the last event that arrived before a time, and the latest time up to there.

    The event is given by its stream position. An event with an impossible time is none.
    ``latest_ts``: the latest time before the room's first event.
    """
    at, old_upto = NONE_YET, NONE_YET
    for size in chain(PAGES, repeat(PAGES[-1])):
        page = await conn.fetchrow(
            SQL_ARRIVALS,
            room_nid,
            at,
            latest_ts,
            before_ts,
            now_ts,
            TOLERANCE_MS,
            size,
            row=ArrivalsRow,
        )
        if page is None or page.upto is None:
            break
        if page.old_upto is not None and page.latest_ts is not None:
            old_upto, latest_ts = page.old_upto, max(latest_ts, page.latest_ts)
        if page.is_reached:
            break
        at = page.upto
    return old_upto, latest_ts


def _note_clock(room_id: str, cut: LiveRow, after: LiveRow) -> None:
    logger.warning(
        "%s: the purge ends below %s, received at %s, though %s came after it at %s: a clock was "
        "wrong; to purge more, name an event (--before)",
        room_id,
        cut.event_id,
        _time(cut.received_ts),
        after.event_id,
        _time(after.received_ts),
        extra={"room_id": room_id, "event_id": cut.event_id},
    )


def _time(ts: int) -> str:
    """Return a time for people, whatever a clock said."""
    try:
        return datetime.fromtimestamp(ts / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # beyond the calendar
        return f"{ts} ms"


def _bounded(row: LiveRow, room: PurgedRoomRow) -> CutPoint:
    """Return the cut below an event, or below the highest forward extremity if that is lower."""
    highest = row.topological_ordering if room.highest is None else room.highest
    return CutPoint(min(row.topological_ordering, highest), row.stream_ordering - 1)
