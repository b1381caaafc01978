"""The ranges of audiences of a user or a server in its rooms, and where they begin and end.

An audience is a number; see docs/internals/visibility.md. A number of the main line also has the
topological position at which it was opened. So each range is roughly a range of the room's history.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.ids import RoomId

SQL_AUDIENCES: Final[LiteralString] = """
SELECT r.room_id, lower(ranges.one) AS first_audience, upper(ranges.one) AS end_audience,
    (
        SELECT a.opened_topological
        FROM audiences a
        WHERE a.room_nid = r.room_nid AND a.audience <= lower(ranges.one)
            AND a.opened_topological IS NOT NULL
        ORDER BY a.audience DESC
        LIMIT 1
    ) AS first_topological,
    (
        SELECT a.opened_topological
        FROM audiences a
        WHERE a.room_nid = r.room_nid AND a.audience >= upper(ranges.one)
            AND a.opened_topological IS NOT NULL
        ORDER BY a.audience
        LIMIT 1
    ) AS end_topological,
    r.max_topological_ordering, r.current_audience
FROM principals p
JOIN LATERAL (
    SELECT v.room_nid, v.principal_nid
    FROM visibility v
    WHERE v.principal_nid = p.principal_nid AND v.room_nid = ANY(ARRAY(
        SELECT room_nid FROM rooms WHERE room_id = ANY($2::text[])
    ))
) AS v ON true
JOIN rooms r USING (room_nid)
JOIN whole_visibility w ON w.room_nid = v.room_nid AND w.principal_nid = v.principal_nid
CROSS JOIN LATERAL (SELECT one FROM unnest(w.audiences) AS one LIMIT $3::bigint) AS ranges
WHERE p.name = $1::text
ORDER BY r.room_id, lower(ranges.one)
"""

RANGES_MAX: Final = 64
"""Ranges that are read of each room."""


class PrincipalRangeRow(NamedTuple):
    """A range of audiences of one room.

    ``end_audience`` is not a part of it; None: the range goes on. ``first_topological`` and
    ``end_topological`` are the positions at which the audiences of the main line were opened;
    None: before all, or after all.
    """

    room_id: RoomId
    first_audience: int | None
    end_audience: int | None
    first_topological: int | None
    end_topological: int | None
    max_topological_ordering: int
    current_audience: int


async def audience_ranges(
    conn: Connection, principal: str, room_ids: list[RoomId]
) -> list[PrincipalRangeRow]:
    """Return the ranges of a user or server in these rooms, in order."""
    return await conn.fetch(SQL_AUDIENCES, principal, room_ids, RANGES_MAX, row=PrincipalRangeRow)
