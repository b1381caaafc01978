"""The swap: what differs between the shadow tables and the live ones goes into the live ones.

It is one transaction that locks the room. Plain names are the live tables here
(`ShadowTables.live`); ``$1`` is the nid of the room there, and ``$2`` its nid in the shadow tables.

Some things cannot be planned again, and stay: the bytes of an event, its position, when it was
received and by which writer. Facts that clients know stay, too: the deltas of the current
state, and the positions of events before they were reordered.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.columns import (
    AUDIENCES,
    AUTH_CHAIN_LINKS,
    AUTH_CHAINS,
    AUTH_NIDS,
    CLAIMED_DEPTH,
    CURRENT_STATE,
    DROPPED_EXTREMITIES,
    EVENTS,
    MISSING_EVENTS,
    PAST_VISIBILITY,
    PREV_NIDS,
    ROOMS,
    STATE_GROUPS,
    VISIBILITY,
    WAITING_REDACTIONS,
)
from storage.database.connection import Connection
from storage.database.placeholders import ColumnList, compose
from storage.errors import StorageCorrupt
from storage.maintenance.repair.current import SQL_REPAIR_MEMBERSHIPS
from storage.maintenance.repair.graph import repair_reorderings, repair_time_order
from storage.pipeline.rebuilding.arrivals import LiveRoomRow
from storage.pipeline.rebuilding.match import Matching
from storage.streams.invalidate_caches import invalidate_caches

SQL_SAME_GROUPS: Final[LiteralString] = """
INSERT INTO pg_temp.same_groups (shadow, live)
SELECT * FROM unnest($1::bigint[], $2::bigint[])
"""

SQL_OTHER_NUMBERS: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM pg_temp.same_groups same
    JOIN pg_temp.state_groups s ON s.state_group = same.shadow
    CROSS JOIN LATERAL (SELECT g.audience FROM state_groups g
        WHERE g.state_group = same.live OFFSET 0) AS g
    WHERE g.audience <> s.audience
)
"""

SQL_FORGET_SAME: Final[LiteralString] = """
DELETE FROM pg_temp.same_groups
"""

SQL_DROP_GROUPS: Final[LiteralString] = """
DELETE FROM state_groups
WHERE room_nid = $1::int AND ($2::boolean OR path_of(state_group) && $3::bigint[])
"""

SQL_ADD_GROUPS: Final[LiteralString] = compose(
    """
WITH RECURSIVE
used AS (
    SELECT state_group_before AS state_group FROM pg_temp.events
        WHERE room_nid = $2::int AND NOT outlier
    UNION
    SELECT state_group_after FROM pg_temp.events WHERE room_nid = $2::int AND NOT outlier
    UNION
    SELECT current_state_group FROM pg_temp.rooms WHERE room_nid = $2::int
),
lacking AS (
    SELECT u.state_group
    FROM used u
    WHERE NOT EXISTS (SELECT FROM pg_temp.same_groups same WHERE same.shadow = u.state_group)
    UNION
    SELECT s.state_group  -- the empty state of a room is always there
    FROM pg_temp.state_groups s
    WHERE s.room_nid = $2::int AND s.entry_count = 0
        AND NOT EXISTS (SELECT FROM state_groups g
            WHERE g.entry_count = 0 AND g.room_nid = $1::int)
),
needed AS (  -- with their paths, which state_path would read in the live table
    SELECT state_group
    FROM lacking
    UNION
    SELECT s.state_group - own.distance
    FROM needed
    JOIN pg_temp.state_groups s USING (state_group)
    CROSS JOIN LATERAL distances_in_path(s.back, s.path) AS own
)
INSERT INTO state_groups (room_nid, :state_group.columns)
SELECT $1::int, :state_group.of(s)
FROM needed
JOIN pg_temp.state_groups s USING (state_group)
""",
    STATE_GROUPS.chosen("state_group", STATE_GROUPS.but("room_nid")),
).sql

EDGES: Final = tuple(sorted({*PREV_NIDS.columns, *AUTH_NIDS.columns} - {"event_nid"}))
OF_ARRIVAL: Final = (
    "stream_ordering",
    "arrival_ordering",
    "received_ts",
    "in_order_ts",
    "writer_nid",
)
"""Columns of `events` that say when and in which order it arrived. That stays."""

REPLANNED: Final = EVENTS.chosen(
    "replanned",
    EVENTS.but(
        "event_nid",
        *OF_ARRIVAL,
        "depth",  # compared as it is claimed: it may be stored in two forms
        "state_group_before",  # these two are compared under the numbers that the live tables have
        "state_group_after",
        "room_nid",
        "encoding",
        "outlier",
        "backfilled",
        "event_id",
        "json",
        *EDGES,  # compared as nids: the same edges may be stored in two forms
    ),
)
EDGE_COLUMNS: Final = EVENTS.chosen("edge", EDGES)

