"""Put events that are wrongly left out of the index of times into it."""

from typing import Final, LiteralString

from storage.database.array_text import transposed
from storage.database.connection import Connection
from storage.maintenance.verify.time_order import SQL_TIME_ORDER, TimeOrderRow

SQL_SET_OUT_OF_ORDER: Final[LiteralString] = """
UPDATE events e
SET in_order_ts = i.in_order_ts
FROM unnest($1::bigint[], $2::bigint[]) AS i (event_nid, in_order_ts)
WHERE e.event_nid = i.event_nid
"""

SQL_SET_REACHED: Final[LiteralString] = """
UPDATE rooms r
SET in_order_ts = reached.in_order_ts
FROM (
    SELECT max(COALESCE(in_order_ts, origin_server_ts)) AS in_order_ts
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled
) AS reached
WHERE r.room_nid = $1::int AND r.in_order_ts < reached.in_order_ts
"""


async def repair_time_order(conn: Connection, room_nid: int) -> None:
    """Set the time that was reached before it for each event where it is not possible.

    The time reached after it stays what it was, so no other event becomes wrong.
    """
    wrong = await conn.fetch(SQL_TIME_ORDER, room_nid, row=TimeOrderRow)
    await conn.execute(
        SQL_SET_OUT_OF_ORDER, *transposed(((row.event_nid, row.before) for row in wrong), 2)
    )
    await conn.execute(SQL_SET_REACHED, room_nid)
