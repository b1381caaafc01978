"""Reading the facts of the built-in streams: one statement each.

The statements take ($1 after, $2 up to, $3 instance name or NULL, $4 limit) and return (stream_id,
instance_name, …row).
"""

import json
import logging
from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode_recent
from storage.database.connection import Connection
from storage.database.placeholders import fill
from storage.errors import StorageCorrupt
from storage.streams.feed import StreamRow

logger: logging.Logger = logging.getLogger(__name__)

PRIVATE: Final = "m.read.private"
"""The type of receipts that only their user gets."""

TEMPLATE_TIMELINE_ROWS: Final[LiteralString] = """
SELECT e.stream_ordering AS stream_id, w.instance_name, e.event_id, r.room_id, t.type, k.state_key,
    CASE WHEN e.type_nid = {TYPE_REDACTION} THEN e.json END AS json
FROM (  -- limited before it is joined, or each page would join all that is left
    SELECT stream_ordering, writer_nid, event_id, room_nid, type_nid, state_key_nid, json
    FROM events
    WHERE stream_ordering > $1::bigint AND stream_ordering <= $2::bigint AND {origin}
        AND ($3::text IS NULL
            OR writer_nid = (SELECT writer_nid FROM writers WHERE instance_name = $3::text))
    ORDER BY stream_ordering
    LIMIT $4::bigint
) e
JOIN writers w USING (writer_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
{outliers}
ORDER BY stream_id
LIMIT $4::bigint
"""

SQL_EVENTS_ROWS: Final[LiteralString] = fill(
    TEMPLATE_TIMELINE_ROWS,
    origin="NOT backfilled",
    outliers="""
UNION ALL
SELECT o.stream_id, w.instance_name, o.event_id, r.room_id, t.type, k.state_key, NULL
FROM (
    SELECT m.stream_id, m.writer_nid, e.event_id, e.room_nid, e.type_nid, e.state_key_nid
    FROM outlier_memberships m
    JOIN events e USING (event_nid)
    WHERE m.stream_id > $1::bigint AND m.stream_id <= $2::bigint
        AND ($3::text IS NULL
            OR m.writer_nid = (SELECT writer_nid FROM writers WHERE instance_name = $3::text))
    ORDER BY m.stream_id
    LIMIT $4::bigint
) o
JOIN writers w USING (writer_nid)
JOIN rooms r USING (room_nid)
JOIN event_types t USING (type_nid)
JOIN state_keys k ON k.state_key_nid = o.state_key_nid
""",
)

SQL_BACKFILL_ROWS: Final[LiteralString] = fill(
    TEMPLATE_TIMELINE_ROWS, origin="backfilled", outliers=""
)

SQL_ACCOUNT_DATA_ROWS: Final[LiteralString] = """
SELECT a.stream_id, w.instance_name, p.name AS user_id, r.room_id, t.type
FROM account_data a
JOIN writers w USING (writer_nid)
JOIN principals p USING (principal_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE a.stream_id > $1::bigint AND a.stream_id <= $2::bigint
    AND ($3::text IS NULL OR w.instance_name = $3::text)
ORDER BY a.stream_id
LIMIT $4::bigint
"""

SQL_TO_DEVICE_ROWS: Final[LiteralString] = """
SELECT d.stream_id, w.instance_name, p.name AS user_id, d.device_id
FROM to_device d
JOIN writers w USING (writer_nid)
JOIN principals p USING (principal_nid)
WHERE d.stream_id > $1::bigint AND d.stream_id <= $2::bigint
    AND ($3::text IS NULL OR w.instance_name = $3::text)
ORDER BY d.stream_id
LIMIT $4::bigint
"""

SQL_RECEIPTS_ROWS: Final[LiteralString] = """
SELECT c.stream_id, w.instance_name, r.room_id, c.receipt_type, p.name AS user_id, c.event_id,
    NULLIF(c.thread_id, '') AS thread_id, c.data
FROM receipts c
JOIN writers w USING (writer_nid)
JOIN principals p USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE c.stream_id > $1::bigint AND c.stream_id <= $2::bigint
    AND ($3::text IS NULL OR w.instance_name = $3::text)
ORDER BY c.stream_id
LIMIT $4::bigint
"""