SQL_SET_EVENTS: Final[LiteralString] = compose(
    """
WITH found AS MATERIALIZED (
    SELECT s.*, COALESCE(b.live, s.state_group_before) AS group_before,
        COALESCE(a.live, s.state_group_after) AS group_after
    FROM pg_temp.events s
    LEFT JOIN pg_temp.same_groups b ON b.shadow = s.state_group_before
    LEFT JOIN pg_temp.same_groups a ON a.shadow = s.state_group_after
    CROSS JOIN LATERAL (
        SELECT event_nid, depth, state_group_before, state_group_after, :edge.columns,
            :replanned.columns
        FROM events
        WHERE event_nid = s.event_nid
        OFFSET 0
    ) AS e
    WHERE s.room_nid = $1::int
        AND (
            COALESCE(b.live, s.state_group_before), COALESCE(a.live, s.state_group_after),
            :claimed_depth.call(s), :prev_nids.call(s), :auth_nids.call(s), :replanned.of(s)
        ) IS DISTINCT FROM (
            e.state_group_before, e.state_group_after,
            :claimed_depth.call(e), :prev_nids.call(e), :auth_nids.call(e), :replanned.of(e)
        )
)
UPDATE events e
SET state_group_before = s.group_before,
    state_group_after = s.group_after,
    depth = s.depth,
    :edge.update(s),
    :replanned.update(s)
FROM found s
WHERE e.event_nid = s.event_nid
""",
    REPLANNED,
    EDGE_COLUMNS,
    CLAIMED_DEPTH,
    PREV_NIDS,
    AUTH_NIDS,
).sql

SQL_LEFT_OUT: Final[LiteralString] = """
SELECT e.event_id
FROM events e
WHERE e.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.events s
        WHERE s.event_nid = e.event_nid AND s.room_nid = $2::int AND s.outlier = e.outlier)
LIMIT 10
"""

SQL_SET_ROOM: Final[LiteralString] = compose(
    """
UPDATE rooms r
SET current_state_group = COALESCE(same.live, s.current_state_group),
    last_stream_ordering = GREATEST(r.completed_at, (
        SELECT max(e.stream_ordering)
        FROM events e
        WHERE e.room_nid = $1::int AND NOT e.outlier AND NOT e.backfilled
    )),
    max_topological_ordering = GREATEST(r.max_topological_ordering, s.max_topological_ordering),
    :room.update(s)
FROM pg_temp.rooms s
LEFT JOIN pg_temp.same_groups same ON same.shadow = s.current_state_group
WHERE r.room_nid = $1::int AND s.room_nid = $2::int
""",
    ROOMS.chosen(
        "room",
        ROOMS.but(
            "write_version",
            "room_nid",
            "current_state_group",
            "last_stream_ordering",
            "max_topological_ordering",
            "moves",
            "removals",
            "room_id",
            "room_version",
            "is_partial",
            "completed_at",
            "in_order_ts",
        ),
    ),
).sql

SQL_DROP_GAPS: Final[LiteralString] = """
DELETE FROM missing_events m
WHERE m.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.missing_events s
        WHERE s.event_nid = m.event_nid AND s.event_id = m.event_id)
"""

SQL_SET_GAPS: Final[LiteralString] = compose(
    """
INSERT INTO missing_events AS m (room_nid, :gap.columns)
SELECT $1::int, :gap.of(s)
FROM pg_temp.missing_events s
WHERE s.room_nid = $2::int
ON CONFLICT (event_nid) DO UPDATE SET :gap.update(EXCLUDED), room_nid = EXCLUDED.room_nid
    WHERE (:gap.others(m), m.room_nid)
        IS DISTINCT FROM (:gap.others(EXCLUDED), EXCLUDED.room_nid)
""",
    ColumnList("gap", MISSING_EVENTS.but("room_nid"), frozenset(("event_nid", "event_id"))),
).sql

SQL_DROP_DROPPED: Final[LiteralString] = """
DELETE FROM dropped_extremities d
WHERE d.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.dropped_extremities s
        WHERE s.room_nid = $2::int AND s.event_nid = d.event_nid)
"""

SQL_SET_DROPPED: Final[LiteralString] = compose(
    """
INSERT INTO dropped_extremities (room_nid, :dropped.columns)
SELECT $1::int, :dropped.columns
FROM pg_temp.dropped_extremities
WHERE room_nid = $2::int
ON CONFLICT DO NOTHING
""",
    DROPPED_EXTREMITIES.chosen("dropped", DROPPED_EXTREMITIES.but("room_nid")),
).sql

