"""Check the version of a room: its row against its create event, and event ids.

A store of an earlier release read events by the version of another room of their batch. No other
check compares the two.
"""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.arguments import is_text
from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.errors import InvalidEvent, StorageCorrupt, UnknownRoom
from storage.event import ROOM_VERSIONS, Event, glance, parse
from storage.maintenance.censor import AS_RECEIVED
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import SQL_ROOM, VerifiedRoom, VerifiedRoomRow

SQL_CREATE_EVENTS: Final[LiteralString] = """
SELECT event_id, rejected, encoding, json
FROM events
WHERE room_nid = $1::int AND type_nid = 1 AND state_key_nid = 1
ORDER BY event_id
"""


class CreateRow(NamedTuple):
    """A create event of a room."""

    event_id: str
    rejected: str | None
    encoding: int
    json: StoredBytes


async def read_room(conn: Connection, room_id: str, server_name: str) -> VerifiedRoom:
    """Return a room with the version of its create event, if that can be the room's.

    Raise `UnknownRoom`.
    """
    row = await conn.fetchrow(SQL_ROOM, room_id, row=VerifiedRoomRow)
    if row is None:
        raise UnknownRoom(room_id)
    create = _create_event(row, await conn.fetch(SQL_CREATE_EVENTS, row.room_nid, row=CreateRow))
    raw = b"" if create is None else _bytes_of(create, row.room_id)
    said = said_version(raw) if raw else None
    if create is None or said is None or said == row.room_version:
        return VerifiedRoom(row, server_name, stored_version=row.room_version)
    right = row._replace(room_version=said) if _may_be(said, raw, row.room_id) else row
    return VerifiedRoom(
        right,
        server_name,
        stored_version=row.room_version,
        said_version=said,
        create_id=create.event_id,
    )


async def check_version(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the room's version ("room_version"), and its create event ("create_event")."""
    del conn
    if room.row.room_version != room.stored_version:
        yield room.finding(
            "room_version", [room.row.room_id], room.stored_version, room.row.room_version
        )
    elif room.said_version is not None:
        found = f"says room version {room.said_version}, by which it does not create this room"
        yield room.finding(
            "create_event",
            [room.create_id],
            found,
            f"a create event of version {room.stored_version}",
        )


def version_of_id(raw: bytes, event_id: str) -> str | None:
    """Return the room version by which these bytes have this id; None if no version gives it."""
    return next(
        (
            version
            for version in ROOM_VERSIONS
            if (event := _read(raw, version)) is not None and event.event_id == event_id
        ),
        None,
    )


def said_version(raw: bytes) -> str | None:
    """Return the room version in a create event's content; None where it is not a string."""
    content = (glance(raw) or {}).get("content")
    version = content.get("room_version", "1") if isinstance(content, dict) else "1"
    return version if is_text(version) else None


def _bytes_of(create: CreateRow, room_id: str) -> bytes:
    """Return the bytes of a create event, none if they are damaged: another check reports it."""
    try:
        return decode(create.json, create.event_id, room_id)
    except StorageCorrupt:
        return b""


def _create_event(row: VerifiedRoomRow, creates: list[CreateRow]) -> CreateRow | None:
    """Return the create event whose bytes give the version.

    It is the one that the room id names, or the only one. Censored bytes do not give it.
    """
    named = [create for create in creates if create.event_id == "$" + row.room_id[1:]]
    found = named or [create for create in creates if create.rejected is None] or creates
    return found[0] if len(found) == 1 and found[0].encoding == AS_RECEIVED else None


def _may_be(version: str, raw: bytes, room_id: str) -> bool:
    event = _read(raw, version) if version in ROOM_VERSIONS else None
    return event is not None and event.room_id == room_id


def _read(raw: bytes, version: str) -> Event | None:
    try:
        return parse(raw, version)
    except InvalidEvent:
        return None
