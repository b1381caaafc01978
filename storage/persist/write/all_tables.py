"""The write: one statement that applies a whole change set, or nothing of it.

It takes the rooms' locks in a fixed order, compares and sets their write versions, gives the
timeline events their positions, inserts and changes rows, and moves this writer's positions. If a
room was written to since the change set was planned, or an event that was taken for new is known
under another nid, it ends with `StalePlan` and changes nothing.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

import orjson

from storage.database.array_text import array_text, column_texts, int_array
from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER
from storage.persist.model.change_set import ChangeSet, RoomChanges
from storage.persist.model.rows import EventRow, PastRow
from storage.persist.write import messages_only
from storage.persist.write.dependencies import dependencies_of
from storage.persist.write.event_columns import event_columns
from storage.persist.write.invalidations import Invalidation, invalidations
from storage.state.groups import Group
from storage.state.rows import row_of
from storage.streams.in_flight import Author
from storage.visibility import multirange

SQL_WRITE: Final[LiteralString] = """
WITH
locked AS MATERIALIZED (  -- in a fixed order, so that two writers never wait for each other
    SELECT room_nid, pg_advisory_xact_lock(1919905645, room_nid)
    FROM (SELECT unnest($1::text::int[]) AS room_nid ORDER BY 1) AS ordered
),
positioned AS MATERIALIZED (  -- after the locks, as late as can be
    SELECT input.event_nid, input.room_nid, input.backfilled,
        nextval('events_stream') AS stream_ordering
    FROM (
        SELECT event_nid, room_nid, backfilled
        FROM unnest($2::text::bigint[], $3::text::int[],
            $4::text::boolean[]) WITH ORDINALITY AS i (event_nid, room_nid, backfilled,
            ordinal)
        WHERE (SELECT count(*) FROM locked) >= 0
        ORDER BY ordinal
    ) AS input
),
counted AS (  -- how the members of the current states change in number
    SELECT i.room_nid,
        (count(*) FILTER (WHERE i.membership = 5) - count(*)
            FILTER (WHERE c.membership = 5))::int AS joined,
        (count(*) FILTER (WHERE i.membership = 4) - count(*)
            FILTER (WHERE c.membership = 4))::int AS invited
    FROM (
        SELECT * FROM unnest($76::text::int[], $77::text::int[],
            $79::text::smallint[]) AS i (room_nid, state_key_nid, membership)
        UNION ALL
        SELECT i.*, NULL FROM unnest($80::text::int[], $81::text::int[]) AS i (room_nid,
            state_key_nid)
    ) AS i
    LEFT JOIN current_state c USING (room_nid, state_key_nid)
    GROUP BY i.room_nid
),
new_room AS (
    INSERT INTO rooms (room_nid, room_id, room_version, write_version, next_audience,
        current_state_group,
        last_stream_ordering, max_topological_ordering, forward_extremities, current_audience,
            out_of_range, joined_count, invited_count)
    SELECT i.room_nid, i.room_id, i.room_version, 1, i.next_audience, i.current_state_group,
        (SELECT max(p.stream_ordering) FROM positioned p
            WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
        i.max_topological_ordering, i.extremities::bigint[], i.current_audience,
            i.out_of_range::int8multirange,
        COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0)
    FROM unnest($5::text::int[], $6::text::text[], $7::text::text[], $8::text::bigint[],
        $9::text::bigint[], $10::text::bigint[],
        $11::text::text[], $116::text::bigint[], $117::text::text[])
        AS i (room_nid, room_id, room_version, next_audience, current_state_group,
            max_topological_ordering, extremities,
            current_audience, out_of_range)
    RETURNING room_nid
),
old_room AS (  -- the compare-and-set
    UPDATE rooms r
    SET write_version = r.write_version + 1,
        next_audience = i.next_audience,
        current_state_group = i.current_state_group,
        last_stream_ordering = COALESCE(
            (SELECT max(p.stream_ordering) FROM positioned p
                WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
            r.last_stream_ordering
        ),
        max_topological_ordering = i.max_topological_ordering,
        forward_extremities = i.extremities::bigint[],
        current_audience = i.current_audience,
        out_of_range = i.out_of_range::int8multirange,
        joined_count = r.joined_count + COALESCE((SELECT c.joined FROM counted c
            WHERE c.room_nid = i.room_nid), 0),
        invited_count = r.invited_count + COALESCE((SELECT c.invited FROM counted c
            WHERE c.room_nid = i.room_nid), 0),
        moves = r.moves + (i.room_nid = ANY($137::text::int[]))::int
    FROM unnest($12::text::int[], $13::text::bigint[], $14::text::bigint[], $15::text::bigint[],
        $16::text::bigint[], $17::text::text[],
        $118::text::bigint[], $119::text::text[], $140::text::bigint[])
            AS i (room_nid, write_version, next_audience, current_state_group,
                max_topological_ordering, extremities,
                current_audience, out_of_range, removals)
        JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid, r.moves, r.removals <> i.removals AS has_lost
),
moved_event AS (
    INSERT INTO reordered_events (room_nid, moves, event_nid, topological_before)
    SELECT i.room_nid, r.moves, i.event_nid, i.topological_before
    FROM unnest($137::text::int[], $138::text::bigint[], $139::text::bigint[]) AS i (room_nid,
        event_nid, topological_before)
        JOIN old_room r USING (room_nid)
),
new_type AS (
    INSERT INTO event_types (type_nid, type)
    SELECT * FROM unnest($18::text::int[], $19::text::text[])
),
new_state_key AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT * FROM unnest($20::text::int[], $21::text::int[], $22::text::text[])
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT * FROM unnest($23::text::int[], $24::text::text[])
),
new_event AS (
    INSERT INTO events (event_nid, stream_ordering, topological_ordering, depth, origin_server_ts,
        received_ts,
        state_group_before, state_group_after, audience, redacted_by, room_nid, sender_nid,
            type_nid, state_key_nid,
        encoding, writer_nid, membership, outlier, backfilled, soft_failed, redacted_form, event_id,
            rejected, prev_events, auth_events,
            json,
        ineffective, relates_to, rel_type_nid, replaces, has_url, after_gap)
    SELECT i.event_nid, p.stream_ordering, i.topological_ordering, i.depth, i.origin_server_ts,
        $25::bigint,
        i.state_group_before, i.state_group_after, i.audience, i.redacted_by, i.room_nid,
            i.sender_nid, i.type_nid, i.state_key_nid,
        0, $115::smallint, i.membership, i.outlier, i.backfilled, i.soft_failed, i.redacted_form,
            i.event_id, i.rejected,
        i.prev_events::bigint[], i.auth_events::bigint[], i.json, i.ineffective, i.relates_to,
            i.rel_type_nid, i.replaces, i.has_url,
            i.after_gap
    FROM unnest($26::text::bigint[], $27::text::bigint[], $28::text::bigint[], $29::text::bigint[],
        $30::text::bigint[],
        $31::text::bigint[], $32::text::bigint[], $33::text::bigint[],
            $34::text::int[], $35::text::int[], $36::text::int[], $37::text::int[],
                $38::text::smallint[], $39::text::boolean[],
            $40::text::boolean[], $41::text::boolean[],
            $42::text::boolean[], $43::text::text[], $44::text::text[], $45::text::text[],
                $46::text::text[], $47::bytea[],
            $123::text::boolean[],
            $128::text::bigint[], $129::text::int[], $130::text::boolean[], $134::text::boolean[],
                $135::text::boolean[])
            AS i (event_nid, topological_ordering, depth, origin_server_ts, state_group_before,
                state_group_after, audience, redacted_by,
                room_nid, sender_nid, type_nid, state_key_nid, membership, outlier, backfilled,
                    soft_failed,
                redacted_form, event_id, rejected, prev_events, auth_events, json, ineffective,
                    relates_to, rel_type_nid, replaces,
                has_url, after_gap)
        LEFT JOIN positioned p USING (event_nid)
),
changed_event AS (
    UPDATE events e
    SET stream_ordering = COALESCE(p.stream_ordering, e.stream_ordering),
        writer_nid = CASE WHEN p.stream_ordering IS NULL THEN e.writer_nid ELSE $115::smallint END,
        topological_ordering = i.topological_ordering,
        state_group_before = i.state_group_before,
        state_group_after = i.state_group_after,
        audience = i.audience,
        redacted_by = i.redacted_by,
        outlier = i.outlier,
        backfilled = i.backfilled,
        soft_failed = i.soft_failed,
        rejected = i.rejected,
        ineffective = i.ineffective,
        prev_events = i.prev_events::bigint[],
        after_gap = COALESCE(i.after_gap, e.after_gap),
        auth_events = COALESCE(i.auth_events::bigint[], e.auth_events)
    FROM unnest($48::text::bigint[], $49::text::bigint[], $50::text::bigint[], $51::text::bigint[],
        $52::text::bigint[],
        $53::text::bigint[],
            $54::text::boolean[], $55::text::boolean[], $56::text::boolean[], $57::text::text[],
                $58::text::text[], $124::text::boolean[],
            $136::text::boolean[], $152::text::text[])
            AS i (event_nid, topological_ordering, state_group_before, state_group_after, audience,
                redacted_by,
                outlier, backfilled, soft_failed, rejected, prev_events, ineffective, after_gap,
                    auth_events)
        LEFT JOIN positioned p USING (event_nid)
    WHERE e.event_nid = i.event_nid
),
new_gap AS (
    INSERT INTO missing_events (event_nid, event_id, room_nid, superseded, child_nids)
    SELECT i.event_nid, i.event_id, i.room_nid, i.superseded, i.child_nids::bigint[]
    FROM unnest($59::text::bigint[], $60::text::text[], $61::text::int[], $62::text::boolean[],
        $63::text::text[]) AS i (event_nid,
        event_id, room_nid, superseded, child_nids)
    ON CONFLICT (event_nid) DO UPDATE SET superseded = EXCLUDED.superseded,
        child_nids = EXCLUDED.child_nids
),
filled_gap AS (
    DELETE FROM missing_events
    WHERE event_id = ANY($64::text::text[])
    RETURNING event_nid
),
new_group AS (
    INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, runs, back,
        key_nids, event_nids, member_key_nids, member_event_nids)
    SELECT i.state_group, i.digest, i.audience, i.room_nid, i.entry_count, i.runs, i.back::int[],
        i.key_nids::int[], i.event_nids::bigint[], i.member_key_nids::int[],
            i.member_event_nids::bigint[]
    FROM unnest($65::text::bigint[], $66::text::bigint[], $67::text::bigint[], $68::text::int[],
        $69::text::int[], $70::text::int[],
        $71::text::text[],
            $72::text::text[], $73::text::text[], $74::text::text[], $75::text::text[])
        AS i (state_group, digest, audience, room_nid, entry_count, runs, back, key_nids,
            event_nids, member_key_nids, member_event_nids)
),
set_state AS (
    INSERT INTO current_state (room_nid, state_key_nid, event_nid, membership)
    SELECT * FROM unnest($76::text::int[], $77::text::int[], $78::text::bigint[],
        $79::text::smallint[])
    ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid,
        membership = EXCLUDED.membership
),
removed_state AS (
    DELETE FROM current_state c
    USING unnest($80::text::int[], $81::text::int[]) AS i (room_nid, state_key_nid)
    WHERE c.room_nid = i.room_nid AND c.state_key_nid = i.state_key_nid
),
new_delta AS (
    INSERT INTO state_deltas (room_nid, stream_ordering, state_key_nid, event_nid, prev_event_nid,
        writer_nid)
    SELECT i.room_nid, p.stream_ordering, i.state_key_nid, i.event_nid, i.prev_event_nid,
        $115::smallint
    FROM unnest($82::text::int[], $83::text::bigint[], $84::text::int[], $85::text::bigint[],
        $86::text::bigint[])
            AS i (room_nid, cause_nid, state_key_nid, event_nid, prev_event_nid)
        JOIN positioned p ON p.event_nid = i.cause_nid
),
out_of_band AS (
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT nextval('events_stream'), i.event_nid, $115::smallint
    FROM unnest($87::text::int[], $88::text::int[], $89::text::smallint[], $90::text::bigint[],
        $91::text::bigint[])
            AS i (principal_nid, room_nid, membership, event_nid, cause_nid)
    WHERE i.cause_nid IS NULL
    RETURNING stream_id, event_nid
),
set_membership AS (
    INSERT INTO memberships (principal_nid, room_nid, membership, event_nid, stream_ordering,
        writer_nid)
    SELECT i.principal_nid, i.room_nid, i.membership, i.event_nid,
        COALESCE(p.stream_ordering, o.stream_id), $115::smallint
    FROM unnest($87::text::int[], $88::text::int[], $89::text::smallint[], $90::text::bigint[],
        $91::text::bigint[])
            AS i (principal_nid, room_nid, membership, event_nid, cause_nid)
        LEFT JOIN positioned p ON p.event_nid = i.cause_nid
        LEFT JOIN out_of_band o ON o.event_nid = i.event_nid AND i.cause_nid IS NULL
    ON CONFLICT (principal_nid, room_nid) DO UPDATE
        SET membership = EXCLUDED.membership,
            event_nid = EXCLUDED.event_nid,
            stream_ordering = EXCLUDED.stream_ordering,
            writer_nid = EXCLUDED.writer_nid
),
set_out_of_band AS (
    INSERT INTO out_of_band_memberships (room_nid, principal_nid, event_nid, stripped_state)
    SELECT i.room_nid, i.principal_nid, i.event_nid, i.stripped_state
    FROM unnest($87::text::int[], $88::text::int[], $90::text::bigint[], $91::text::bigint[],
        $153::text::text[])
            AS i (principal_nid, room_nid, event_nid, cause_nid, stripped_state)
    WHERE i.cause_nid IS NULL
    ON CONFLICT (room_nid, principal_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid,
        stripped_state = EXCLUDED.stripped_state
),
overruled AS (
    DELETE FROM out_of_band_memberships o
    USING unnest($87::text::int[], $88::text::int[], $91::text::bigint[]) AS i (principal_nid,
        room_nid, cause_nid)
    WHERE o.room_nid = i.room_nid AND o.principal_nid = i.principal_nid AND i.cause_nid IS NOT NULL
),
set_visibility AS (
    INSERT INTO visibility (room_nid, principal_nid, audiences, last_join_topological, joined_count,
        invited_count, invited_audiences,
        first_audience)
    SELECT i.room_nid, i.principal_nid, i.audiences::int8multirange, i.last_join_topological,
        i.joined_count, i.invited_count,
        NULLIF(i.invited_audiences::int8multirange, '{}'), i.first_audience
    FROM unnest($92::text::int[], $93::text::int[], $94::text::text[], $95::text::bigint[],
        $96::text::int[], $97::text::int[],
        $127::text::text[], $144::text::bigint[])
        AS i (room_nid, principal_nid, audiences, last_join_topological, joined_count,
            invited_count, invited_audiences, first_audience)
    ON CONFLICT (room_nid, principal_nid) DO UPDATE
        SET audiences = EXCLUDED.audiences,
            last_join_topological = EXCLUDED.last_join_topological,
            joined_count = EXCLUDED.joined_count,
            invited_count = EXCLUDED.invited_count,
            invited_audiences = EXCLUDED.invited_audiences,
            first_audience = EXCLUDED.first_audience
),
set_past AS (
    INSERT INTO past_visibility (room_nid, principal_nid, first_audience, opened_topological,
        audiences, invited_audiences, topological_ranges)
    SELECT i.room_nid, i.principal_nid, i.first_audience, i.opened_topological,
        i.audiences::int8multirange,
        NULLIF(i.invited_audiences::int8multirange, '{}'), i.topological_ranges::int8multirange
    FROM unnest($145::text::int[], $146::text::int[], $147::text::bigint[], $148::text::bigint[],
        $149::text::text[], $150::text::text[],
        $151::text::text[])
        AS i (room_nid, principal_nid, first_audience, opened_topological, audiences,
            invited_audiences, topological_ranges)
    ON CONFLICT (room_nid, principal_nid, first_audience) DO UPDATE
        SET audiences = EXCLUDED.audiences,
            invited_audiences = EXCLUDED.invited_audiences,
            topological_ranges = EXCLUDED.topological_ranges
),
set_audience AS (
    INSERT INTO audiences (room_nid, audience, branches, continued, opened_topological)
    SELECT * FROM unnest($98::text::int[], $99::text::bigint[], $100::text::int[],
        $101::text::boolean[], $120::text::bigint[])
    ON CONFLICT (room_nid, audience) DO UPDATE SET branches = EXCLUDED.branches,
        continued = EXCLUDED.continued
),
new_waiting AS (
    INSERT INTO waiting_redactions (redaction_nid, room_nid, target_event_id)
    SELECT * FROM unnest($102::text::bigint[], $103::text::int[], $104::text::text[])
),
settled AS (
    DELETE FROM waiting_redactions
    WHERE target_event_id = ANY($64::text::text[])
    RETURNING redaction_nid
),
new_place AS (
    INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key)
    SELECT * FROM unnest($108::text::bigint[], $109::text::bigint[], $110::text::int[],
        $132::text::text[], $133::text::text[])
),
new_link AS (
    INSERT INTO auth_chain_links (chain_nid, sequence_number, target_chain_nid,
        target_sequence_number)
    SELECT * FROM unnest($111::text::bigint[], $112::text::int[], $113::text::bigint[],
        $114::text::int[])
),
dropped_extremity AS (
    INSERT INTO dropped_extremities (event_nid, room_nid)
    SELECT * FROM unnest($125::text::bigint[], $126::text::int[])
),
new_invalidation AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), $25::bigint, $115::smallint, i.cache_name,
        ARRAY(SELECT jsonb_array_elements_text(i.keys::jsonb))
    FROM unnest($121::text::text[], $122::text::text[]) AS i (cache_name, keys)
    RETURNING stream_id
),
latest AS (  -- the positions this write takes, per stream
    SELECT CASE WHEN backfilled THEN 'backfill' ELSE 'events' END AS stream_name,
        max(stream_ordering) AS stream_id
    FROM positioned
    GROUP BY 1
    UNION ALL
    SELECT 'events', max(stream_id) FROM out_of_band HAVING count(*) > 0
    UNION ALL
    SELECT 'caches', max(stream_id) FROM new_invalidation HAVING count(*) > 0
),
set_position AS (
    INSERT INTO stream_positions (stream_name, instance_name, stream_id)
    SELECT stream_name, $105::text, max(stream_id) FROM latest GROUP BY 1
    ON CONFLICT (stream_name, instance_name)
        DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
    WHERE stream_positions.epoch = $131::int
    RETURNING stream_name
)
SELECT p.event_nid, p.stream_ordering, 0 AS writers, NULL::bigint AS stale
FROM positioned p
UNION ALL
SELECT o.event_nid, o.stream_id, 0, NULL
FROM out_of_band o
UNION ALL
SELECT -1, n.stream_id, 0, NULL
FROM new_invalidation n
UNION ALL
SELECT 0, 0, (SELECT count(*)::int FROM stream_positions WHERE stream_name = 'events'), CASE
        WHEN (SELECT count(*)
            FROM old_room) <> cardinality($12::text::int[]) THEN refuse_stale_plan('rooms')
        WHEN EXISTS (SELECT FROM old_room WHERE has_lost) AND dependencies_purged(
            $141::text::bigint[], $142::text::bigint[], $143::text::bigint[],
            $64::text::text[] || $43::text::text[], $2::text::bigint[] || $26::text::bigint[],
                $107::text::bigint[]
        ) THEN refuse_stale_plan('removals')
        WHEN EXISTS (SELECT event_nid
            FROM filled_gap EXCEPT SELECT unnest($106::text::bigint[]))
                THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (SELECT redaction_nid
            FROM settled EXCEPT SELECT unnest($107::text::bigint[])) THEN
            refuse_stale_plan('waiting_redactions')
        WHEN EXISTS (SELECT stream_name FROM latest EXCEPT SELECT stream_name
            FROM set_position) THEN refuse_old_writer($105::text)
    END
