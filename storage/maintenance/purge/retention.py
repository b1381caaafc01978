"""Read how long rooms keep their history.

That is `m.room.retention` of the current state within the operator's limits, or the operator's
default. Source: MSC1763. ``max_lifetime`` counts from when this server received an event, because a
sender can claim any time. The last event of a room always stays.
"""

from typing import Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode
from storage.config import Config
from storage.database.connection import Connection

SQL_POLICIES: Final[LiteralString] = """
SELECT r.room_id, e.event_id, e.json
FROM (
    SELECT room_nid, room_id
    FROM rooms
    WHERE room_id > $1::text AND current_state_group IS NOT NULL
    ORDER BY room_id
    LIMIT 1000
) AS r
LEFT JOIN event_types t ON t.type = 'm.room.retention'
LEFT JOIN state_keys k ON k.type_nid = t.type_nid AND k.state_key = ''
LEFT JOIN LATERAL (
    SELECT event_nid FROM current_state
    WHERE room_nid = r.room_nid AND state_key_nid = k.state_key_nid
    OFFSET 0
) AS c ON true
LEFT JOIN LATERAL (
    SELECT event_id, json FROM events
    WHERE event_nid = c.event_nid AND NOT redacted_form AND redacted_by IS NULL
    OFFSET 0
) AS e ON true
ORDER BY r.room_id
"""


class PolicyRow(NamedTuple):
    """A room and the event with its policy; None if it has none."""

    room_id: str
    event_id: str | None
    json: StoredBytes | None

    @property
    def raw(self) -> bytes | None:
        if self.json is None or self.event_id is None:
            return None
        return decode(self.json, self.event_id, self.room_id)


class Policy(NamedTuple):
    """A room that keeps its history for this time (ms)."""

    room_id: str
    lifetime_ms: int


async def policies(
    conn: Connection, config: Config, after: str = ""
) -> tuple[list[Policy], int, str | None]:
    """Return the next thousand rooms' policies, of those with a bounded lifetime.

    Return also the number of rooms, and the last room id, to continue from, or None.
    """
    rows = await conn.fetch(SQL_POLICIES, after, row=PolicyRow)
    found = [
        Policy(row.room_id, lifetime)
        for row in rows
        if (lifetime := lifetime_ms(row.raw, config)) is not None
    ]
    return found, len(rows), rows[-1].room_id if rows else None


def lifetime_ms(raw: bytes | None, config: Config) -> int | None:
    """Return how long a room keeps its history; None for ever.

    A value that is no positive integer counts as absent.
    """
    content = {} if raw is None else orjson.loads(raw).get("content")
    wanted = content.get("max_lifetime") if isinstance(content, dict) else None
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted <= 0:
        return config.retention_lifetime_ms_default or None
    longest = config.retention_lifetime_ms_max or wanted
    return max(min(wanted, longest), config.retention_lifetime_ms_min)