SQL_CACHES_ROWS: Final[LiteralString] = """
SELECT i.stream_id, w.instance_name, i.cache_name, i.keys, i.invalidation_ts
FROM cache_invalidations i
JOIN writers w USING (writer_nid)
WHERE i.stream_id > $1::bigint AND i.stream_id <= $2::bigint
    AND ($3::text IS NULL OR w.instance_name = $3::text)
ORDER BY i.stream_id
LIMIT $4::bigint
"""


class EventStreamRow(NamedTuple):
    """A row of the streams "events" and "backfill"."""

    stream_id: int
    instance_name: str
    event_id: str
    room_id: str
    type: str
    state_key: str | None
    json: StoredBytes | None


class AccountDataStreamRow(NamedTuple):
    """A row of the stream "account_data"."""

    stream_id: int
    instance_name: str
    user_id: str
    room_id: str | None
    type: str


class ToDeviceStreamRow(NamedTuple):
    """A row of the stream "to_device"."""

    stream_id: int
    instance_name: str
    user_id: str
    device_id: str


class ReceiptStreamRow(NamedTuple):
    """A row of the stream "receipts"."""

    stream_id: int
    instance_name: str
    room_id: str
    receipt_type: str
    user_id: str
    event_id: str
    thread_id: str | None
    data: bytes


class CacheStreamRow(NamedTuple):
    """A row of the stream "caches"."""

    stream_id: int
    instance_name: str
    cache_name: str
    keys: list[str] | None
    invalidation_ts: int


async def events(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(SQL_EVENTS_ROWS, after, upto, writer, limit, row=EventStreamRow)
    return [_event_stream_row(row) for row in rows]


async def backfill(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(SQL_BACKFILL_ROWS, after, upto, writer, limit, row=EventStreamRow)
    return [_event_stream_row(row) for row in rows]


def _event_stream_row(row: EventStreamRow) -> StreamRow:
    return StreamRow(
        row.stream_id,
        row.instance_name,
        [row.event_id, row.room_id, row.type, row.state_key, _redacts(row)],
    )


def _redacts(row: EventStreamRow) -> str | None:
    """Return the target of a redaction, from where its room version stores it.

    Damaged bytes are logged and have no target: an error would keep every reader at this position.
    Caches learn of the target from the stream "caches", too.
    """
    if row.json is None:
        return None
    try:
        event = json.loads(decode_recent(row.json, row.event_id, row.room_id))
        named, content = event.get("redacts"), event.get("content")
    except (StorageCorrupt, ValueError, RecursionError, AttributeError) as error:
        logger.error("the target of the redaction %s is not known: %s", row.event_id, error)  # noqa: TRY400  # a damaged row needs no traceback
        return None
    named = named or (content.get("redacts") if isinstance(content, dict) else None)
    return named if isinstance(named, str) else None


async def account_data(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(
        SQL_ACCOUNT_DATA_ROWS, after, upto, writer, limit, row=AccountDataStreamRow
    )
    return [StreamRow(row.stream_id, row.instance_name, list(row[2:])) for row in rows]


async def to_device(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(SQL_TO_DEVICE_ROWS, after, upto, writer, limit, row=ToDeviceStreamRow)
    return [StreamRow(row.stream_id, row.instance_name, list(row[2:])) for row in rows]


async def receipts(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(SQL_RECEIPTS_ROWS, after, upto, writer, limit, row=ReceiptStreamRow)
    return [
        StreamRow(row.stream_id, row.instance_name, [*row[2:-1], json.loads(row.data)])
        for row in rows
    ]


async def caches(
    conn: Connection, after: int, upto: int, writer: str | None, limit: int
) -> list[StreamRow]:
    rows = await conn.fetch(SQL_CACHES_ROWS, after, upto, writer, limit, row=CacheStreamRow)
    return [StreamRow(row.stream_id, row.instance_name, list(row[2:])) for row in rows]
