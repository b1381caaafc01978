"""The write: one statement that applies a whole draft, or nothing of it.

It takes the rooms' locks in a fixed order, compares and sets their write versions, gives the timeline events their positions,
inserts and changes rows, and moves this writer's positions. If a room was written to since the draft was planned, or an event
that was taken for new is known under another nid, it ends with `StalePlan` and changes nothing.
"""

from collections.abc import Sequence
from typing import Final, LiteralString, NamedTuple

import orjson

from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER
from storage.persist import write_plain
from storage.persist.columns import array, columns
from storage.persist.draft import Draft, RoomDraft
from storage.persist.invalidations import Invalidation, invalidations
from storage.persist.rows import EventRow
from storage.state.groups import Group
from storage.state.rows import row_of
from storage.streams.in_flight import Author
from storage.visibility import ranges

SQL_WRITE: Final[LiteralString] = """
WITH
locked AS MATERIALIZED (  -- in a fixed order, so that two writers never wait for each other
    SELECT room_nid, pg_advisory_xact_lock(1919905645, room_nid)
    FROM (SELECT unnest($1::int[]) AS room_nid ORDER BY 1) AS ordered
),
positioned AS MATERIALIZED (  -- after the locks, as late as can be
    SELECT input.event_nid, input.room_nid, input.backfilled, nextval('events_stream') AS stream_ordering
    FROM (
        SELECT event_nid, room_nid, backfilled
        FROM unnest($2::bigint[], $3::int[], $4::boolean[]) WITH ORDINALITY AS i (event_nid, room_nid, backfilled, ordinal)
        WHERE (SELECT count(*) FROM locked) >= 0
        ORDER BY ordinal
    ) AS input
),
counted AS (  -- how the members of the current states change in number
    SELECT i.room_nid,
        (count(*) FILTER (WHERE i.membership = 5) - count(*) FILTER (WHERE c.membership = 5))::int AS joined,
        (count(*) FILTER (WHERE i.membership = 4) - count(*) FILTER (WHERE c.membership = 4))::int AS invited
    FROM (
        SELECT * FROM unnest($76::int[], $77::int[], $79::smallint[]) AS i (room_nid, state_key_nid, membership)
        UNION ALL
        SELECT i.*, NULL FROM unnest($80::int[], $81::int[]) AS i (room_nid, state_key_nid)
    ) AS i
    LEFT JOIN current_state c USING (room_nid, state_key_nid)
    GROUP BY i.room_nid
),
new_room AS (
    INSERT INTO rooms (room_nid, room_id, room_version, write_version, next_audience, current_state_group,
        last_stream_ordering, max_topological_ordering, forward_extremities, current_audience, strays, joined_count, invited_count)
    SELECT i.room_nid, i.room_id, i.room_version, 1, i.next_audience, i.current_state_group,
        (SELECT max(p.stream_ordering) FROM positioned p WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
        i.max_topological_ordering, i.extremities::bigint[], i.current_audience, i.strays::int8multirange,
        COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0)
    FROM unnest($5::int[], $6::text[], $7::text[], $8::bigint[], $9::bigint[], $10::bigint[], $11::text[], $116::bigint[], $117::text[])
        AS i (room_nid, room_id, room_version, next_audience, current_state_group, max_topological_ordering, extremities,
            current_audience, strays)
    RETURNING room_nid
),
old_room AS (  -- the compare-and-set
    UPDATE rooms r
    SET write_version = r.write_version + 1,
        next_audience = i.next_audience,
        current_state_group = i.current_state_group,
        last_stream_ordering = COALESCE(
            (SELECT max(p.stream_ordering) FROM positioned p WHERE p.room_nid = i.room_nid AND NOT p.backfilled),
            r.last_stream_ordering
        ),
        max_topological_ordering = i.max_topological_ordering,
        forward_extremities = i.extremities::bigint[],
        current_audience = i.current_audience,
        strays = i.strays::int8multirange,
        joined_count = r.joined_count + COALESCE((SELECT c.joined FROM counted c WHERE c.room_nid = i.room_nid), 0),
        invited_count = r.invited_count + COALESCE((SELECT c.invited FROM counted c WHERE c.room_nid = i.room_nid), 0)
    FROM unnest($12::int[], $13::bigint[], $14::bigint[], $15::bigint[], $16::bigint[], $17::text[], $118::bigint[], $119::text[])
            AS i (room_nid, write_version, next_audience, current_state_group, max_topological_ordering, extremities,
                current_audience, strays)
        JOIN locked USING (room_nid)
    WHERE r.room_nid = i.room_nid AND r.write_version = i.write_version
    RETURNING r.room_nid
),
new_type AS (
    INSERT INTO event_types (type_nid, type)
    SELECT * FROM unnest($18::int[], $19::text[])
),
new_state_key AS (
    INSERT INTO state_keys (state_key_nid, type_nid, state_key)
    SELECT * FROM unnest($20::int[], $21::int[], $22::text[])
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT * FROM unnest($23::int[], $24::text[])
),
new_event AS (
    INSERT INTO events (event_nid, stream_ordering, topological_ordering, depth, origin_server_ts, received_ts,
        state_group_before, state_group_after, audience, redacted_by, room_nid, sender_nid, type_nid, state_key_nid,
        encoding, writer_nid, membership, outlier, backfilled, soft_failed, redacted_form, event_id, rejected, prev_events, auth_events, json,
        ineffective, relates_to, rel_type_nid, replaces, has_url, after_gap)
    SELECT i.event_nid, p.stream_ordering, i.topological_ordering, i.depth, i.origin_server_ts, $25::bigint,
        i.state_group_before, i.state_group_after, i.audience, i.redacted_by, i.room_nid, i.sender_nid, i.type_nid, i.state_key_nid,
        0, $115::smallint, i.membership, i.outlier, i.backfilled, i.soft_failed, i.redacted_form, i.event_id, i.rejected,
        i.prev_events::bigint[], i.auth_events::bigint[], i.json, i.ineffective, i.relates_to, i.rel_type_nid, i.replaces, i.has_url, i.after_gap
    FROM unnest($26::bigint[], $27::bigint[], $28::bigint[], $29::bigint[], $30::bigint[], $31::bigint[], $32::bigint[], $33::bigint[],
            $34::int[], $35::int[], $36::int[], $37::int[], $38::smallint[], $39::boolean[], $40::boolean[], $41::boolean[],
            $42::boolean[], $43::text[], $44::text[], $45::text[], $46::text[], $47::bytea[], $123::boolean[],
            $128::bigint[], $129::int[], $130::boolean[], $134::boolean[], $135::boolean[])
            AS i (event_nid, topological_ordering, depth, origin_server_ts, state_group_before, state_group_after, audience, redacted_by,
                room_nid, sender_nid, type_nid, state_key_nid, membership, outlier, backfilled, soft_failed,
                redacted_form, event_id, rejected, prev_events, auth_events, json, ineffective, relates_to, rel_type_nid, replaces,
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
        after_gap = COALESCE(i.after_gap, e.after_gap)
    FROM unnest($48::bigint[], $49::bigint[], $50::bigint[], $51::bigint[], $52::bigint[], $53::bigint[],
            $54::boolean[], $55::boolean[], $56::boolean[], $57::text[], $58::text[], $124::boolean[], $136::boolean[])
            AS i (event_nid, topological_ordering, state_group_before, state_group_after, audience, redacted_by,
                outlier, backfilled, soft_failed, rejected, prev_events, ineffective, after_gap)
        LEFT JOIN positioned p USING (event_nid)
    WHERE e.event_nid = i.event_nid
),
new_gap AS (
    INSERT INTO missing_events (event_nid, event_id, room_nid, covered, child_nids)
    SELECT i.event_nid, i.event_id, i.room_nid, i.covered, i.child_nids::bigint[]
    FROM unnest($59::bigint[], $60::text[], $61::int[], $62::boolean[], $63::text[]) AS i (event_nid, event_id, room_nid, covered, child_nids)
    ON CONFLICT (event_nid) DO UPDATE SET covered = EXCLUDED.covered, child_nids = EXCLUDED.child_nids
),
filled_gap AS (
    DELETE FROM missing_events
    WHERE event_id = ANY($64::text[])
    RETURNING event_nid
),
new_group AS (
    INSERT INTO state_groups (state_group, digest, audience, room_nid, entry_count, runs, back,
        key_nids, event_nids, member_key_nids, member_event_nids)
    SELECT i.state_group, i.digest, i.audience, i.room_nid, i.entry_count, i.runs, i.back::int[],
        i.key_nids::int[], i.event_nids::bigint[], i.member_key_nids::int[], i.member_event_nids::bigint[]
    FROM unnest($65::bigint[], $66::bigint[], $67::bigint[], $68::int[], $69::int[], $70::int[], $71::text[],
            $72::text[], $73::text[], $74::text[], $75::text[])
        AS i (state_group, digest, audience, room_nid, entry_count, runs, back, key_nids, event_nids, member_key_nids, member_event_nids)
),
set_state AS (
    INSERT INTO current_state (room_nid, state_key_nid, event_nid, membership)
    SELECT * FROM unnest($76::int[], $77::int[], $78::bigint[], $79::smallint[])
    ON CONFLICT (room_nid, state_key_nid) DO UPDATE SET event_nid = EXCLUDED.event_nid, membership = EXCLUDED.membership
),
removed_state AS (
    DELETE FROM current_state c
    USING unnest($80::int[], $81::int[]) AS i (room_nid, state_key_nid)
    WHERE c.room_nid = i.room_nid AND c.state_key_nid = i.state_key_nid
),
new_delta AS (
    INSERT INTO state_deltas (room_nid, stream_ordering, state_key_nid, event_nid, prev_event_nid, writer_nid)
    SELECT i.room_nid, p.stream_ordering, i.state_key_nid, i.event_nid, i.prev_event_nid, $115::smallint
    FROM unnest($82::int[], $83::bigint[], $84::int[], $85::bigint[], $86::bigint[])
            AS i (room_nid, cause_nid, state_key_nid, event_nid, prev_event_nid)
        JOIN positioned p ON p.event_nid = i.cause_nid
),
out_of_band AS (
    INSERT INTO outlier_memberships (stream_id, event_nid, writer_nid)
    SELECT nextval('events_stream'), i.event_nid, $115::smallint
    FROM unnest($87::int[], $88::int[], $89::smallint[], $90::bigint[], $91::bigint[])
            AS i (principal_nid, room_nid, membership, event_nid, cause_nid)
    WHERE i.cause_nid IS NULL
    RETURNING stream_id, event_nid
),
set_membership AS (
    INSERT INTO memberships (principal_nid, room_nid, membership, event_nid, stream_ordering, writer_nid)
    SELECT i.principal_nid, i.room_nid, i.membership, i.event_nid, COALESCE(p.stream_ordering, o.stream_id), $115::smallint
    FROM unnest($87::int[], $88::int[], $89::smallint[], $90::bigint[], $91::bigint[])
            AS i (principal_nid, room_nid, membership, event_nid, cause_nid)
        LEFT JOIN positioned p ON p.event_nid = i.cause_nid
        LEFT JOIN out_of_band o ON o.event_nid = i.event_nid AND i.cause_nid IS NULL
    ON CONFLICT (principal_nid, room_nid) DO UPDATE
        SET membership = EXCLUDED.membership,
            event_nid = EXCLUDED.event_nid,
            stream_ordering = EXCLUDED.stream_ordering,
            writer_nid = EXCLUDED.writer_nid
),
set_visibility AS (
    INSERT INTO visibility (room_nid, principal_nid, audiences, last_join_topological, joined_count, invited_count, invited_audiences)
    SELECT i.room_nid, i.principal_nid, i.audiences::int8multirange, i.last_join_topological, i.joined_count, i.invited_count,
        NULLIF(i.invited_audiences::int8multirange, '{}')
    FROM unnest($92::int[], $93::int[], $94::text[], $95::bigint[], $96::int[], $97::int[], $127::text[])
        AS i (room_nid, principal_nid, audiences, last_join_topological, joined_count, invited_count, invited_audiences)
    ON CONFLICT (room_nid, principal_nid) DO UPDATE
        SET audiences = EXCLUDED.audiences,
            last_join_topological = EXCLUDED.last_join_topological,
            joined_count = EXCLUDED.joined_count,
            invited_count = EXCLUDED.invited_count,
            invited_audiences = EXCLUDED.invited_audiences
),
set_audience AS (
    INSERT INTO audiences (room_nid, audience, branches, continued, opened_topological)
    SELECT * FROM unnest($98::int[], $99::bigint[], $100::int[], $101::boolean[], $120::bigint[])
    ON CONFLICT (room_nid, audience) DO UPDATE SET branches = EXCLUDED.branches, continued = EXCLUDED.continued
),
new_waiting AS (
    INSERT INTO waiting_redactions (redaction_nid, room_nid, target_event_id)
    SELECT * FROM unnest($102::bigint[], $103::int[], $104::text[])
),
settled AS (
    DELETE FROM waiting_redactions
    WHERE target_event_id = ANY($64::text[])
    RETURNING redaction_nid
),
new_place AS (
    INSERT INTO auth_chains (event_nid, chain_nid, sequence_number, event_id, state_key)
    SELECT * FROM unnest($108::bigint[], $109::bigint[], $110::int[], $132::text[], $133::text[])
),
new_link AS (
    INSERT INTO auth_chain_links (chain_nid, sequence_number, target_chain_nid, target_sequence_number)
    SELECT * FROM unnest($111::bigint[], $112::int[], $113::bigint[], $114::int[])
),
dropped_extremity AS (
    INSERT INTO dropped_extremities (event_nid, room_nid)
    SELECT * FROM unnest($125::bigint[], $126::int[])
),
new_invalidation AS (
    INSERT INTO cache_invalidations (stream_id, invalidation_ts, writer_nid, cache_name, keys)
    SELECT nextval('caches_stream'), $25::bigint, $115::smallint, i.cache_name, ARRAY(SELECT jsonb_array_elements_text(i.keys::jsonb))
    FROM unnest($121::text[], $122::text[]) AS i (cache_name, keys)
    RETURNING stream_id
),
latest AS (  -- the positions this write takes, per stream
    SELECT CASE WHEN backfilled THEN 'backfill' ELSE 'events' END AS stream_name, max(stream_ordering) AS stream_id
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
    ON CONFLICT (stream_name, instance_name) DO UPDATE SET stream_id = GREATEST(stream_positions.stream_id, EXCLUDED.stream_id)
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
        WHEN (SELECT count(*) FROM old_room) <> cardinality($12::int[]) THEN refuse_stale_plan('rooms')
        WHEN EXISTS (SELECT event_nid FROM filled_gap EXCEPT SELECT unnest($106::bigint[])) THEN refuse_stale_plan('missing_events')
        WHEN EXISTS (SELECT redaction_nid FROM settled EXCEPT SELECT unnest($107::bigint[])) THEN refuse_stale_plan('waiting_redactions')
        WHEN EXISTS (SELECT stream_name FROM latest EXCEPT SELECT stream_name FROM set_position) THEN refuse_old_writer($105::text)
    END
"""


