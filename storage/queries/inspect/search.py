"""Search by what an operator has at hand: an event id, the beginning of another id, or an alias.

Ids are looked up in their indexes. That of event ids is a hash index: it knows whole ids only. An
alias is looked for in the current canonical aliases, of at most `ALIASES_MAX` rooms: no table has
the alias of a room by itself.
"""

from itertools import islice
from typing import Any, Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.ids import EventId, RoomId
from storage.queries.events import event_json

SQL_EVENT: Final[LiteralString] = """
SELECT e.event_id
FROM events e
WHERE e.event_id = $1::text
LIMIT 1
"""

SQL_ROOMS: Final[LiteralString] = """
SELECT r.room_id
FROM rooms r
WHERE r.room_id >= $1::text AND r.room_id < $1::text || chr(1114111)
ORDER BY r.room_id
LIMIT $2::bigint
"""

SQL_USERS: Final[LiteralString] = """
SELECT found.user_id
FROM (
    (
        SELECT p.name AS user_id
        FROM principals p
        WHERE p.name >= $1::text AND p.name < $1::text || chr(1114111)
        ORDER BY p.name
        LIMIT $2::bigint
    )
    UNION
    (
        SELECT k.state_key
        FROM state_keys k
        WHERE k.type_nid = 2 AND k.state_key >= $1::text
            AND k.state_key < $1::text || chr(1114111)
        ORDER BY k.state_key
        LIMIT $2::bigint
    )
) AS found
WHERE starts_with(found.user_id, '@')
ORDER BY found.user_id
LIMIT $2::bigint
"""

SQL_ALIASES: Final[LiteralString] = """
SELECT r.room_id, r.room_version, e.event_id,
    e.redacted_by IS NOT NULL OR e.redacted_form AS hidden, e.json
FROM (
    SELECT c.room_nid, c.event_nid
    FROM current_state c
    WHERE c.state_key_nid = 11
    ORDER BY c.room_nid
    LIMIT $1::bigint
) AS c
CROSS JOIN LATERAL (  -- one by one: few events are aliases
    SELECT e.event_id, e.redacted_by, e.redacted_form, e.json
    FROM events e
    WHERE e.event_nid = c.event_nid
    OFFSET 0
) AS e
JOIN rooms r ON r.room_nid = c.room_nid
"""

FOUND_MAX: Final = 20
ALIASES_MAX: Final = 20_000


class AliasRow(NamedTuple):
    """The canonical alias event of a room."""

    room_id: RoomId
    room_version: str
    event_id: EventId
    hidden: bool
    json: StoredBytes


async def events_called(conn: Connection, event_id: str) -> list[str]:
    """Return the id if an event of this id is stored, else nothing."""
    return await conn.fetchvals(SQL_EVENT, event_id)


async def rooms_like(conn: Connection, beginning: str, limit: int = FOUND_MAX) -> list[str]:
    """Return ids of rooms with a beginning, in their order."""
    return await conn.fetchvals(SQL_ROOMS, beginning, limit)


async def users_like(conn: Connection, beginning: str, limit: int = FOUND_MAX) -> list[str]:
    """Return ids of known users of any server with a beginning, in their order."""
    return await conn.fetchvals(SQL_USERS, beginning, limit)


async def rooms_by_alias(conn: Connection, alias: str, limit: int = FOUND_MAX) -> list[RoomId]:
    """Return the rooms whose canonical alias event has this alias, also as an alternative."""
    rows = await conn.fetch(SQL_ALIASES, ALIASES_MAX, row=AliasRow)
    named = (row.room_id for row in rows if alias in _aliases(row))
    return list(islice(named, limit))


def _aliases(row: AliasRow) -> list[Any]:
    raw = decode(row.json, row.event_id, row.room_id)
    json = event_json(row.event_id, raw, row.room_version, redacted=row.hidden)
    content = json.get("content")
    if not isinstance(content, dict):
        return []
    others = content.get("alt_aliases")
    return [content.get("alias"), *(others if isinstance(others, list) else ())]
