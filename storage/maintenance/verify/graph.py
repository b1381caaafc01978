"""Check the graph of prev_events: topological order, missing events, forward extremities."""

from collections.abc import AsyncIterator
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom, event_ids

SQL_OUT_OF_ORDER: Final[LiteralString] = compose(
    """
SELECT c.event_id AS child_id, c.topological_ordering AS child, p.event_id AS parent_id,
    p.topological_ordering AS parent
FROM events c
CROSS JOIN unnest(:prev_nids.call(c)) AS n (event_nid)
JOIN events p ON p.event_nid = n.event_nid
WHERE c.room_nid = $1::int AND NOT c.outlier AND NOT p.outlier
    AND p.topological_ordering >= c.topological_ordering
""",
    PREV_NIDS,
).sql

SQL_ROOM_MAXIMA: Final[LiteralString] = """
SELECT COALESCE(max(topological_ordering), 0) AS topological_ordering,
    GREATEST(max(stream_ordering) FILTER (WHERE NOT backfilled),
        (SELECT completed_at FROM rooms WHERE room_nid = $1::int)) AS stream_ordering
FROM events
WHERE room_nid = $1::int AND NOT outlier
"""

SQL_GAPS: Final[LiteralString] = compose(
    """
WITH RECURSIVE
named AS (  -- by an accepted live event, also through events that can be no extremity
    SELECT n.event_nid
    FROM events e
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE e.room_nid = $1::int AND NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND NOT e.backfilled
    UNION
    SELECT n.event_nid
    FROM named
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
),
gap AS (  -- the expected rows
    SELECT n.event_nid,
        array_agg(DISTINCT c.event_nid ORDER BY c.event_nid) AS child_nids,
        n.event_nid IN (SELECT event_nid FROM named) AS superseded
    FROM events c
    CROSS JOIN unnest(:prev_nids.call(c)) AS n (event_nid)
    LEFT JOIN events p ON p.event_nid = n.event_nid
    WHERE c.room_nid = $1::int AND NOT c.outlier AND p.outlier IS NOT FALSE
    GROUP BY n.event_nid
),
found AS (
    SELECT m.event_nid, m.event_id, m.superseded, m.child_nids
    FROM missing_events m
    WHERE m.room_nid = $1::int
)
SELECT event_nid, COALESCE(f.event_id, e.event_id) AS event_id, f.child_nids AS found_nids,
    g.child_nids AS expected_nids,
    f.superseded AS found_superseded, g.superseded AS expected_superseded,
        f.event_id = e.event_id AS same_id
FROM gap g
FULL JOIN found f USING (event_nid)
LEFT JOIN events e USING (event_nid)
WHERE f.event_nid IS NULL
    OR g.event_nid IS NULL
    OR NOT (f.child_nids @> g.child_nids AND g.child_nids @> f.child_nids)
    OR g.superseded > f.superseded
    OR (f.superseded > g.superseded
        AND NOT EXISTS (SELECT FROM purge_jobs j WHERE j.room_nid = $1::int))
    OR f.event_id <> e.event_id
""",
    PREV_NIDS,
).sql

SQL_AFTER_GAPS: Final[LiteralString] = compose(
    """
SELECT e.event_id, COALESCE(e.after_gap, false) AS found, correct.expected
FROM events e
CROSS JOIN LATERAL (
    SELECT NOT e.backfilled AND EXISTS (
        SELECT
        FROM unnest(:prev_nids.call(e)) AS n (event_nid)
        LEFT JOIN events p ON p.event_nid = n.event_nid AND p.room_nid = e.room_nid
            AND COALESCE(p.arrival_ordering, p.stream_ordering)
                < COALESCE(e.arrival_ordering, e.stream_ordering)
        WHERE p.event_nid IS NULL
    )
) AS correct (expected)
WHERE e.room_nid = $1::int AND NOT e.outlier AND COALESCE(e.after_gap, false) <> correct.expected
""",
    PREV_NIDS,
).sql

SQL_ENDS: Final[LiteralString] = compose(
    """
WITH RECURSIVE
live AS (
    SELECT event_nid, :prev_nids.call AS prev_events
    FROM events
    WHERE room_nid = $1::int AND NOT outlier AND rejected IS NULL AND NOT soft_failed
        AND NOT backfilled
),
named AS (
    SELECT n.event_nid
    FROM live
    CROSS JOIN unnest(live.prev_events) AS n (event_nid)
    UNION
    SELECT n.event_nid
    FROM named
    JOIN events e USING (event_nid)
    CROSS JOIN unnest(:prev_nids.call(e)) AS n (event_nid)
    WHERE NOT e.outlier AND (e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled)
)
SELECT l.event_nid
FROM live l
WHERE NOT EXISTS (SELECT FROM named n WHERE n.event_nid = l.event_nid)
    AND NOT EXISTS (SELECT FROM dropped_extremities d
        WHERE d.room_nid = $1::int AND d.event_nid = l.event_nid)
""",
    PREV_NIDS,
).sql

