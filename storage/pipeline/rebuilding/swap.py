"""The switch: what differs between the tables aside and the live ones, into these, in one transaction that holds the room.

Plain names are the live tables here (`Aside.live`), ``$1`` is the room's number there and ``$2`` its number aside. What is told of an event by no
plan stays: its bytes, its position, when and by whom it was received. So does what clients were told: the deltas of the current state, and where
events stood before they moved.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.maintenance.invalidate_caches import invalidate_caches
from storage.maintenance.repair.current import SQL_REPAIR_MEMBERSHIPS
from storage.maintenance.repair.graph import repair_reorderings
from storage.pipeline.rebuilding.arrivals import LiveRoomRow
from storage.pipeline.rebuilding.match import Matching

SQL_SAME_GROUPS: Final[LiteralString] = """
INSERT INTO pg_temp.same_groups (aside, live)
SELECT * FROM unnest($1::bigint[], $2::bigint[])
"""

SQL_OTHER_NUMBERS: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM pg_temp.same_groups same
    JOIN pg_temp.state_groups s ON s.state_group = same.aside
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
WHERE room_nid = $1::int AND ($2::boolean OR path_of(state_group, back) && $3::bigint[])
"""

SQL_ADD_GROUPS: Final[LiteralString] = """
WITH
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
    WHERE NOT EXISTS (SELECT FROM pg_temp.same_groups same WHERE same.aside = u.state_group)
    UNION
    SELECT s.state_group  -- the empty state of a room is always there
    FROM pg_temp.state_groups s
    WHERE s.room_nid = $2::int AND s.entry_count = 0
        AND NOT EXISTS (SELECT FROM state_groups g
            WHERE g.digest = 0 AND g.entry_count = 0 AND g.room_nid = $1::int)
),
needed AS (
    SELECT DISTINCT s.state_group - unnest(s.back) AS state_group
    FROM lacking
    JOIN pg_temp.state_groups s USING (state_group)
)
INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, runs, back,
    key_nids, event_nids, member_key_nids,
    member_event_nids)
SELECT s.state_group, s.digest, s.audience, $1::int, s.entry_count, s.runs, s.back, s.key_nids,
    s.event_nids, s.member_key_nids,
    s.member_event_nids
FROM needed
JOIN pg_temp.state_groups s USING (state_group)
"""

SQL_SET_EVENTS: Final[LiteralString] = """
WITH found AS MATERIALIZED (
    SELECT s.*, COALESCE(b.live, s.state_group_before) AS group_before,
        COALESCE(a.live, s.state_group_after) AS group_after
    FROM pg_temp.events s
    LEFT JOIN pg_temp.same_groups b ON b.aside = s.state_group_before
    LEFT JOIN pg_temp.same_groups a ON a.aside = s.state_group_after
    CROSS JOIN LATERAL (
        SELECT topological_ordering, depth, origin_server_ts, state_group_before, state_group_after,
            audience, redacted_by, relates_to,
            sender_nid, type_nid, state_key_nid, rel_type_nid, membership, soft_failed,
                redacted_form, ineffective, replaces, has_url,
            after_gap, rejected, prev_events, auth_events
        FROM events
        WHERE event_nid = s.event_nid
        OFFSET 0
    ) AS e
    WHERE s.room_nid = $1::int
        AND (
            s.topological_ordering, s.depth, s.origin_server_ts,
                COALESCE(b.live, s.state_group_before), COALESCE(a.live, s.state_group_after),
            s.audience, s.redacted_by, s.relates_to, s.sender_nid, s.type_nid, s.state_key_nid,
                s.rel_type_nid, s.membership, s.soft_failed,
            s.redacted_form, s.ineffective, s.replaces, s.has_url, s.after_gap, s.rejected,
                s.prev_events, s.auth_events
        ) IS DISTINCT FROM (
            e.topological_ordering, e.depth, e.origin_server_ts, e.state_group_before,
                e.state_group_after,
            e.audience, e.redacted_by, e.relates_to, e.sender_nid, e.type_nid, e.state_key_nid,
                e.rel_type_nid, e.membership, e.soft_failed,
            e.redacted_form, e.ineffective, e.replaces, e.has_url, e.after_gap, e.rejected,
                e.prev_events, e.auth_events
        )
)
UPDATE events e
SET topological_ordering = s.topological_ordering,
    depth = s.depth,
    origin_server_ts = s.origin_server_ts,
    state_group_before = s.group_before,
    state_group_after = s.group_after,
    audience = s.audience,
    redacted_by = s.redacted_by,
    relates_to = s.relates_to,
    sender_nid = s.sender_nid,
    type_nid = s.type_nid,
    state_key_nid = s.state_key_nid,
    rel_type_nid = s.rel_type_nid,
    membership = s.membership,
    soft_failed = s.soft_failed,
    redacted_form = s.redacted_form,
    ineffective = s.ineffective,
    replaces = s.replaces,
    has_url = s.has_url,
    after_gap = s.after_gap,
    rejected = s.rejected,
    prev_events = s.prev_events,
    auth_events = s.auth_events
FROM found s
WHERE e.event_nid = s.event_nid
"""

