"""The swap: what differs between the shadow tables and the live ones goes into the live ones.

It is one transaction that locks the room. Plain names are the live tables here
(`ShadowTables.live`); ``$1`` is the nid of the room there, and ``$2`` its nid in the shadow tables.

Some things cannot be planned again, and stay: the bytes of an event, its position, when it was
received and by which writer. Facts that clients know stay, too, and get only what they lack
(`storage.rebuild.client_positions`).
"""

from collections.abc import Collection, Sequence
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
    REDACTION_EFFECTS,
    ROOMS,
    STATE_GROUPS,
    VISIBILITY,
    WAITING_REDACTIONS,
)
from storage.database.connection import Connection
from storage.database.placeholders import ColumnList, compose, fill
from storage.errors import StorageCorrupt
from storage.maintenance.purge.removal import delete
from storage.maintenance.verify.event_loader import read_room
from storage.persist.model.cache_view import StoredColumns
from storage.rebuild.arrivals import RebuiltRoom
from storage.rebuild.client_positions import (
    move,
    repair_after_gaps,
    repair_deltas,
    repair_member_positions,
    repair_memberships,
    repair_reorderings,
    repair_time_order,
)
from storage.rebuild.match import Matching
from storage.rebuild.replan import RoomReplan
from storage.rebuild.shared import return_groups
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

# where there are new states: one whose path has a state that no event has in the new plan, whose
# audience may be another one there
SQL_FORGET_PARTLY_SAME: Final[LiteralString] = """
DELETE FROM pg_temp.same_groups s
WHERE EXISTS (
    SELECT
    FROM (
        SELECT DISTINCT unnest(ARRAY[state_group_before, state_group_after]) AS state_group
        FROM pg_temp.events
        WHERE room_nid = $1::int AND NOT outlier
    ) AS u
    JOIN pg_temp.state_groups n USING (state_group)
    WHERE n.entry_count > 0
        AND NOT EXISTS (SELECT FROM pg_temp.same_groups o WHERE o.shadow = u.state_group)
) AND EXISTS (
    SELECT
    FROM state_path(s.live) AS step
    JOIN state_groups g ON g.state_group = step.part
    WHERE g.entry_count > 0
        AND NOT EXISTS (SELECT FROM pg_temp.same_groups o WHERE o.live = g.state_group)
)
"""

SQL_DROP_GROUPS: Final[LiteralString] = """
DELETE FROM state_groups
WHERE room_nid = $1::int AND ($2::boolean OR path_of(state_group) && $3::bigint[])
"""

# groups that no event refers to any more may have audiences that are gone
SQL_DROP_UNUSED: Final[LiteralString] = """
WITH
used AS (
    SELECT state_group_before AS state_group FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT state_group_after FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION
    SELECT current_state_group FROM rooms WHERE room_nid = $1::int
),
needed AS (
    SELECT step.part AS state_group
    FROM used
    CROSS JOIN LATERAL state_path(used.state_group) AS step
)
DELETE FROM state_groups g
WHERE g.room_nid = $1::int AND g.entry_count > 0
    AND NOT EXISTS (SELECT FROM needed n WHERE n.state_group = g.state_group)
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

FROM_BYTES: Final = EVENTS.chosen(
    "kept",
    (
        *StoredColumns._fields,
        "event_id",
        "membership",
        "origin_server_ts",
        "redacted_form",
        "sender_nid",
        "state_key_nid",
        "type_nid",
    ),
)

AUTH_EDGES: Final = EVENTS.chosen("kept", tuple(sorted({*AUTH_NIDS.columns} - {"event_nid"})))

TEMPLATE_KEEP: Final[LiteralString] = """
UPDATE pg_temp.events s
SET :kept.update(e)
FROM (
    SELECT event_nid, :kept.columns
    FROM events
    WHERE event_nid = ANY($1::bigint[])
) AS e
WHERE s.event_nid = e.event_nid
"""
SQL_KEEP_COLUMNS: Final[LiteralString] = compose(TEMPLATE_KEEP, FROM_BYTES).sql
SQL_KEEP_EDGES: Final[LiteralString] = compose(TEMPLATE_KEEP, AUTH_EDGES).sql

SQL_REJECTED: Final[LiteralString] = """
SELECT s.event_nid
FROM pg_temp.events s
JOIN events e ON e.event_nid = s.event_nid
WHERE s.event_nid = ANY($1::bigint[]) AND s.rejected IS NOT NULL AND e.rejected IS NULL
"""

# another row that has such an id has it by damage, and the id of some events is unique
SQL_FREE_IDS: Final[LiteralString] = """
UPDATE events e
SET event_id = e.event_id || ' ' || e.event_nid
FROM pg_temp.events s
WHERE s.event_nid = ANY($1::bigint[]) AND e.event_id = s.event_id AND e.event_nid <> s.event_nid
"""

SQL_SET_BYTES: Final[LiteralString] = """
UPDATE events e
SET json = s.json
FROM pg_temp.events s
WHERE s.event_nid = ANY($1::bigint[]) AND e.event_nid = s.event_nid
"""

# an earlier release redacted refused events, too, and their bytes are censored
SQL_KEEP_REDACTED: Final[LiteralString] = compose(
    """
