"""The cut of a purge: a topological position, and a stream position.

A live event is purged if it is below the topological position and arrived by the stream position.
Backfilled history is purged by the topological position alone, as it never came down a sync, but
only if it was stored when the job began. So new events are never purged while a job runs, and
`purged_streams` never passes the position of the named event.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import PurgeRefused, UnknownEvent

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
SELECT topological_ordering, stream_ordering, received_ts
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled
ORDER BY stream_ordering DESC
LIMIT 1
"""

SQL_FROM: Final[LiteralString] = """
SELECT topological_ordering, stream_ordering, received_ts
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering >= $2::bigint
ORDER BY stream_ordering
LIMIT 1
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
    """The positions of a live event, and when it arrived (ms)."""

    topological_ordering: int
    stream_ordering: int
    received_ts: int


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

    Return the cut below the last event if none did, and None if nothing is older. The time of
    receipt counts, because a sender can claim any time. Raise `PurgeRefused` for a time in the
    future.
    """
    if before_ts > now_ts:
        raise PurgeRefused("the date lies in the future", room_id=room_id)
    last = await conn.fetchrow(SQL_LAST, room.room_nid, row=LiveRow)
    if last is None:
        return None
    if last.received_ts < before_ts:
        return _bounded(last, room)
    low, high = 0, last.stream_ordering
    # Search where received_ts reaches the time: it grows with the stream positions of a room,
    # except where a clock was wrong.
    while low < high:
        middle = (low + high) // 2
        found = await conn.fetchrow(SQL_FROM, room.room_nid, middle, row=LiveRow)
        if found is not None and found.received_ts < before_ts:
            low = found.stream_ordering + 1
        else:
            high = middle
    first = await conn.fetchrow(SQL_FROM, room.room_nid, low, row=LiveRow)
    return _bounded(first or last, room)


def _bounded(row: LiveRow, room: PurgedRoomRow) -> CutPoint:
    """Return the cut below an event, or below the highest forward extremity if that is lower."""
    highest = row.topological_ordering if room.highest is None else room.highest
    return CutPoint(min(row.topological_ordering, highest), row.stream_ordering - 1)
