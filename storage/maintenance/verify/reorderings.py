"""Check the stored positions of events that were reordered."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom

SQL_WRONG_REORDERINGS: Final[LiteralString] = """
SELECT m.moves, m.event_nid, m.topological_before, e.event_id,
    COALESCE(m.next, e.topological_ordering) AS after
FROM (
    SELECT m.*, lead(m.topological_before) OVER (PARTITION BY m.event_nid ORDER BY m.moves) AS next
    FROM reordered_events m
    WHERE m.room_nid = $1::int
) AS m
LEFT JOIN events e ON e.event_nid = m.event_nid AND e.room_nid = m.room_nid AND NOT e.outlier
WHERE e.event_nid IS NULL OR m.topological_before >= COALESCE(m.next, e.topological_ordering)
ORDER BY m.moves, m.event_nid
"""

SQL_MOVES: Final[LiteralString] = """
SELECT r.moves AS found,
    (SELECT COALESCE(max(m.moves), 0) FROM reordered_events m
        WHERE m.room_nid = r.room_nid) AS expected
FROM rooms r
WHERE r.room_nid = $1::int
"""


class WrongReorderingRow(NamedTuple):
    """A reordering of no event of the room, or one that does not go up."""

    moves: int
    event_nid: int
    topological_before: int
    event_id: str | None
    after: int | None


class ReorderCountRow(NamedTuple):
    """The room's count of reorderings, and the least that it can be."""

    found: int
    expected: int


async def check_reorderings(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that reordered events are events of the room and went up ("reordered_events").

    Check also that the room counts the reorderings ("rooms").
    """
    for row in await conn.fetch(SQL_WRONG_REORDERINGS, room.nid, row=WrongReorderingRow):
        found = f"{row.topological_before} before move {row.moves}"
        expected = "an event of the room" if row.after is None else f"less than {row.after}"
        yield room.finding(
            "reordered_events", [row.event_id or f"nid {row.event_nid}"], found, expected
        )
    counted = await conn.fetchrow(SQL_MOVES, room.nid, row=ReorderCountRow)
    if counted is not None and counted.found < counted.expected:
        yield room.finding(
            "rooms", [room.row.room_id], f"moves {counted.found}", f"at least {counted.expected}"
        )