UPDATE pg_temp.events s
SET :effect.update(e)
FROM events e
WHERE e.event_nid = s.event_nid AND s.room_nid = $2::int AND e.event_nid IN (
    SELECT unnest(ARRAY[target.event_nid, target.redacted_by])
    FROM events target
    JOIN pg_temp.events x USING (event_nid)
    WHERE target.room_nid = $1::int AND NOT target.outlier AND target.encoding = 1
        AND NOT target.redacted_form AND target.redacted_by IS NOT NULL AND x.redacted_by IS NULL
)
""",
    EVENTS.chosen("effect", REDACTION_EFFECTS),
).sql

SQL_HAS_NEW_GAPS: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM pg_temp.missing_events s
    WHERE s.room_nid = $1::int AND NOT EXISTS (
        SELECT FROM missing_events m WHERE m.event_nid = s.event_nid
    )
)
"""

SQL_FORGET_DOUBLED: Final[LiteralString] = """
WITH former AS (
    DELETE FROM reordered_events
    WHERE room_nid = $1::int AND event_nid = ANY($2::bigint[])
)
DELETE FROM outlier_memberships
WHERE event_nid = ANY($2::bigint[])
"""

SQL_NEWLY_ACCEPTED: Final[LiteralString] = """
SELECT s.event_nid
FROM pg_temp.events s
CROSS JOIN LATERAL (
    SELECT rejected, soft_failed FROM events WHERE event_nid = s.event_nid OFFSET 0
) AS e
WHERE s.room_nid = $1::int AND NOT s.outlier AND s.rejected IS NULL AND NOT s.soft_failed
    AND CASE
        WHEN $2::boolean THEN NOT s.backfilled AND (e.rejected IS NOT NULL OR e.soft_failed)
        ELSE e.rejected IS NOT NULL
    END
"""

