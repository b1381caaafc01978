"""Where a purge cuts: below a place in the topological order, and not after a position of the stream.

An event goes if it stands below the cut in the topological order and had arrived by its position; history that was filled in goes by the order
alone, as it never came down a sync, but only what was there when the job began. So what is new while a purge runs is never taken, and
`purged_streams` never passes the position of the event that was named.
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
    """A room; ``highest``: the largest topological ordering of its forward extremities, None if it has none."""

    room_nid: int
    room_version: str
    highest: int | None


class CutEventRow(NamedTuple):
    """Where an event stands; None for an outlier."""

    room_nid: int
    topological_ordering: int | None
    stream_ordering: int | None


class LiveRow(NamedTuple):
    """Where a live event stands, and when it arrived (ms)."""

    topological_ordering: int
    stream_ordering: int
    received_ts: int


class CutPoint(NamedTuple):
    """What goes: below ``topological``, and of live events what is not above ``stream``."""

    topological: int
    stream: int


async def before_event(
    conn: Connection, room_id: str, room: PurgedRoomRow, event_id: str
) -> CutPoint:
    """The cut below an event.

    `UnknownEvent`; `PurgeRefused` for one of another room, without a place, or above the forward
    extremities.
    """
    row = await conn.fetchrow(SQL_EVENT, event_id, row=CutEventRow)
    if row is None:
        raise UnknownEvent(event_id)
    if row.room_nid != room.room_nid:
        raise PurgeRefused(f"{event_id} is an event of another room", room_id=room_id)
    if row.topological_ordering is None or row.stream_ordering is None:
        raise PurgeRefused(
            f"{event_id} has no place in the timeline (an outlier): name another event",
            room_id=room_id,
        )
    if room.highest is None or row.topological_ordering > room.highest:
        raise PurgeRefused(
            f"{event_id} stands above the forward extremities: name an event that was accepted",
            room_id=room_id,
        )
    return CutPoint(row.topological_ordering, row.stream_ordering - 1)


async def before_time(
    conn: Connection, room_id: str, room: PurgedRoomRow, before_ts: int, now_ts: int
) -> CutPoint | None:
    """The cut below the first live event that arrived at a time (ms) or later; below the last one if none did. None: nothing is older.

    By when this server received them: what a sender claims of the time could ask for anything. `PurgeRefused` for a time to come.
    """
    if before_ts > now_ts:
        raise PurgeRefused("the date lies in the future", room_id=room_id)
    last = await conn.fetchrow(SQL_LAST, room.room_nid, row=LiveRow)
    if last is None:
        return None
    if last.received_ts < before_ts:
        return _bounded(last, room)
    low, high = 0, last.stream_ordering
    while (
        low < high
    ):  # where received_ts reaches the time: it grows with the positions of a room, but for what clocks are off
        middle = (low + high) // 2
        found = await conn.fetchrow(SQL_FROM, room.room_nid, middle, row=LiveRow)
        if found is not None and found.received_ts < before_ts:
            low = found.stream_ordering + 1
        else:
            high = middle
    first = await conn.fetchrow(SQL_FROM, room.room_nid, low, row=LiveRow)
    return _bounded(first or last, room)


def _bounded(row: LiveRow, room: PurgedRoomRow) -> CutPoint:
    """The cut below an event, or below the highest forward extremity if it stands above all of them."""
    highest = row.topological_ordering if room.highest is None else room.highest
    return CutPoint(min(row.topological_ordering, highest), row.stream_ordering - 1)
