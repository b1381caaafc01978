"""Check which events are left out of the index of times (storage/persist/plan/time_order.py).

Each live event says which time the events in time order have reached: `in_order_ts`, or its own
time if it is one of them. In the order of the stream, that never falls, and an event in time order
raises it. Deletions may leave larger steps. Backfilled events are not in the order of the stream.
"""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom

SQL_TIME_ORDER: Final[LiteralString] = """
SELECT event_nid, event_id, origin_server_ts, in_order_ts, before
FROM (
    SELECT event_nid, event_id, origin_server_ts, in_order_ts, backfilled,
        COALESCE(max(COALESCE(in_order_ts, origin_server_ts)) FILTER (WHERE NOT backfilled) OVER (
            ORDER BY stream_ordering
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ), -9223372036854775808) AS before
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
) AS e
WHERE CASE WHEN in_order_ts IS NULL THEN backfilled OR origin_server_ts <= before
    ELSE in_order_ts < before AND NOT backfilled END
"""

SQL_REACHED: Final[LiteralString] = """
SELECT max(origin_server_ts)
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND in_order_ts IS NULL
"""


class TimeOrderRow(NamedTuple):
    """An event whose `in_order_ts` is not possible; ``before``: the time reached before it."""

    event_nid: int
    event_id: str
    origin_server_ts: int
    in_order_ts: int | None
    before: int


async def check_time_order(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the events outside of the index of times are in time order ("time_order").

    Check also the time that they have reached, in the room's row ("rooms").
    """
    for row in await conn.fetch(SQL_TIME_ORDER, room.nid, row=TimeOrderRow):
        found = "in time order" if row.in_order_ts is None else f"in_order_ts {row.in_order_ts}"
        yield room.finding(
            "time_order",
            [row.event_id],
            f"{found}, at {row.origin_server_ts}",
            f"after {row.before}",
        )
    reached = await conn.fetchval(SQL_REACHED, room.nid)
    if reached is not None and room.row.in_order_ts < reached:
        found = f"in_order_ts {room.row.in_order_ts}"
        yield room.finding("rooms", [room.row.room_id], found, f"at least {reached}")