SQL_DROP_WAITING: Final[LiteralString] = """
DELETE FROM waiting_redactions w
WHERE w.room_nid = $1::int
"""

SQL_SET_WAITING: Final[LiteralString] = compose(
    """
INSERT INTO waiting_redactions (room_nid, :waiting.columns)
SELECT $1::int, :waiting.columns
FROM pg_temp.waiting_redactions
WHERE room_nid = $2::int
""",
    WAITING_REDACTIONS.chosen("waiting", WAITING_REDACTIONS.but("room_nid")),
).sql

SQL_DROP_CURRENT: Final[LiteralString] = """
DELETE FROM current_state c
WHERE c.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.current_state s
        WHERE s.room_nid = $2::int AND s.state_key_nid = c.state_key_nid)
"""

SQL_SET_CURRENT: Final[LiteralString] = compose(
    """
INSERT INTO current_state AS c (room_nid, :entry.columns)
SELECT $1::int, :entry.columns
FROM pg_temp.current_state
WHERE room_nid = $2::int
ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET :entry.update(EXCLUDED)
    WHERE (:entry.others(c)) IS DISTINCT FROM (:entry.others(EXCLUDED))
""",
    CURRENT_STATE.chosen("entry", CURRENT_STATE.but("room_nid")),
).sql

SQL_DROP_LINKS: Final[LiteralString] = """
DELETE FROM auth_chain_links l
USING (
    SELECT DISTINCT COALESCE(a.chain_nid, -a.event_nid) AS chain_nid
    FROM pg_temp.events s
    JOIN auth_chains a ON a.event_nid = s.event_nid
    WHERE s.room_nid = $1::int AND s.state_key_nid IS NOT NULL
) AS own
WHERE l.chain_nid = own.chain_nid
    AND NOT EXISTS (
        SELECT
        FROM pg_temp.auth_chain_links s
        WHERE s.chain_nid = l.chain_nid AND s.sequence_number = l.sequence_number
            AND s.target_chain_nid = l.target_chain_nid
            AND s.target_sequence_number = l.target_sequence_number
    )
"""

SQL_DROP_POSITIONS: Final[LiteralString] = compose(
    """
DELETE FROM auth_chains a
USING pg_temp.events s
WHERE a.event_nid = s.event_nid AND s.room_nid = $1::int
    AND NOT EXISTS (
        SELECT
        FROM pg_temp.auth_chains c
        WHERE c.event_nid = a.event_nid AND (:position.of(c)) IS NOT DISTINCT FROM (:position.of(a))
    )
""",
    AUTH_CHAINS.chosen("position"),
).sql

SQL_SET_POSITIONS: Final[LiteralString] = compose(
    """
INSERT INTO auth_chains (:position.columns)
SELECT :position.of(c)
FROM pg_temp.auth_chains c
JOIN pg_temp.events s ON s.event_nid = c.event_nid
WHERE s.room_nid = $1::int
ON CONFLICT (event_nid) DO NOTHING
""",
    AUTH_CHAINS.chosen("position"),
).sql

SQL_SET_LINKS: Final[LiteralString] = compose(
    """
INSERT INTO auth_chain_links AS o (:link.columns)
SELECT :link.of(l)
FROM (
    SELECT DISTINCT COALESCE(c.chain_nid, -c.event_nid) AS chain_nid
    FROM pg_temp.auth_chains c
    JOIN pg_temp.events s ON s.event_nid = c.event_nid
    WHERE s.room_nid = $1::int
) AS own
JOIN pg_temp.auth_chain_links l ON l.chain_nid = own.chain_nid
ON CONFLICT (chain_nid, sequence_number, target_chain_nid) DO UPDATE SET :link.update(EXCLUDED)
    WHERE (:link.others(o)) IS DISTINCT FROM (:link.others(EXCLUDED))
""",
    AUTH_CHAIN_LINKS.chosen("link"),
).sql

SQL_DROP_VISIBILITY: Final[LiteralString] = """
DELETE FROM visibility v
WHERE v.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.visibility s
        WHERE s.room_nid = $2::int AND s.principal_nid = v.principal_nid)
"""

SQL_SET_VISIBILITY: Final[LiteralString] = compose(
    """
INSERT INTO visibility AS v (room_nid, :visible.columns)
SELECT $1::int, :visible.columns
FROM pg_temp.visibility
WHERE room_nid = $2::int
ON CONFLICT (room_nid, principal_nid) DO UPDATE SET :visible.update(EXCLUDED)
    WHERE (:visible.others(v)) IS DISTINCT FROM (:visible.others(EXCLUDED))
""",
    VISIBILITY.chosen("visible", VISIBILITY.but("room_nid")),
).sql