SQL_LEFT_OUT: Final[LiteralString] = """
SELECT e.event_id
FROM events e
WHERE e.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.events s
        WHERE s.event_nid = e.event_nid AND s.room_nid = $2::int AND s.outlier = e.outlier)
LIMIT 10
"""

SQL_SET_ROOM: Final[LiteralString] = """
UPDATE rooms r
SET next_audience = s.next_audience,
    current_state_group = COALESCE(same.live, s.current_state_group),
    last_stream_ordering = (
        SELECT max(e.stream_ordering) FROM events e
            WHERE e.room_nid = $1::int AND NOT e.outlier AND NOT e.backfilled
    ),
    max_topological_ordering = GREATEST(r.max_topological_ordering, s.max_topological_ordering),
    current_audience = s.current_audience,
    joined_count = s.joined_count,
    invited_count = s.invited_count,
    forward_extremities = s.forward_extremities,
    out_of_range = s.out_of_range
FROM pg_temp.rooms s
LEFT JOIN pg_temp.same_groups same ON same.aside = s.current_state_group
WHERE r.room_nid = $1::int AND s.room_nid = $2::int
"""

SQL_DROP_GAPS: Final[LiteralString] = """
DELETE FROM missing_events m
WHERE m.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.missing_events s
        WHERE s.event_nid = m.event_nid AND s.event_id = m.event_id)
"""

SQL_SET_GAPS: Final[LiteralString] = """
INSERT INTO missing_events AS m (event_nid, room_nid, superseded, event_id, child_nids)
SELECT s.event_nid, $1::int, s.superseded, s.event_id, s.child_nids
FROM pg_temp.missing_events s
WHERE s.room_nid = $2::int
ON CONFLICT (event_nid) DO UPDATE SET superseded = EXCLUDED.superseded,
    child_nids = EXCLUDED.child_nids, room_nid = EXCLUDED.room_nid
    WHERE (m.superseded, m.child_nids, m.room_nid) IS DISTINCT FROM (EXCLUDED.superseded,
        EXCLUDED.child_nids, EXCLUDED.room_nid)
"""

SQL_DROP_DROPPED: Final[LiteralString] = """
DELETE FROM dropped_extremities d
WHERE d.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.dropped_extremities s
        WHERE s.room_nid = $2::int AND s.event_nid = d.event_nid)
"""

SQL_SET_DROPPED: Final[LiteralString] = """
INSERT INTO dropped_extremities (event_nid, room_nid)
SELECT event_nid, $1::int
FROM pg_temp.dropped_extremities
WHERE room_nid = $2::int
ON CONFLICT DO NOTHING
"""

SQL_DROP_WAITING: Final[LiteralString] = """
DELETE FROM waiting_redactions w
WHERE w.room_nid = $1::int
"""

SQL_SET_WAITING: Final[LiteralString] = """
INSERT INTO waiting_redactions (redaction_nid, room_nid, target_event_id)
SELECT redaction_nid, $1::int, target_event_id
FROM pg_temp.waiting_redactions
WHERE room_nid = $2::int
"""

SQL_DROP_CURRENT: Final[LiteralString] = """
DELETE FROM current_state c
WHERE c.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.current_state s
        WHERE s.room_nid = $2::int AND s.state_key_nid = c.state_key_nid)
"""

