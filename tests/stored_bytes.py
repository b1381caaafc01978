"""The bytes of stored events, for tests that read or change them behind the store's back."""

from typing import Any, cast

import asyncpg

from storage.codec import StoredBytes, decode, plain
from storage.database.connection import Connection, Database

SQL_BYTES = "SELECT e.event_id, r.room_id, e.json FROM events e JOIN rooms r USING (room_nid)"


async def bytes_of(conn: asyncpg.Connection) -> dict[str, bytes]:
    """The bytes of every event, by id, in ascending order of nids."""
    rows = await conn.fetch(SQL_BYTES + " ORDER BY e.event_nid")
    return {event_id: decode(stored, event_id, room) for event_id, room, stored in rows}


async def forms_of(conn: asyncpg.Connection) -> dict[str, Any]:
    """The stored form of every event, by id."""
    return dict(await conn.fetch("SELECT event_id, json FROM events"))


def form(stored: object) -> int:
    """The first byte of a stored form: 0xC1, 0xC2, or that of the bytes themselves."""
    return cast("bytes", stored)[0]


def stored(raw: bytes) -> StoredBytes:
    """The form in which bytes stand for themselves, also bytes that no event has."""
    return plain(raw) if raw[:1] == b"{" else StoredBytes(raw)


async def store_plainly(database: Database) -> None:
    """Store all events as the bytes themselves, as a writer without a dictionary would."""
    async with database.transaction() as conn:
        await decode_all(conn)


async def decode_all(conn: Connection) -> None:
    """The same in an open transaction. Events of the archive stay there."""
    encoded = SQL_BYTES + " WHERE get_byte(e.json, 0) > 127"
    rows = [
        (event_id, decode(stored, event_id, room))
        for event_id, room, stored in await conn._driver.fetch(encoded)
    ]
    await conn._driver.executemany("UPDATE events SET json = $2 WHERE event_id = $1", rows)


def over(driver: asyncpg.Connection) -> Connection:
    """A connection of the package over one of the driver."""
    return Connection(driver)