SQL_DROP_PAST: Final[LiteralString] = """
DELETE FROM past_visibility v
WHERE v.room_nid = $1::int
    AND NOT EXISTS (
        SELECT
        FROM pg_temp.past_visibility s
        WHERE s.room_nid = $2::int AND s.principal_nid = v.principal_nid
            AND s.first_audience = v.first_audience
    )
"""

SQL_SET_PAST: Final[LiteralString] = compose(
    """
INSERT INTO past_visibility AS v (room_nid, :past.columns)
SELECT $1::int, :past.columns
FROM pg_temp.past_visibility
WHERE room_nid = $2::int
ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE SET :past.update(EXCLUDED)
    WHERE (:past.others(v)) IS DISTINCT FROM (:past.others(EXCLUDED))
""",
    PAST_VISIBILITY.chosen("past", PAST_VISIBILITY.but("room_nid")),
).sql

SQL_DROP_AUDIENCES: Final[LiteralString] = """
DELETE FROM audiences a
WHERE a.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.audiences s
        WHERE s.room_nid = $2::int AND s.audience = a.audience)
"""

SQL_SET_AUDIENCES: Final[LiteralString] = compose(
    """
INSERT INTO audiences AS a (room_nid, :audience.columns)
SELECT $1::int, :audience.columns
FROM pg_temp.audiences
WHERE room_nid = $2::int
ON CONFLICT (room_nid, audience) DO UPDATE SET :audience.update(EXCLUDED)
    WHERE (:audience.others(a)) IS DISTINCT FROM (:audience.others(EXCLUDED))
""",
    AUDIENCES.chosen("audience", AUDIENCES.but("room_nid")),
).sql

EVENT_CACHE: Final = "events"
"""The cache of events (`storage.streams.caches`)."""

OF_LIVE: Final = (SQL_DROP_GAPS, SQL_DROP_WAITING)
OF_SHADOW: Final = (SQL_DROP_LINKS, SQL_DROP_POSITIONS, SQL_SET_POSITIONS, SQL_SET_LINKS)
OF_BOTH: Final = (
    SQL_SET_ROOM,
    SQL_SET_GAPS,
    SQL_DROP_DROPPED,
    SQL_SET_DROPPED,
    SQL_SET_WAITING,
    SQL_DROP_CURRENT,
    SQL_SET_CURRENT,
    SQL_DROP_VISIBILITY,
    SQL_SET_VISIBILITY,
    SQL_DROP_PAST,
    SQL_SET_PAST,
    SQL_DROP_AUDIENCES,
    SQL_SET_AUDIENCES,
)
"""Statements that take the nid of the live room, that of the shadow, or both; in this order."""


class SwapResult(NamedTuple):
    """How many rows differed."""

    events: int
    others: int


async def swap(
    conn: Connection, live: LiveRoomRow, shadow_nid: int, matching: Matching, server_name: str
) -> SwapResult:
    """Make the live tables equal to the shadow tables.

    The transaction must have the lock of the room, and do nothing after this. Raise
    `StorageCorrupt` if an event of the room was not planned again.
    """
    left_out: list[str] = await conn.fetchvals(SQL_LEFT_OUT, live.room_nid, shadow_nid)
    if left_out:
        raise StorageCorrupt("events of the room could not be planned again", event_ids=left_out)
    await _swap_groups(conn, live.room_nid, shadow_nid, matching)
    events = _count(await conn.execute(SQL_SET_EVENTS, shadow_nid))
    others = 0
    for statements, numbers in (
        (OF_LIVE, (live.room_nid,)),
        (OF_SHADOW, (shadow_nid,)),
        (OF_BOTH, (live.room_nid, shadow_nid)),
    ):
        for statement in statements:
            others += _count(await conn.execute(statement, *numbers))
    await conn.execute(SQL_REPAIR_MEMBERSHIPS, live.room_nid, server_name)
    await repair_reorderings(conn, live.room_nid)
    await repair_time_order(conn, live.room_nid)
    if events:
        await invalidate_caches(conn, EVENT_CACHE)
    await invalidate_caches(conn)
    return SwapResult(events, others)


async def _swap_groups(
    conn: Connection, room_nid: int, shadow_nid: int, matching: Matching
) -> None:
    """Keep sound states under their numbers.

    If an audience has another number now, every event changes; then all states get new numbers.
    """
    await conn.execute(SQL_SAME_GROUPS, list(matching.same), list(matching.same.values()))
    renumbered: bool = await conn.fetchval(SQL_OTHER_NUMBERS)
    if renumbered:
        await conn.execute(SQL_FORGET_SAME)
    if renumbered or matching.wrong:
        await conn.execute(SQL_DROP_GROUPS, room_nid, renumbered, list(matching.wrong))
    await conn.execute(SQL_ADD_GROUPS, room_nid, shadow_nid)


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])
