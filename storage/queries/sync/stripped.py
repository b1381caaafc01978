"""What those who are invited, or who knock, are shown of a room: stripped state.

Client-server API, "Stripped state". It is what the membership event brought along from the inviting server; otherwise a few
events of the current state. The own membership event is always among them.
"""

from collections.abc import Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.queries.events import StoredEvent, stored_of

SQL_STRIPPED: Final[LiteralString] = """
WITH
room AS (
    SELECT *
    FROM unnest($1::int[], $2::bigint[]) AS i (room_nid, member_nid)
),
shown AS (  -- create, join rules, name, topic, canonical alias, avatar, encryption
    SELECT r.room_nid, false AS is_own, c.event_nid
    FROM room r
    JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid IN (1, 4, 9, 10, 11, 12, 13)
    UNION ALL
    SELECT room_nid, true, member_nid
    FROM room
)
SELECT n.room_nid, n.is_own, s.*
FROM shown n
JOIN stored_events s USING (event_nid)
"""

BROUGHT: Final = ("invite_room_state", "knock_room_state")


class StrippedRow(NamedTuple):
    """One event to show of a room; `is_own`: the membership event of whoever is asking."""

    room_nid: int
    is_own: bool
    event_nid: int
    event_id: str
    room_id: str
    room_version: str
    stream_ordering: int | None
    topological_ordering: int | None
    depth: int
    redacted_by: str | None
    rejected: str | None
    soft_failed: bool
    outlier: bool
    redacted_form: bool
    encoding: int
    json: bytes


EVENT: Final = StrippedRow._fields.index("event_nid")
"""Where the columns of the event begin."""


async def stripped_states(conn: Connection, rooms: Sequence[tuple[int, int]]) -> dict[int, list[dict[str, Any]]]:
    """The stripped state of each of these (room nid, nid of the own membership event)."""
    held: dict[int, list[StoredEvent]] = {room_nid: [] for room_nid, _ in rooms}
    own: dict[int, StoredEvent] = {}
    if not rooms:
        return {}
    for row in await conn.fetch(SQL_STRIPPED, *map(list, zip(*rooms, strict=True)), row=StrippedRow):
        event = stored_of(row[EVENT:])
        if row.is_own:
            own[row.room_nid] = event
        else:
            held[row.room_nid].append(event)
    return {room_nid: _stripped(held[room_nid], own.get(room_nid)) for room_nid in held}


def _stripped(state: Sequence[StoredEvent], own: StoredEvent | None) -> list[dict[str, Any]]:
    brought = [] if own is None else _brought(own)
    shown = brought or [strip(event.json) for event in state]
    if own is None:
        return shown
    key = (own.type, own.state_key)
    return [*(event for event in shown if (event["type"], event["state_key"]) != key), strip(own.json)]


def _brought(own: StoredEvent) -> list[dict[str, Any]]:
    """The well-formed events that the membership event has in its `unsigned`; another server says what it likes there."""
    unsigned = own.json.get("unsigned")
    if not isinstance(unsigned, dict):
        return []
    given = next((value for name in BROUGHT if isinstance(value := unsigned.get(name), list)), [])
    return [strip(event) for event in given if isinstance(event, dict) and _is_stripped(event)]


def _is_stripped(event: dict[str, Any]) -> bool:
    return all(isinstance(event.get(name), str) for name in ("type", "state_key", "sender")) and isinstance(event.get("content"), dict)


def strip(event: dict[str, Any]) -> dict[str, Any]:
    """The four keys of a stripped event."""
    return {name: event[name] for name in ("type", "state_key", "sender", "content")}