SQL_NEVER_ENDS: Final[LiteralString] = """
SELECT d.event_nid
FROM dropped_extremities d
LEFT JOIN LATERAL (
    SELECT * FROM events WHERE event_nid = d.event_nid AND room_nid = d.room_nid OFFSET 0
) AS e ON true
WHERE d.room_nid = $1::int
    AND (e.outlier OR e.rejected IS NOT NULL OR e.soft_failed OR e.backfilled) IS NOT FALSE
ORDER BY d.event_nid
"""


class AfterGapRow(NamedTuple):
    """An event whose flag `after_gap` differs: as stored, and as it should be."""

    event_id: str
    found: bool
    expected: bool


class OutOfOrderRow(NamedTuple):
    """An edge whose child is not above its parent."""

    child_id: str
    child: int
    parent_id: str
    parent: int


class MaximaRow(NamedTuple):
    """The largest orderings of a room."""

    topological_ordering: int
    stream_ordering: int | None


class WrongGapRow(NamedTuple):
    """A missing event whose row differs: as stored and as expected; either may be None."""

    event_nid: int
    event_id: str | None
    found_nids: list[int] | None
    expected_nids: list[int] | None
    found_superseded: bool | None
    expected_superseded: bool | None
    same_id: bool | None


async def check_order(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that a child sorts after its stored parents ("topological_ordering").

    Check also the latest orderings in the room's row ("rooms").
    """
    for row in await conn.fetch(SQL_OUT_OF_ORDER, room.nid, row=OutOfOrderRow):
        yield room.finding(
            "topological_ordering",
            [row.child_id, row.parent_id],
            row.child,
            f"more than the parent's {row.parent}",
        )
    maxima = await conn.fetchrow(SQL_ROOM_MAXIMA, room.nid, row=MaximaRow)
    if maxima is not None and room.row.max_topological_ordering < maxima.topological_ordering:
        found = f"max_topological_ordering {room.row.max_topological_ordering}"
        yield room.finding(
            "rooms", [room.row.room_id], found, f"at least {maxima.topological_ordering}"
        )
    if maxima is not None and room.row.last_stream_ordering != maxima.stream_ordering:
        found = f"last_stream_ordering {room.row.last_stream_ordering}"
        yield room.finding("rooms", [room.row.room_id], found, maxima.stream_ordering)


async def check_gaps(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that `missing_events` has exactly the parents that are not in the timeline.

    Each must have its children ("missing_events").
    """
    rows = await conn.fetch(SQL_GAPS, room.nid, row=WrongGapRow)
    ids = await event_ids(
        conn,
        (
            nid
            for row in rows
            for nid in (row.event_nid, *(row.found_nids or ()), *(row.expected_nids or ()))
        ),
    )
    for row in rows:
        found = _gap(row.found_nids, ids, superseded=row.found_superseded)
        expected = _gap(row.expected_nids, ids, superseded=row.expected_superseded)
        if row.same_id is False:
            expected += f", as {ids[row.event_nid]}"
        yield room.finding("missing_events", [row.event_id or ids[row.event_nid]], found, expected)


def _gap(child_nids: list[int] | None, ids: dict[int, str], *, superseded: bool | None) -> str:
    if child_nids is None:
        return "no gap"
    children = ", ".join(sorted(ids[nid] for nid in child_nids))
    return f"{'superseded ' if superseded else ''}gap below {children}"


async def check_after_gaps(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the flag of live events that arrived before one of their parents ("after_gap")."""
    for row in await conn.fetch(SQL_AFTER_GAPS, room.nid, row=AfterGapRow):
        yield room.finding("after_gap", [row.event_id], row.found, row.expected)


async def check_extremities(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the extremities are the accepted live events that no such event names.

    The finding is "forward_extremities". An event named only through events that can be no
    extremity counts as named, too (`storage.persist.plan.topology.extremities_after`). Dropped
    extremities (`storage.persist.plan.extremity_limit`) are left out. The check does not verify
    that they were superseded at the time, only that they could be extremities.
    """
    never = await conn.fetchvals(SQL_NEVER_ENDS, room.nid)
    names = await event_ids(conn, never)
    for nid in never:
        yield room.finding(
            "dropped_extremities", [names[nid]], "dropped", "an accepted live event of the room"
        )
    expected = set(await conn.fetchvals(SQL_ENDS, room.nid))
    found = set(room.row.forward_extremities)
    if found != expected:
        ids = await event_ids(conn, found | expected)
        actual = ", ".join(sorted(ids[nid] for nid in found)) or "none"
        wanted = ", ".join(sorted(ids[nid] for nid in expected)) or "none"
        yield room.finding("forward_extremities", [room.row.room_id], actual, wanted)
