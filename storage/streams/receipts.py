"""Receipts: the read position of each user in a room; the stream "receipts".

A receipt is for an event of the room's timeline, and never goes backwards. The order is that of
/sync: live events by stream ordering. A backfilled event comes after the live event below it in the
topological order. Private receipts are returned to their user only, and wake nobody else. But the
facts of the stream have them: the processes of the homeserver need them for that user.

Source: client-server API, receipts.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage import arguments as args
from storage.database.connection import Connection, require_room
from storage.database.placeholders import fill
from storage.errors import InputError, StorageError, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId, UserId
from storage.streams.feed import StreamRow
from storage.streams.stream_writer import StreamWriter, WrittenIdRow, WrittenRows

TEMPLATE_READ_UPTO: Final[LiteralString] = """
CASE WHEN {event}.backfilled THEN COALESCE((
    SELECT o.stream_ordering
    FROM (
        SELECT l.topological_ordering, l.stream_ordering, l.backfilled
        FROM events l
        WHERE l.room_nid = {event}.room_nid AND NOT l.outlier
            AND (l.topological_ordering, l.stream_ordering)
                < ({event}.topological_ordering, {event}.stream_ordering)
        ORDER BY l.topological_ordering DESC, l.stream_ordering DESC
        LIMIT 10000
    ) AS o
    WHERE NOT o.backfilled
    ORDER BY o.topological_ordering DESC, o.stream_ordering DESC
    LIMIT 1
), 0) ELSE {event}.stream_ordering END
"""
"""The stream ordering up to which live events are read, by a receipt for this event."""

TEMPLATE_SET: Final[LiteralString] = """
WITH
target AS MATERIALIZED (
    SELECT e.room_nid, e.backfilled, e.topological_ordering, e.stream_ordering,
        {upto_target} AS read_upto
    -- by its id: with a condition on its room, Postgres could read all events of the room
    FROM (SELECT * FROM events WHERE event_id = $5::text OFFSET 0) AS e
    CROSS JOIN LATERAL (SELECT room_id FROM rooms WHERE room_nid = e.room_nid OFFSET 0) AS r
    WHERE r.room_id = $1::text AND NOT e.outlier
),
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = $3::text
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $3::text
    WHERE NOT EXISTS (SELECT FROM known_principal) AND EXISTS (SELECT FROM target)
    RETURNING principal_nid
),
fact AS (
    INSERT INTO receipts AS c (stream_id, room_nid, principal_nid, writer_nid, receipt_type,
        thread_id, event_id, data)
    SELECT nextval('receipts_stream'), t.room_nid, p.principal_nid, $7::smallint, $2::text,
        $4::text, $5::text, $6::bytea
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    CROSS JOIN target t
    ON CONFLICT (room_nid, principal_nid, receipt_type, thread_id) DO UPDATE
        SET stream_id = EXCLUDED.stream_id, writer_nid = EXCLUDED.writer_nid,
            event_id = EXCLUDED.event_id, data = EXCLUDED.data
        WHERE NOT EXISTS (  -- the present one is further
            SELECT
            FROM (SELECT * FROM events WHERE event_id = c.event_id OFFSET 0) AS e
            CROSS JOIN target t
            WHERE e.room_nid = t.room_nid AND NOT e.outlier
                AND ({upto_present}, e.backfilled, e.topological_ordering, e.stream_ordering)
                    > (t.read_upto, t.backfilled, t.topological_ordering, t.stream_ordering)
        )
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

SQL_SET: Final[LiteralString] = fill(
    TEMPLATE_SET,
    upto_target=fill(TEMPLATE_READ_UPTO, event="e"),
    upto_present=fill(TEMPLATE_READ_UPTO, event="e"),
)

SQL_REFUSAL: Final[LiteralString] = """
SELECT r.room_id, e.outlier, home.room_id AS event_room_id, (
    SELECT c.stream_id
    FROM receipts c
    JOIN principals p USING (principal_nid)
    WHERE c.room_nid = r.room_nid AND p.name = $3::text AND c.receipt_type = $2::text
        AND c.thread_id = $4::text
) AS stream_id
FROM (VALUES (1)) AS one
LEFT JOIN rooms r ON r.room_id = $1::text
LEFT JOIN events e ON e.event_id = $5::text
LEFT JOIN rooms home ON home.room_nid = e.room_nid
"""

SQL_OF_ROOM: Final[LiteralString] = """
SELECT c.stream_id, c.receipt_type, p.name AS user_id, NULLIF(c.thread_id, '') AS thread_id,
    c.event_id, c.data
FROM rooms r
JOIN receipts c USING (room_nid)
JOIN principals p USING (principal_nid)
WHERE r.room_id = $1::text AND c.stream_id > $2::bigint AND c.stream_id <= $3::bigint
    AND (c.receipt_type <> 'm.read.private' OR p.name = $4::text)
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


def receipt_events(rows: Iterable[ReceiptRow]) -> list[dict[str, Any]]:
    """Return the events m.receipt of these receipts; the last ones of each thread are in the first.

    Such an event has a place for one receipt of each type of a user for an event. The one without a
    thread stands for all threads (MSC4102). Otherwise each further thread is in a further event.
    """
    contents: list[dict[str, dict[str, dict[str, Any]]]] = []
    whole = set[tuple[str, str, str]]()
    ordered = sorted(rows, key=lambda row: (row.thread_id is None, row.stream_id), reverse=True)
    for row in ordered:
        key = row.event_id, row.receipt_type, row.user_id
        if key in whole:
            continue
        data = orjson.loads(row.data)
        if row.thread_id is None:
            whole.add(key)
        else:
            data["thread_id"] = row.thread_id
        for content in contents:
            users = content.setdefault(row.event_id, {}).setdefault(row.receipt_type, {})
            if row.user_id not in users:
                users[row.user_id] = data
                break
        else:
            contents.append({row.event_id: {row.receipt_type: {row.user_id: data}}})
    return [{"type": "m.receipt", "content": content} for content in contents]


class ReceiptRefusalRow(NamedTuple):
    """The reason why a receipt was not stored: what is known of its room, event and predecessor."""

    room_id: str | None
    outlier: bool | None
    event_room_id: str | None
    stream_id: int | None


class _Superseded(StorageError):  # noqa: N818  # it never leaves this module
    """End a write that has nothing to write. A `StorageError` means that nothing was done."""

    def __init__(self, stream_id: int) -> None:
        super().__init__("the present receipt is further")
        self.stream_id = stream_id


class Receipts:
    """The store of receipts (``store.receipts``)."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer

    async def set(
        self,
        room_id: str,
        receipt_type: str,
        user_id: str,
        event_id: str,
        data: Mapping[str, Any],
        *,
        thread_id: str | None = None,
    ) -> int:
        """Replace a user's receipt of a type (and thread) in a room.

        Return the position of the fact. If the present receipt is for a later event, leave it, and
        return its position. Users of other servers have receipts, too.

        Raise `UnknownRoom`, `UnknownEvent` (also where the event is stored without a place in the
        timeline), `InvalidIdentifier`, or `InputError`, also for an event of another room.
        """
        room, user, event = args.room(room_id), args.user(user_id), args.event(event_id)
        kind, thread = args.text(receipt_type), None if thread_id is None else args.text(thread_id)
        key = room, kind, user, thread or "", event
        packed = args.content(data, "data")

        async def write(conn: Connection) -> WrittenRows:
            writer = self._writer
            row = await conn.fetchrow(SQL_SET, *key, packed, *writer.author, row=WrittenIdRow)
            if row is None:
                raise _Superseded(await _refused(conn, key))
            content = [room, kind, user, event, thread, orjson.loads(packed)]
            return WrittenRows(
                [StreamRow(row.stream_id, writer.instance_name, content)], row.writers
            )

        try:
            with self._writer.reads.using_primary():
                return await self._writer.write(write)
        except _Superseded as present:
            return present.stream_id

    async def of_room(
        self,
        room_id: str,
        *,
        user_id: str | None = None,
        after: int = 0,
        upto: int = EVERYTHING,
    ) -> list[ReceiptRow]:
        """Return the receipts of a room with ``after < position <= upto``, in stream order.

        Of private receipts (m.read.private) return those of ``user_id`` only.

        Raise `UnknownRoom`, `InvalidIdentifier` or `InputError`.
        """
        room, reader = args.room(room_id), None if user_id is None else args.user(user_id)
        between = args.position(after, "after"), args.position(upto, "upto")

        async def read(conn: Connection) -> list[ReceiptRow]:
            rows = await conn.fetch(SQL_OF_ROOM, room, *between, reader, row=ReceiptRow)
            if not rows:
                await require_room(conn, room)
            return rows

        return await self._writer.reads.of_primary(read)


async def _refused(conn: Connection, key: tuple[RoomId, str, UserId, str, EventId]) -> int:
    """Return the position of the present receipt, which is further, or raise the error."""
    room_id, *_, event_id = key
    row = await conn.fetchrow(SQL_REFUSAL, *key, row=ReceiptRefusalRow)
    if row is None or row.room_id is None:
        raise UnknownRoom(room_id)
    if row.event_room_id is None or (row.outlier and row.event_room_id == room_id):
        raise UnknownEvent(event_id)
    if row.event_room_id != room_id:
        raise InputError(f"{event_id} is an event of {row.event_room_id}, not of {room_id}")
    return row.stream_id or 0