class PositionRow(NamedTuple):
    """The position that an event took. ``writers``: how many there are (0 where the row does not say); nid 0 where it says only that, -1 for an invalidation."""

    event_nid: int
    stream_ordering: int
    writers: int
    stale: int | None


class Written(NamedTuple):
    """The position of each event that took one, by nid (that of an outlier is of its membership).

    ``writers``: how many there are; ``invalidations``: the facts of the stream "caches", with their positions.
    """

    positions: dict[int, int]
    writers: int
    invalidations: Sequence[tuple[int, list[object]]] = ()


async def write(conn: Connection, draft: Draft, author: Author, received_ts: int) -> Written:
    """Apply the draft."""
    if write_plain.is_plain(draft):
        plain = await conn.fetch(write_plain.SQL_WRITE_PLAIN, *write_plain.arguments(draft, author, received_ts), row=PositionRow)
        return Written({row.event_nid: row.stream_ordering for row in plain}, plain[0].writers)
    invalidated = invalidations(draft)
    rows = await conn.fetch(SQL_WRITE, *arguments(draft, author, received_ts, invalidated), row=PositionRow)
    positions = {row.event_nid: row.stream_ordering for row in rows if row.event_nid > 0}
    ids = sorted(row.stream_ordering for row in rows if row.event_nid < 0)
    told = [(stream_id, [one.cache_name, list(one.keys), received_ts]) for stream_id, one in zip(ids, invalidated, strict=True)]
    return Written(positions, max(row.writers for row in rows), told)


