"""State deltas and memberships of one store must agree: a sync derives its state from both.

A sync takes the membership at its token from the deltas after it, and knows by the position of the
membership whether there are any. So that position is the one of the last delta of the user's key.
"""

from typing import Final

import asyncpg

SQL_BROKEN: Final = """
SELECT room_nid, state_key_nid, stream_ordering, prev_event_nid, known
FROM (
    SELECT *, lag(event_nid) OVER (
        PARTITION BY room_nid, state_key_nid ORDER BY stream_ordering
    ) AS known
    FROM state_deltas
) AS d
WHERE prev_event_nid IS DISTINCT FROM known
"""
SQL_MISPLACED: Final = """
SELECT p.name, m.room_nid, m.stream_ordering, d.position
FROM memberships m
JOIN principals p USING (principal_nid)
JOIN state_keys k ON k.type_nid = 2 AND k.state_key = p.name
JOIN (
    SELECT room_nid, state_key_nid, max(stream_ordering) AS position
    FROM state_deltas
    GROUP BY room_nid, state_key_nid
) AS d USING (room_nid, state_key_nid)
LEFT JOIN out_of_band_memberships o USING (room_nid, principal_nid, event_nid)
WHERE o.event_nid IS NULL AND m.stream_ordering <> d.position
"""


async def disagreements(conn: asyncpg.Connection) -> list[str]:
    """Return deltas that do not continue the one before, and memberships at another position."""
    broken = [f"state_deltas: {dict(row)}" for row in await conn.fetch(SQL_BROKEN)]
    return broken + [f"memberships: {dict(row)}" for row in await conn.fetch(SQL_MISPLACED)]
