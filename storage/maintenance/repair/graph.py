"""Rebuild missing events, forward extremities and latest orderings, from the events."""

from typing import Final, LiteralString, NamedTuple

from storage.codec import StoredBytes, decode
from storage.database.array_text import int_array, transposed
from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.event import load
from storage.maintenance.verify.graph import SQL_ENDS, SQL_GAPS, SQL_NEVER_ENDS, WrongGapRow
from storage.maintenance.verify.reorderings import SQL_WRONG_REORDERINGS, WrongReorderingRow
from storage.maintenance.verify.room import VerifiedRoom

SQL_DROP_GAPS: Final[LiteralString] = """
DELETE FROM missing_events
WHERE event_nid = ANY($1::bigint[])
"""

SQL_ADD_GAPS: Final[LiteralString] = """
INSERT INTO missing_events (event_nid, event_id, room_nid, superseded, child_nids)
SELECT i.event_nid, i.event_id, $1::int, i.superseded, i.child_nids::bigint[]
FROM unnest($2::bigint[], $3::text[], $4::boolean[], $5::text[]) AS i (event_nid, event_id,
    superseded, child_nids)
"""

SQL_DROP_MOVES: Final[LiteralString] = """
DELETE FROM reordered_events m
USING unnest($2::bigint[], $3::bigint[]) AS i (moves, event_nid)
WHERE m.room_nid = $1::int AND m.moves = i.moves AND m.event_nid = i.event_nid
"""

SQL_COUNT_MOVES: Final[LiteralString] = """
UPDATE rooms
SET moves = GREATEST(moves,
    (SELECT max(m.moves) FROM reordered_events m WHERE m.room_nid = $1::int))
WHERE room_nid = $1::int
"""

SQL_CHILD: Final[LiteralString] = compose(
    """
SELECT event_id, redacted_form, :prev_nids.call AS prev_events, json
FROM events
WHERE event_nid = $1::bigint
""",
    PREV_NIDS,
).sql

SQL_SET_ENDS: Final[LiteralString] = """
UPDATE rooms
SET forward_extremities = $2::bigint[],
    max_topological_ordering = GREATEST(max_topological_ordering, latest.topological_ordering),
    last_stream_ordering = GREATEST(latest.stream_ordering, completed_at)
FROM (
    SELECT COALESCE(max(topological_ordering), 0) AS topological_ordering,
        max(stream_ordering) FILTER (WHERE NOT backfilled) AS stream_ordering
    FROM events
    WHERE room_nid = $1::int AND NOT outlier
) AS latest
WHERE room_nid = $1::int
"""

SQL_DROP_NEVER_ENDS: Final[LiteralString] = """
DELETE FROM dropped_extremities
WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
"""


class ChildRow(NamedTuple):
    """A child, from whose bytes the id of a parent is read."""

    event_id: str
    redacted_form: bool
    prev_events: list[int]
    json: StoredBytes


async def repair_gaps(conn: Connection, room: VerifiedRoom) -> None:
    """Set the missing events by the edges."""
    rows = await conn.fetch(SQL_GAPS, room.nid, row=WrongGapRow)
    await conn.execute(SQL_DROP_GAPS, [row.event_nid for row in rows])
    gaps = [
        (
            row.event_nid,
            await _missing_id(conn, room, row),
            row.expected_superseded,
            int_array(row.expected_nids),
        )
        for row in rows
        if row.expected_nids is not None
    ]
    await conn.execute(SQL_ADD_GAPS, room.nid, *transposed(gaps, 4))


async def repair_reorderings(conn: Connection, room_nid: int) -> None:
    """Drop impossible reorderings; tokens then use the current positions of these events."""
    while wrong := await conn.fetch(SQL_WRONG_REORDERINGS, room_nid, row=WrongReorderingRow):
        await conn.execute(SQL_DROP_MOVES, room_nid, *transposed((row[:2] for row in wrong), 2))
    await conn.execute(SQL_COUNT_MOVES, room_nid)


async def _missing_id(conn: Connection, room: VerifiedRoom, gap: WrongGapRow) -> str:
    """Return the id of a missing event: its own if it is an outlier, else as a child names it."""
    child = await conn.fetchrow(SQL_CHILD, gap.event_nid, row=ChildRow)
    if child is not None:
        return child.event_id
    [child_nid, *_] = gap.expected_nids or [0]
    child = await conn.fetchrow(SQL_CHILD, child_nid, row=ChildRow)
    assert child is not None, "the child was read in this snapshot"  # noqa: S101  # for the types
    raw = decode(child.json, child.event_id, room.row.room_id)
    event = load(raw, room.row.room_version, child.event_id, redacted=child.redacted_form)
    return list(dict.fromkeys(event.prev_event_ids))[child.prev_events.index(gap.event_nid)]


async def repair_extremities(conn: Connection, room_nid: int) -> list[int]:
    """Set the forward extremities by the edges, without the dropped ones; return them."""
    await conn.execute(
        SQL_DROP_NEVER_ENDS, room_nid, await conn.fetchvals(SQL_NEVER_ENDS, room_nid)
    )
    ends: list[int] = sorted(await conn.fetchvals(SQL_ENDS, room_nid))
    await conn.execute(SQL_SET_ENDS, room_nid, ends)
    return ends