def arguments(draft: Draft, author: Author, received_ts: int, invalidated: Sequence[Invalidation]) -> list[object]:
    """The parameters of the statement, in order."""
    changed = [room for room in draft.room_drafts.values() if room.changed]
    placed = [draft.row_of(nid) for nid in draft.placed]
    return [
        [room.row.room_nid for room in changed],
        *columns(((row.event_nid, row.room_nid, row.backfilled) for row in placed), 3),
        *columns((_new_room(room) for room in changed if not room.row.write_version), 7),
        *columns((_old_room(room) for room in changed if room.row.write_version), 6),
        *columns(((nid, name) for name, nid in draft.new_types.items()), 2),
        *columns(((nid, *key) for key, nid in draft.new_state_keys.items()), 3),
        *columns(((nid, name) for name, nid in draft.new_principals.items()), 2),
        received_ts,
        *columns((_new_event(new.row, new.raw) for new in draft.new_events.values()), 22),
        *columns(map(_changed_event, draft.changed_events.values()), 11),
        *columns(((*gap[:4], array(gap.child_nids)) for gap in draft.new_missing.values()), 5),
        [row.event_id for row in placed],
        *columns((_new_group(draft, group) for group in draft.new_groups.values()), 11),
        *columns(((*key, *value) for key, value in draft.current_changes.items() if value[0]), 4),
        *columns((key for key, value in draft.current_changes.items() if not value[0]), 2),
        *columns(((d.room_nid, d.cause_nid, d.state_key_nid, d.event_nid, d.prev_event_nid) for d in draft.deltas), 5),
        *columns(draft.memberships.values(), 5),
        *columns(((*key, ranges.to_text(row[0]), *row[1:4]) for key, row in draft.new_visibility.items()), 6),
        *columns(((*key, row.branches, row.continued) for key, row in draft.new_audiences.items()), 4),
        *columns(((nid, *value) for nid, value in draft.new_waiting.items()), 3),
        author.instance_name,
        [gap.event_nid for gap in draft.gone_missing.values()],
        list(draft.gone_waiting),
        *columns(((nid, *entry.place) for nid, entry in draft.new_places.items()), 3),
        *columns(((*entry.place, *link) for entry in draft.new_places.values() for link in entry.links.items()), 4),
        author.writer_nid,
        *columns((_sight(room) for room in changed if not room.row.write_version), 2),
        *columns((_sight(room) for room in changed if room.row.write_version), 2),
        [row.opened_topological for row in draft.new_audiences.values()],
        [one.cache_name for one in invalidated],
        [orjson.dumps(one.keys).decode() for one in invalidated],
        [new.row.ineffective for new in draft.new_events.values()],
        [row.ineffective for row in draft.changed_events.values()],
        *columns(draft.dropped.items(), 2),
        [ranges.to_text(row.invited_audiences) for row in draft.new_visibility.values()],
        *draft.new_relations,
        author.epoch,
        *columns(((row.event_id, draft.state_key_name(row.state_key_nid or 0)[1]) for row in map(draft.row_of, draft.new_places)), 2),
        draft.new_urls,
        [nid in draft.after_gaps or None for nid in draft.new_events],
        [nid in draft.after_gaps or None for nid in draft.changed_events],
    ]