SQL_SET_CURRENT: Final[LiteralString] = """
INSERT INTO current_state AS c (event_nid, room_nid, state_key_nid, membership)
SELECT event_nid, $1::int, state_key_nid, membership
FROM pg_temp.current_state
WHERE room_nid = $2::int
ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid,
    membership = EXCLUDED.membership
    WHERE (c.event_nid, c.membership) IS DISTINCT FROM (EXCLUDED.event_nid, EXCLUDED.membership)
"""

SQL_DROP_LINKS: Final[LiteralString] = """
DELETE FROM auth_chain_links l
USING (
    SELECT DISTINCT a.chain_nid
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

SQL_DROP_PLACES: Final[LiteralString] = """
DELETE FROM auth_chains a
USING pg_temp.events s
WHERE a.event_nid = s.event_nid AND s.room_nid = $1::int
    AND NOT EXISTS (
        SELECT
        FROM pg_temp.auth_chains c
        WHERE c.event_nid = a.event_nid AND c.chain_nid = a.chain_nid
            AND c.sequence_number = a.sequence_number
            AND c.event_id = a.event_id AND c.state_key = a.state_key
    )
"""

SQL_SET_PLACES: Final[LiteralString] = """
INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key)
SELECT c.event_nid, c.chain_nid, c.sequence_number, c.event_id, c.state_key
FROM pg_temp.auth_chains c
JOIN pg_temp.events s ON s.event_nid = c.event_nid
WHERE s.room_nid = $1::int
ON CONFLICT (event_nid) DO NOTHING
"""

SQL_SET_LINKS: Final[LiteralString] = """
INSERT INTO auth_chain_links (chain_nid, target_chain_nid, sequence_number, target_sequence_number)
SELECT l.chain_nid, l.target_chain_nid, l.sequence_number, l.target_sequence_number
FROM (
    SELECT DISTINCT c.chain_nid
    FROM pg_temp.auth_chains c
    JOIN pg_temp.events s ON s.event_nid = c.event_nid
    WHERE s.room_nid = $1::int
) AS own
JOIN pg_temp.auth_chain_links l ON l.chain_nid = own.chain_nid
ON CONFLICT (chain_nid, sequence_number, target_chain_nid)
    DO UPDATE SET target_sequence_number = EXCLUDED.target_sequence_number
    WHERE auth_chain_links.target_sequence_number <> EXCLUDED.target_sequence_number
"""

SQL_DROP_SIGHT: Final[LiteralString] = """
DELETE FROM visibility v
WHERE v.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.visibility s
        WHERE s.room_nid = $2::int AND s.principal_nid = v.principal_nid)
"""

SQL_SET_SIGHT: Final[LiteralString] = """
INSERT INTO visibility AS v (last_join_topological, room_nid, principal_nid, joined_count,
    invited_count, audiences, invited_audiences,
    first_audience)
SELECT last_join_topological, $1::int, principal_nid, joined_count, invited_count, audiences,
    invited_audiences, first_audience
FROM pg_temp.visibility
WHERE room_nid = $2::int
ON CONFLICT (room_nid, principal_nid) DO UPDATE
    SET last_join_topological = EXCLUDED.last_join_topological,
        joined_count = EXCLUDED.joined_count,
        invited_count = EXCLUDED.invited_count,
        audiences = EXCLUDED.audiences,
        invited_audiences = EXCLUDED.invited_audiences,
        first_audience = EXCLUDED.first_audience
    WHERE (v.last_join_topological, v.joined_count, v.invited_count, v.audiences,
        v.invited_audiences, v.first_audience)
        IS DISTINCT FROM (EXCLUDED.last_join_topological, EXCLUDED.joined_count,
            EXCLUDED.invited_count, EXCLUDED.audiences,
            EXCLUDED.invited_audiences, EXCLUDED.first_audience)
"""

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

SQL_SET_PAST: Final[LiteralString] = """
INSERT INTO past_visibility AS v (first_audience, opened_topological, room_nid, principal_nid,
    audiences, invited_audiences, topological_ranges)
SELECT first_audience, opened_topological, $1::int, principal_nid, audiences, invited_audiences,
    topological_ranges
FROM pg_temp.past_visibility
WHERE room_nid = $2::int
ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE
    SET opened_topological = EXCLUDED.opened_topological,
        audiences = EXCLUDED.audiences,
        invited_audiences = EXCLUDED.invited_audiences,
        topological_ranges = EXCLUDED.topological_ranges
    WHERE (v.opened_topological, v.audiences, v.invited_audiences, v.topological_ranges)
        IS DISTINCT FROM (EXCLUDED.opened_topological, EXCLUDED.audiences,
            EXCLUDED.invited_audiences, EXCLUDED.topological_ranges)
