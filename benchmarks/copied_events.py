"""Copies of events by SQL, under other ids: stored bytes belong to the id of their event.

So events are stored as the bytes themselves before they are copied, and all are encoded after it.
"""

from typing import Any, Final, LiteralString

from storage.codec import decode
from storage.database.connection import Connection
from storage.ids import EventId
from storage.maintenance.reencode import encode_batch
from storage.queries.events import SQL_EVENTS, EventWithVerdictRow

BATCH: Final = 5_000

SQL_SET: Final[LiteralString] = "UPDATE events SET json = $2::bytea WHERE event_id = $1::text"


async def store_plainly(conn: Connection, *event_ids: EventId) -> None:
    """Store these events as the bytes themselves."""
    for row in await conn.fetch(SQL_EVENTS, list(event_ids), row=EventWithVerdictRow):
        raw: Any = decode(row.json, row.event_id, row.room_id)
        await conn.execute(SQL_SET, row.event_id, raw)


async def encode_all(conn: Connection) -> None:
    """Encode all events that are not."""
    place: int | None = 0
    while place is not None:
        place = (await encode_batch(conn, place, BATCH)).place