def _new_room(room: RoomDraft) -> tuple[object, ...]:
    row = room.row
    extremities = array(room.extremities)
    return row.room_nid, row.room_id, row.room_version, room.next_audience, room.current, room.max_order, extremities


def _old_room(room: RoomDraft) -> tuple[object, ...]:
    row = room.row
    return row.room_nid, row.write_version, room.next_audience, room.current, room.max_order, array(room.extremities)


def _sight(room: RoomDraft) -> tuple[int, str]:
    return room.audience, ranges.to_text(room.strays)


def _new_event(row: EventRow, raw: bytes) -> tuple[object, ...]:
    return (
        row.event_nid,
        row.topological_ordering,
        row.depth,
        row.origin_server_ts,
        row.state_group_before,
        row.state_group_after,
        row.audience,
        row.redacted_by,
        row.room_nid,
        row.sender_nid,
        row.type_nid,
        row.state_key_nid,
        row.membership,
        row.outlier,
        row.backfilled,
        row.soft_failed,
        row.redacted_form,
        row.event_id,
        row.rejected,
        array(row.prev_events),
        array(row.auth_events),
        raw,
    )


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
        array(row.prev_events),
    )


def _new_group(draft: Draft, group: Group) -> tuple[object, ...]:
    row = row_of(group, lambda key: draft.state_key_name(key)[0] == TYPE_MEMBER)
    return (*row[:6], *(None if numbers is None else array(numbers) for numbers in row[6:]))