SQL_DEPENDENT: Final[LiteralString] = compose(
    """
WITH RECURSIVE
edge AS MATERIALIZED (
    SELECT s.event_nid, named.event_nid AS needed_nid
    FROM pg_temp.events s
    CROSS JOIN unnest(:prev_nids.call(s) || :auth_nids.call(s)) AS named (event_nid)
    WHERE s.room_nid = $1::int
),
dependent AS (
    SELECT event_nid FROM unnest($2::bigint[]) AS root (event_nid)
    UNION
    SELECT edge.event_nid FROM dependent d JOIN edge ON edge.needed_nid = d.event_nid
)
SELECT s.event_nid
FROM dependent
JOIN pg_temp.events s USING (event_nid)
WHERE NOT s.outlier
""",
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

TEMPLATE_DROP: Final[LiteralString] = """
DELETE FROM {table} o
WHERE o.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.{table} s WHERE s.room_nid = $2::int AND {same})
"""
"""Delete the rows of a room that the shadow table lacks."""

TEMPLATE_SET: Final[LiteralString] = """
INSERT INTO {table} AS o (room_nid, :row.columns)
SELECT $1::int, :row.columns
FROM pg_temp.{table}
WHERE room_nid = $2::int
ON CONFLICT ({key}) DO UPDATE SET :row.update(EXCLUDED)
    WHERE (:row.others(o)) IS DISTINCT FROM (:row.others(EXCLUDED))
"""
"""Insert the rows of the shadow table, and update those that differ."""

SQL_DROP_DROPPED: Final[LiteralString] = fill(
    TEMPLATE_DROP, table="dropped_extremities", same="s.event_nid = o.event_nid"
)

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

SQL_DROP_CURRENT: Final[LiteralString] = fill(
    TEMPLATE_DROP, table="current_state", same="s.state_key_nid = o.state_key_nid"
)

SQL_SET_CURRENT: Final[LiteralString] = compose(
    fill(TEMPLATE_SET, table="current_state", key="room_nid, state_key_nid"),
    CURRENT_STATE.chosen("row", CURRENT_STATE.but("room_nid")),
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

# an event of another room may have such a position by damage
SQL_FREE_POSITIONS: Final[LiteralString] = """
DELETE FROM auth_chains a
USING pg_temp.auth_chains c, pg_temp.events s
WHERE s.event_nid = c.event_nid AND s.room_nid = $1::int AND c.event_nid <> a.event_nid
    AND c.chain_nid = a.chain_nid AND c.sequence_number = a.sequence_number
"""

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

SQL_DROP_VISIBILITY: Final[LiteralString] = fill(
    TEMPLATE_DROP, table="visibility", same="s.principal_nid = o.principal_nid"
)

SQL_SET_VISIBILITY: Final[LiteralString] = compose(
    fill(TEMPLATE_SET, table="visibility", key="room_nid, principal_nid"),
    VISIBILITY.chosen("row", VISIBILITY.but("room_nid")),
).sql

SQL_DROP_PAST: Final[LiteralString] = fill(
    TEMPLATE_DROP,
    table="past_visibility",
    same="s.principal_nid = o.principal_nid AND s.first_audience = o.first_audience",
)

SQL_SET_PAST: Final[LiteralString] = compose(
    fill(TEMPLATE_SET, table="past_visibility", key="room_nid, principal_nid, first_audience"),
    PAST_VISIBILITY.chosen("row", PAST_VISIBILITY.but("room_nid")),
).sql

SQL_DROP_AUDIENCES: Final[LiteralString] = fill(
    TEMPLATE_DROP, table="audiences", same="s.audience = o.audience"
)

SQL_SET_AUDIENCES: Final[LiteralString] = compose(
    fill(TEMPLATE_SET, table="audiences", key="room_nid, audience"),
    AUDIENCES.chosen("row", AUDIENCES.but("room_nid")),
).sql

EVENT_CACHE: Final = "events"
"""The cache of events (`storage.streams.caches`)."""

OF_LIVE: Final = (SQL_DROP_GAPS, SQL_DROP_WAITING)
OF_SHADOW: Final = (
    SQL_DROP_LINKS,
    SQL_DROP_POSITIONS,
    SQL_FREE_POSITIONS,
    SQL_SET_POSITIONS,
    SQL_SET_LINKS,
)
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


class Differences(NamedTuple):
    """A room in the live tables and in the shadow tables, as ``replay`` has planned it.

    ``has_wrong_deltas``: the changes of the current state are damaged.
    """

    live: RebuiltRoom
    shadow_nid: int
    matching: Matching
    server_name: str
    replay: RoomReplan
    has_wrong_deltas: bool


async def swap(
    conn: Connection, differences: Differences, *, is_completion: bool = False
) -> SwapResult:
    """Make the live tables equal to the shadow tables.

    The transaction must have the lock of the room. ``is_completion``: the caller publishes the
    change of the current state, and only events that become accepted get new positions. Raise
    `StorageCorrupt` if an event of the room was not planned again.
    """
    live, shadow_nid = differences.live, differences.shadow_nid
    room_nid = live.room_nid
    replay = differences.replay
    await _drop_doubled(conn, room_nid, replay.doubled)
    await _keep_columns(conn, differences)
    left_out: list[str] = await conn.fetchvals(SQL_LEFT_OUT, room_nid, shadow_nid)
    if left_out:
        raise StorageCorrupt("events of the room could not be planned again", event_ids=left_out)
    accepted = await _newly_accepted(conn, shadow_nid, is_completion=is_completion)
    if accepted:
        moved = accepted if is_completion else await _dependent(conn, shadow_nid, accepted)
        await move(conn, room_nid, moved)
    are_new = await _swap_groups(conn, room_nid, shadow_nid, differences.matching)
    events = _count(await conn.execute(SQL_SET_EVENTS, shadow_nid))
    changed = {
        statement: _count(await conn.execute(statement, *numbers))
        for statements, numbers in (
            (OF_LIVE, (room_nid,)),
            (OF_SHADOW, (shadow_nid,)),
            (OF_BOTH, (room_nid, shadow_nid)),
        )
        for statement in statements
    }
    if are_new:
        await conn.execute(SQL_DROP_UNUSED, room_nid)
    await repair_memberships(conn, room_nid, differences.server_name)
    await repair_reorderings(conn, room_nid)
    await repair_time_order(conn, room_nid)
    if is_completion:
        await repair_after_gaps(conn, room_nid)
    elif (
        differences.has_wrong_deltas
        or accepted
        or replay.doubled
        or changed[SQL_DROP_CURRENT]
        or changed[SQL_SET_CURRENT]
    ):
        await repair_deltas(conn, await read_room(conn, live.room_id, differences.server_name))
    await repair_member_positions(conn, room_nid)
    if events or replay.doubled:
        await invalidate_caches(conn, EVENT_CACHE)
    await invalidate_caches(conn)
    return SwapResult(events, sum(changed.values()))


async def _drop_doubled(conn: Connection, room_nid: int, doubled: Collection[int]) -> None:
    if doubled:
        await delete(conn, room_nid, list(doubled), list(doubled))
        await conn.execute(SQL_FORGET_DOUBLED, room_nid, list(doubled))


async def _keep_columns(conn: Connection, differences: Differences) -> None:
    """Keep the columns that cannot be planned again: then the shadow tables have them, too.

    Raise `StorageCorrupt` for an unreadable event that is accepted, while the rules reject it by
    its columns. Raise it also if other events name events that are not stored: as likely as not,
    these are the unreadable ones, and their ids are damaged, too.
    """
    replay, shadow_nid = differences.replay, differences.shadow_nid
    await conn.execute(SQL_KEEP_REDACTED, differences.live.room_nid, shadow_nid)
    if replay.correct_ids:
        await conn.execute(SQL_FREE_IDS, list(replay.correct_ids))
    if replay.renamed:
        await conn.execute(SQL_SET_BYTES, list(replay.renamed))
    if replay.kept_edges:
        await conn.execute(SQL_KEEP_EDGES, list(replay.kept_edges))
    if not replay.unreadable:
        return
    await conn.execute(SQL_KEEP_COLUMNS, list(replay.unreadable))
    for nid in await conn.fetchvals(SQL_REJECTED, list(replay.unreadable)):
        raise replay.unreadable[nid]
    if await conn.fetchval(SQL_HAS_NEW_GAPS, shadow_nid):
        raise next(iter(replay.unreadable.values()))


async def _newly_accepted(
    conn: Connection, shadow_nid: int, *, is_completion: bool = False
) -> list[int]:
    """Return the rejected events of the timeline that the shadow tables have as accepted ones.

    ``is_completion``: the state was partial. Then soft-failed events count, too, and history does
    not. In other rooms soft failure depended on a moment.
    """
    found: list[int] = await conn.fetchvals(SQL_NEWLY_ACCEPTED, shadow_nid, is_completion)
    return found


async def _dependent(conn: Connection, shadow_nid: int, roots: Sequence[int]) -> list[int]:
    """Return these events and those that need them, without outliers."""
    found: list[int] = await conn.fetchvals(SQL_DEPENDENT, shadow_nid, list(roots))
    return found


async def _swap_groups(
    conn: Connection, room_nid: int, shadow_nid: int, matching: Matching
) -> bool:
    """Keep sound states under their numbers; return whether there are new ones.

    If an audience has another number now, every event changes; then all states get new numbers.
    """
    await conn.execute(SQL_SAME_GROUPS, list(matching.same), list(matching.same.values()))
    renumbered: bool = await conn.fetchval(SQL_OTHER_NUMBERS)
    if renumbered:
        await conn.execute(SQL_FORGET_SAME)
    else:
        await conn.execute(SQL_FORGET_PARTLY_SAME, shadow_nid)
    await return_groups(conn, matching.wrong)
    if renumbered or matching.wrong:
        await conn.execute(SQL_DROP_GROUPS, room_nid, renumbered, list(matching.wrong))
    return _count(await conn.execute(SQL_ADD_GROUPS, room_nid, shadow_nid)) > 0


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])
