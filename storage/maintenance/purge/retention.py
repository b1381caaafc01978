"""How long rooms keep their history: `m.room.retention` of the current state, within the operator's limits, or the operator's default.

Source: MSC1763. ``max_lifetime`` counts from when this server received an event, as what senders claim could be anything. The last event of a
room always stays.
"""

from typing import Final, LiteralString, NamedTuple

import orjson

from storage.config import Config
from storage.database.connection import Connection

SQL_POLICIES: Final[LiteralString] = """
SELECT r.room_id, e.json
FROM (
    SELECT room_nid, room_id
    FROM rooms
    WHERE room_id > $1::text AND current_state_group IS NOT NULL
    ORDER BY room_id
    LIMIT 1000
) AS r
LEFT JOIN event_types t ON t.type = 'm.room.retention'
LEFT JOIN state_keys k ON k.type_nid = t.type_nid AND k.state_key = ''
LEFT JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid
LEFT JOIN events e ON e.event_nid = c.event_nid AND NOT e.redacted_form AND e.redacted_by IS NULL
ORDER BY r.room_id
"""


class PolicyRow(NamedTuple):
    """A room, and its policy as received; None if it has none."""

    room_id: str
    json: bytes | None


class Policy(NamedTuple):
    """A room whose history is kept for so long (ms)."""

    room_id: str
    lifetime_ms: int


async def policies(
    conn: Connection, config: Config, after: str = ""
) -> tuple[list[Policy], str | None]:
    """The rooms that keep their history for a bounded time only, of the next thousand; the last of those, to go on from, or None."""
    rows = await conn.fetch(SQL_POLICIES, after, row=PolicyRow)
    found = [
        Policy(row.room_id, lifetime)
        for row in rows
        if (lifetime := lifetime_ms(row.json, config)) is not None
    ]
    return found, rows[-1].room_id if rows else None


def lifetime_ms(json: bytes | None, config: Config) -> int | None:
    """How long a room keeps its history; None for ever.

    What is no positive whole number is no lifetime.
    """
    content = {} if json is None else orjson.loads(json).get("content")
    asked = content.get("max_lifetime") if isinstance(content, dict) else None
    if not isinstance(asked, int) or isinstance(asked, bool) or asked <= 0:
        return config.retention_lifetime_ms_default or None
    longest = config.retention_lifetime_ms_max or asked
    return max(min(asked, longest), config.retention_lifetime_ms_min)
