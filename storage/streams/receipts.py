"""Receipts: the read position of each user in a room; the stream "receipts".

Source: client-server API, receipts.
"""

from collections.abc import Mapping
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.database.connection import Connection
from storage.database.rooms import require_room
from storage.errors import UnknownRoom
from storage.ids import EventId, RoomId, UserId
from storage.streams.feed import Fact
from storage.streams.stream_writer import StreamWriter, WrittenFactRow, WrittenFacts

SQL_SET: Final[LiteralString] = """
WITH
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = $3::text
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $3::text
    WHERE NOT EXISTS (SELECT FROM known_principal)
        AND EXISTS (SELECT FROM rooms WHERE room_id = $1::text)
    RETURNING principal_nid
),
fact AS (
    INSERT INTO receipts (stream_id, room_nid, principal_nid, writer_nid, receipt_type, thread_id,
        event_id, data)
    SELECT nextval('receipts_stream'), r.room_nid, p.principal_nid, $7::smallint, $2::text,
        $4::text, $5::text, $6::bytea
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    CROSS JOIN rooms r
    WHERE r.room_id = $1::text
    ON CONFLICT (room_nid, principal_nid, receipt_type, thread_id) DO UPDATE
        SET stream_id = EXCLUDED.stream_id, writer_nid = EXCLUDED.writer_nid,
            event_id = EXCLUDED.event_id, data = EXCLUDED.data
    RETURNING stream_id
),
position AS (
    UPDATE stream_positions
    SET stream_id = GREATEST(stream_positions.stream_id, fact.stream_id)
    FROM fact
    WHERE stream_name = 'receipts' AND instance_name = $8::text AND epoch = $9::int
    RETURNING stream_positions.stream_id
)
SELECT stream_id, CASE
        WHEN EXISTS (SELECT FROM position) THEN (SELECT count(*)::int FROM stream_positions
            WHERE stream_name = 'receipts')
        ELSE refuse_old_writer($8::text)::int
    END AS writers
FROM fact
"""

SQL_OF_ROOM: Final[LiteralString] = """
SELECT c.stream_id, c.receipt_type, p.name AS user_id, NULLIF(c.thread_id, '') AS thread_id,
    c.event_id, c.data
FROM rooms r
JOIN receipts c USING (room_nid)
JOIN principals p USING (principal_nid)
WHERE r.room_id = $1::text AND c.stream_id > $2::bigint AND c.stream_id <= $3::bigint
ORDER BY c.stream_id
"""

EVERYTHING: Final = (1 << 63) - 1


class ReceiptRow(NamedTuple):
    """One receipt; ``data`` is the JSON as received."""

    stream_id: int
    receipt_type: str
    user_id: str
    thread_id: str | None
    event_id: str
    data: bytes


class Receipts:
    """The store of receipts (``store.receipts``)."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer

    async def set(
        self,
        room_id: RoomId,
        receipt_type: str,
        user_id: UserId,
        event_id: EventId,
        data: Mapping[str, Any],
        *,
        thread_id: str | None = None,
    ) -> int:
        """Replace a user's receipt of a type (and thread) in a room.

        Return the position of the fact.

        Users of other servers have receipts, too.

        Raise `UnknownRoom`, `InvalidIdentifier` or `InputError`.
        """
        room, user, event = args.room(room_id), args.user(user_id), args.event(event_id)
        kind, thread = args.text(receipt_type), None if thread_id is None else args.text(thread_id)
        packed = args.content(data, "data")

        async def write(conn: Connection) -> WrittenFacts:
            writer = self._writer
            row = await conn.fetchrow(
                SQL_SET,
                room,
                kind,
                user,
                thread or "",
                event,
                packed,
                *writer.author,
                row=WrittenFactRow,
            )
            if row is None:
                raise UnknownRoom(room)
            return WrittenFacts(
                [
                    Fact(
                        row.stream_id,
                        writer.instance_name,
                        [room, kind, user, event, thread, orjson.loads(packed)],
                    )
                ],
                row.writers,
            )

        return await self._writer.write(write)

    async def of_room(
        self, room_id: RoomId, *, after: int = 0, upto: int = EVERYTHING
    ) -> list[ReceiptRow]:
        """Return the receipts of a room with ``after < position <= upto``, in stream order.

        Raise `UnknownRoom`, `InvalidIdentifier` or `InputError`.
        """
        room, between = (
            args.room(room_id),
            (args.position(after, "after"), args.position(upto, "upto")),
        )
        async with self._writer.database.connection() as conn:
            found = await conn.fetch(SQL_OF_ROOM, room, *between, row=ReceiptRow)
            if not found:
                await require_room(conn, room)
            return found