"""


class TakenPositionRow(NamedTuple):
    """The position that an event took; nid 0 where it says only how many ``writers`` there are (else 0 stands there), -1: an invalidation."""

    event_nid: int
    stream_ordering: int
    writers: int
    stale: int | None


class WriteResult(NamedTuple):
    """The position of each event that took one, by nid (that of an outlier is of its membership).

    ``writers``: how many there are; ``invalidations``: the facts of the stream "caches", with their
    positions.
    """

    positions: dict[int, int]
    writers: int
    invalidations: Sequence[tuple[int, list[object]]] = ()


async def write(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    """Apply the change set."""
    if messages_only.has_messages_only(change_set):
        plain = await conn.fetch(
            messages_only.SQL_WRITE_PLAIN,
            *messages_only.arguments(change_set, author, received_ts),
            row=TakenPositionRow,
        )
        return WriteResult({row.event_nid: row.stream_ordering for row in plain}, plain[0].writers)
    return await _write_whole(conn, change_set, author, received_ts)


async def write_around(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    """Apply the change set but for the rows of its new events: the caller inserts them in the same transaction, at the positions given here.

    For rooms that begin in this transaction: what moves in it was never seen elsewhere, so there is nothing to remember of it.
    """
    new_events, change_set.new_events = change_set.new_events, {}
    change_set.moved.clear()
    try:
        return await _write_whole(conn, change_set, author, received_ts)
    finally:
        change_set.new_events = new_events


async def _write_whole(
    conn: Connection, change_set: ChangeSet, author: Author, received_ts: int
) -> WriteResult:
    invalidated = invalidations(change_set)
    rows = await conn.fetch(
        SQL_WRITE, *arguments(change_set, author, received_ts, invalidated), row=TakenPositionRow
    )
    positions = {row.event_nid: row.stream_ordering for row in rows if row.event_nid > 0}
    ids = sorted(row.stream_ordering for row in rows if row.event_nid < 0)
    told = [
        (stream_id, [one.cache_name, list(one.keys), received_ts])
        for stream_id, one in zip(ids, invalidated, strict=True)
    ]
    return WriteResult(positions, max(row.writers for row in rows), told)


def arguments(
    change_set: ChangeSet, author: Author, received_ts: int, invalidated: Sequence[Invalidation]
) -> list[object]:
    """The parameters of the statement, in order."""
    changed = [room for room in change_set.room_changes.values() if room.changed]
    placed = [change_set.row_of(nid) for nid in change_set.placed]
    return [
        array_text([room.row.room_nid for room in changed]),
        *column_texts(((row.event_nid, row.room_nid, row.backfilled) for row in placed), 3),
        *column_texts((_new_room(room) for room in changed if not room.row.write_version), 7),
        *column_texts((_old_room(room) for room in changed if room.row.write_version), 6),
        *column_texts(((nid, name) for name, nid in change_set.new_types.items()), 2),
        *column_texts(((nid, *key) for key, nid in change_set.new_state_keys.items()), 3),
        *column_texts(((nid, name) for name, nid in change_set.new_principals.items()), 2),
        received_ts,
        *_new_events(change_set),
        *column_texts(map(_changed_event, change_set.changed_events.values()), 11),
        *column_texts(
            ((*gap[:4], int_array(gap.child_nids)) for gap in change_set.new_missing.values()), 5
        ),
        array_text([row.event_id for row in placed]),
        *column_texts(
            (_new_group(change_set, group) for group in change_set.new_groups.values()), 11
        ),
        *column_texts(
            ((*key, *value) for key, value in change_set.current_changes.items() if value[0]), 4
        ),
        *column_texts(
            (key for key, value in change_set.current_changes.items() if not value[0]), 2
        ),
        *column_texts(
            (
                (d.room_nid, d.cause_nid, d.state_key_nid, d.event_nid, d.prev_event_nid)
                for d in change_set.deltas
            ),
            5,
        ),
        *column_texts(change_set.memberships.values(), 5),
        *column_texts(
            (
                (*key, multirange.to_text(row[0]), *row[1:4])
                for key, row in change_set.new_visibility.items()
            ),
            6,
        ),
        *column_texts(
            ((*key, row.branches, row.continued) for key, row in change_set.new_audiences.items()),
            4,
        ),
        *column_texts(((nid, *value) for nid, value in change_set.new_waiting.items()), 3),
        author.instance_name,
        array_text([gap.event_nid for gap in change_set.gone_missing.values()]),
        array_text(list(change_set.gone_waiting)),
        *column_texts(((nid, *entry.place) for nid, entry in change_set.new_places.items()), 3),
        *column_texts(
            (
                (*entry.place, *link)
                for entry in change_set.new_places.values()
                for link in entry.links.items()
            ),
            4,
        ),
        author.writer_nid,
        *column_texts((_sight(room) for room in changed if not room.row.write_version), 2),
        *column_texts((_sight(room) for room in changed if room.row.write_version), 2),
        array_text([row.opened_topological for row in change_set.new_audiences.values()]),
        array_text([one.cache_name for one in invalidated]),
        array_text([orjson.dumps(one.keys).decode() for one in invalidated]),
        array_text([new.row.ineffective for new in change_set.new_events.values()]),
        array_text([row.ineffective for row in change_set.changed_events.values()]),
        *column_texts(change_set.dropped.items(), 2),
        array_text(
            [
                multirange.to_text(row.invited_audiences)
                for row in change_set.new_visibility.values()
            ]
        ),
        *map(array_text, change_set.new_relations),
        author.epoch,
        *column_texts(
            (
                (row.event_id, change_set.state_key_name(row.state_key_nid or 0)[1])
                for row in map(change_set.row_of, change_set.new_places)
            ),
            2,
        ),
        array_text(change_set.new_urls),
        array_text([nid in change_set.after_gaps or None for nid in change_set.new_events]),
        array_text([nid in change_set.after_gaps or None for nid in change_set.changed_events]),
        *column_texts(
            (
                (move.room_nid, nid, move.topological_before)
                for nid, move in change_set.moved.items()
            ),
            3,
        ),
        array_text([room.row.removals for room in changed if room.row.write_version]),
        *map(array_text, dependencies_of(change_set)),
        array_text([row.first_audience for row in change_set.new_visibility.values()]),
        *column_texts((_past_row(key, row) for key, row in change_set.new_past.items()), 7),
        array_text(
            [
                int_array(row.auth_events) if nid in change_set.authorised else None
                for nid, row in change_set.changed_events.items()
            ]
        ),
        array_text([change_set.stripped.get(key) for key in change_set.memberships]),
    ]


def _past_row(key: tuple[int, int, int], row: PastRow) -> tuple[object, ...]:
    return (
        *key,
        row.opened_topological,
        *map(multirange.to_text, (row.audiences, row.invited_audiences, row.topological_ranges)),
    )


def _new_room(room: RoomChanges) -> tuple[object, ...]:
    row = room.row
    extremities = int_array(room.extremities)
    return (
        row.room_nid,
        row.room_id,
        row.room_version,
        room.next_audience,
        room.current,
        room.max_order,
        extremities,
    )


def _old_room(room: RoomChanges) -> tuple[object, ...]:
    row = room.row
    return (
        row.room_nid,
        row.write_version,
        room.next_audience,
        room.current,
        room.max_order,
        int_array(room.extremities),
    )


def _sight(room: RoomChanges) -> tuple[int, str]:
    return room.audience, multirange.to_text(room.out_of_range)


def _new_events(change_set: ChangeSet) -> list[object]:
    new = change_set.new_events.values()
    return [*event_columns([one.row for one in new]), [one.raw for one in new]]


def _changed_event(row: EventRow) -> tuple[object, ...]:
    return (
        row.event_nid,
        row.topological_ordering,
        row.state_group_before,
        row.state_group_after,
        row.audience,
        row.redacted_by,
        row.outlier,
        row.backfilled,
        row.soft_failed,
        row.rejected,
        int_array(row.prev_events),
    )


def _new_group(change_set: ChangeSet, group: Group) -> tuple[object, ...]:
    row = row_of(group, lambda key: change_set.state_key_name(key)[0] == TYPE_MEMBER)
    return (*row[:6], *(None if numbers is None else int_array(numbers) for numbers in row[6:]))
