"""Facts about a user in the database, beside the events that they may see."""

from collections.abc import AsyncIterator
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.ids import RoomId, UserId
from storage.maintenance.event_ranges import end_of_nids

SQL_USER_ROOMS: Final[LiteralString] = """
SELECT r.room_id
FROM rooms r
WHERE r.room_nid IN (
        SELECT c.room_nid
        FROM current_state c
        JOIN state_keys k USING (state_key_nid)
        WHERE k.type_nid = 2 AND k.state_key = $1::text
        UNION
        SELECT m.room_nid
        FROM memberships m
        JOIN principals p USING (principal_nid)
        WHERE p.name = $1::text
    )
ORDER BY r.room_id
"""

SQL_LAST_NID: Final[LiteralString] = """
SELECT COALESCE(max(event_nid), 0)
FROM events
"""

SQL_SENT_EVENTS: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.received_ts, e.json
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid > $1::bigint AND e.event_nid <= $2::bigint
    AND e.sender_nid = (SELECT principal_nid FROM principals WHERE name = $3::text)
ORDER BY e.event_nid
LIMIT $4::bigint
"""

SQL_USER_ACCOUNT_DATA: Final[LiteralString] = """
SELECT r.room_id, t.type, a.content
FROM account_data a
JOIN principals p USING (principal_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE p.name = $1::text
ORDER BY r.room_id NULLS FIRST, t.type
"""

SQL_USER_RECEIPTS: Final[LiteralString] = """
SELECT r.room_id, c.receipt_type, c.thread_id, c.event_id, c.data
FROM rooms r
JOIN receipts c USING (room_nid)
JOIN principals p USING (principal_nid)
WHERE r.room_id = ANY($2::text[]) AND p.name = $1::text
ORDER BY r.room_id, c.receipt_type, c.thread_id
"""

PAGE: Final = 500
RANGE: Final = 100_000
"""Events that a statement goes through."""


class SentEventRow(NamedTuple):
    """An event that the user sent, with the bytes that are stored."""

    event_nid: int
    event_id: str
    room_id: str
    room_version: str
    received_ts: int
    json: StoredBytes


class UserAccountDataRow(NamedTuple):
    """Account data of one type; no room: global."""

    room_id: str | None
    type: str
    content: bytes


class UserReceiptRow(NamedTuple):
    """A receipt of the user."""

    room_id: str
    receipt_type: str
    thread_id: str
    event_id: str
    data: bytes


async def rooms_of(conn: Connection, user_id: UserId) -> list[RoomId]:
    """Return the rooms in which the user has or had a membership."""
    found: list[str] = await conn.fetchvals(SQL_USER_ROOMS, user_id)
    return [RoomId(one) for one in found]


async def sent_by(conn: Connection, user_id: UserId) -> AsyncIterator[dict[str, Any]]:
    """Yield all that the user sent, as stored: also what was rejected, and outliers.

    All rows of events are read, because no index has the sender.
    """
    last: int = await conn.fetchval(SQL_LAST_NID)
    after = 0
    while (upto := await end_of_nids(conn, after, last, RANGE)) is not None:
        rows = await conn.fetch(SQL_SENT_EVENTS, after, upto, user_id, PAGE, row=SentEventRow)
        for row in rows:
            yield {
                "event_id": row.event_id,
                "room_id": row.room_id,
                "room_version": row.room_version,
                "received_ts": row.received_ts,
                "pdu": orjson.Fragment(decode(row.json, row.event_id, row.room_id)),
            }
        after = rows[-1].event_nid if len(rows) == PAGE else upto


async def account_of(
    conn: Connection, user_id: UserId, room_ids: list[RoomId]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the user's account data and receipts."""
    for data in await conn.fetch(SQL_USER_ACCOUNT_DATA, user_id, row=UserAccountDataRow):
        yield {
            "kind": "account_data",
            "room_id": data.room_id,
            "type": data.type,
            "content": orjson.Fragment(data.content),
        }
    for receipt in await conn.fetch(SQL_USER_RECEIPTS, user_id, room_ids, row=UserReceiptRow):
        yield {
            "kind": "receipt",
            "room_id": receipt.room_id,
            "type": receipt.receipt_type,
            "thread_id": receipt.thread_id or None,
            "event_id": receipt.event_id,
            "data": orjson.Fragment(receipt.data),
        }