"""

SQL_DROP_AUDIENCES: Final[LiteralString] = """
DELETE FROM audiences a
WHERE a.room_nid = $1::int
    AND NOT EXISTS (SELECT FROM pg_temp.audiences s
        WHERE s.room_nid = $2::int AND s.audience = a.audience)
"""

SQL_SET_AUDIENCES: Final[LiteralString] = """
INSERT INTO audiences AS a (audience, opened_topological, room_nid, branches, continued)
SELECT audience, opened_topological, $1::int, branches, continued
FROM pg_temp.audiences
WHERE room_nid = $2::int
ON CONFLICT (room_nid, audience) DO UPDATE
    SET opened_topological = EXCLUDED.opened_topological, branches = EXCLUDED.branches,
        continued = EXCLUDED.continued
    WHERE (a.opened_topological, a.branches,
        a.continued) IS DISTINCT FROM (EXCLUDED.opened_topological, EXCLUDED.branches,
            EXCLUDED.continued)
"""

EVENTS: Final = "events"
"""The cache of events (`storage.streams.caches`)."""

OF_LIVE: Final = (SQL_DROP_GAPS, SQL_DROP_WAITING)
OF_ASIDE: Final = (SQL_DROP_LINKS, SQL_DROP_PLACES, SQL_SET_PLACES, SQL_SET_LINKS)
OF_BOTH: Final = (
    SQL_SET_ROOM,
    SQL_SET_GAPS,
    SQL_DROP_DROPPED,
    SQL_SET_DROPPED,
    SQL_SET_WAITING,
    SQL_DROP_CURRENT,
    SQL_SET_CURRENT,
    SQL_DROP_SIGHT,
    SQL_SET_SIGHT,
    SQL_DROP_PAST,
    SQL_SET_PAST,
    SQL_DROP_AUDIENCES,
    SQL_SET_AUDIENCES,
)
"""What takes the number of the live room, that aside, or both, in the order in which they are to be done."""


class SwapResult(NamedTuple):
    """How many rows differed."""

    events: int
    others: int


async def swap(
    conn: Connection, live: LiveRoomRow, aside_nid: int, matching: Matching, server_name: str
) -> SwapResult:
    """Have the live tables say what those aside say.

    In a transaction that holds the room, the last thing in it.

    `StorageCorrupt` if an event of the room was not planned anew.
    """
    left_out: list[str] = await conn.fetchvals(SQL_LEFT_OUT, live.room_nid, aside_nid)
    if left_out:
        raise StorageCorrupt("events of the room could not be planned anew", event_ids=left_out)
    await _switch_groups(conn, live.room_nid, aside_nid, matching)
    events = _count(await conn.execute(SQL_SET_EVENTS, aside_nid))
    others = 0
    for statements, numbers in (
        (OF_LIVE, (live.room_nid,)),
        (OF_ASIDE, (aside_nid,)),
        (OF_BOTH, (live.room_nid, aside_nid)),
    ):
        for statement in statements:
            others += _count(await conn.execute(statement, *numbers))
    await conn.execute(SQL_REPAIR_MEMBERSHIPS, live.room_nid, server_name)
    await repair_reorderings(conn, live.room_nid)
    if events:
        await invalidate_caches(conn, EVENTS)
    await invalidate_caches(conn)
    return SwapResult(events, others)


async def _switch_groups(
    conn: Connection, room_nid: int, aside_nid: int, matching: Matching
) -> None:
    """States that are sound stay under their numbers; if their audiences have others now, so that all events change, none does."""
    await conn.execute(SQL_SAME_GROUPS, list(matching.same), list(matching.same.values()))
    renumbered: bool = await conn.fetchval(SQL_OTHER_NUMBERS)
    if renumbered:
        await conn.execute(SQL_FORGET_SAME)
    if renumbered or matching.wrong:
        await conn.execute(SQL_DROP_GROUPS, room_nid, renumbered, list(matching.wrong))
    await conn.execute(SQL_ADD_GROUPS, room_nid, aside_nid)


def _count(tag: str) -> int:
    return int(tag.rpartition(" ")[2])
