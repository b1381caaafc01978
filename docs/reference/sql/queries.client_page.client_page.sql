-- Sent by storage.queries.client_page.client_page. Parameters: $1 user_id text, $2 event_ids text,
-- $3 ignored text, $4 references_max bigint, $5 room_ids text, $6 has_device boolean.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($3::text::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $1::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored
),
-- the rooms come first: so the visibility is checked while the events are read
room AS MATERIALIZED (
    SELECT r.room_nid, reader.principal_nid, reader.ignored, v.*
    FROM rooms r
    CROSS JOIN reader
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = ANY($5::text::text[])
),
named AS MATERIALIZED (
    SELECT e.event_id, e.room_nid, e.sender_nid, e.type_nid, e.rel_type_nid, e.redacted_by,
        e.state_key_nid IS NULL AND e.redacted_by IS NULL
            AND (was_there(e, room.joined_since, room.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, room.reader_nid, room.unread)) AS whole,
        -- the reader was joined, and no transaction id can be missing
        e.state_key_nid IS NULL AND was_there(e, room.joined_since, room.joined_audiences)
            AND NOT ($6::boolean AND e.sender_nid = room.principal_nid) AS is_usual
    FROM room
    CROSS JOIN reader
    JOIN events e USING (room_nid)
    WHERE e.event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($2::text::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
        AND user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences, room.world_audiences, room.shared_before, room.reader_nid, room.unread)
),
-- events that others relate to: a probe for each, never a join with all relations
parent AS MATERIALIZED (
    SELECT n.event_id, n.key, n.sender_nid, n.type_nid, n.whole,
        CASE WHEN n.whole THEN n.rel_type_nid END AS rel_type_nid, room.*
    FROM (SELECT *, relation_key(event_id) AS key FROM named OFFSET 0) AS n
    JOIN room USING (room_nid)
    WHERE (SELECT true FROM events c WHERE c.relates_to = n.key AND NOT c.outlier
        ORDER BY c.rel_type_nid LIMIT 1)
),
latest AS MATERIALIZED (  -- of each thread: an event that itself relates to another begins none
    SELECT p.event_id AS root_id, p.key AS root_key, p.sender_nid AS root_sender_nid,
        last.event_nid, last.event_id, last.sender_nid,
        last.type_nid, last.whole, p.room_nid, p.principal_nid, p.ignored,
        p.joined_audiences, p.joined_since, p.own_audiences, p.shared_audiences, p.world_audiences, p.shared_before, p.reader_nid, p.unread
    FROM parent p
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.sender_nid, e.type_nid, e.state_key_nid IS NULL AS whole
        FROM events e
        WHERE e.relates_to = p.key AND e.rel_type_nid = (SELECT 22 /* REL_THREAD */)
            AND e.room_nid + 0 = p.room_nid
            AND NOT e.outlier
            AND user_sees_relation(e, p.joined_since, p.own_audiences, p.shared_audiences, p.world_audiences, p.shared_before, p.reader_nid, p.unread, p.ignored)
                AND (was_there(e, p.joined_since, p.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, p.reader_nid, p.unread))
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT 1
    ) AS last
    WHERE p.rel_type_nid IS NULL
),
-- events that may have edits or references: the requested ones, and the latest events of threads
holder AS MATERIALIZED (
    SELECT event_id, key, room_nid, sender_nid, type_nid, whole
        AND rel_type_nid IS DISTINCT FROM 19 /* REL_REPLACE */ AS editable, ignored,
        joined_audiences, joined_since, own_audiences, shared_audiences, world_audiences, shared_before, reader_nid, unread
    FROM parent
    UNION
    SELECT event_id, relation_key(event_id), room_nid, sender_nid, type_nid, whole, ignored,
        joined_audiences, joined_since, own_audiences, shared_audiences, world_audiences, shared_before, reader_nid, unread
    FROM latest
),
found AS (
    SELECT h.event_id AS about, 'replacement' AS kind, edit.event_nid, NULL::bigint AS events,
        NULL::boolean AS participated, NULL::text[] AS ids
    FROM holder h
    CROSS JOIN LATERAL (
        SELECT e.event_nid
        FROM events e
        WHERE e.relates_to = h.key AND e.rel_type_nid = 19 /* REL_REPLACE */ AND e.replaces
            AND e.room_nid + 0 = h.room_nid AND NOT e.outlier
            AND e.sender_nid = h.sender_nid AND e.type_nid = h.type_nid
            AND user_sees_relation(e, h.joined_since, h.own_audiences, h.shared_audiences, h.world_audiences, h.shared_before, h.reader_nid, h.unread, h.ignored)
                AND (was_there(e, h.joined_since, h.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, h.reader_nid, h.unread))
        ORDER BY e.origin_server_ts DESC, e.event_id DESC
        LIMIT 1
    ) AS edit
    WHERE h.editable
    UNION ALL
    SELECT l.root_id, 'thread', l.event_nid, thread.events, thread.participated
        OR l.root_sender_nid = l.principal_nid, NULL
    FROM latest l
    CROSS JOIN LATERAL (
        SELECT count(*) AS events, bool_or(e.sender_nid = l.principal_nid) AS participated
        FROM events e
        WHERE e.relates_to = l.root_key AND e.rel_type_nid = (SELECT 22 /* REL_THREAD */)
            AND e.room_nid + 0 = l.room_nid
            AND NOT e.outlier
            AND user_sees_relation(e, l.joined_since, l.own_audiences, l.shared_audiences, l.world_audiences, l.shared_before, l.reader_nid, l.unread, l.ignored)
                AND (was_there(e, l.joined_since, l.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, l.reader_nid, l.unread))
    ) AS thread
    UNION ALL
    SELECT h.event_id, 'references', NULL, NULL, NULL, referring.ids
    FROM holder h
    CROSS JOIN LATERAL (
        SELECT array_agg(r.event_id ORDER BY r.topological_ordering, r.stream_ordering) AS ids
        FROM (
            SELECT e.event_id, e.topological_ordering, e.stream_ordering
            FROM events e
            WHERE e.relates_to = h.key AND e.rel_type_nid = 21 /* REL_REFERENCE */
                AND e.room_nid + 0 = h.room_nid
                AND NOT e.outlier
                AND user_sees_relation(e, h.joined_since, h.own_audiences, h.shared_audiences, h.world_audiences, h.shared_before, h.reader_nid, h.unread, h.ignored)
                    AND (was_there(e, h.joined_since, h.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, h.reader_nid, h.unread))
            ORDER BY e.topological_ordering, e.stream_ordering
            LIMIT $4::bigint
        ) AS r
    ) AS referring
    WHERE referring.ids IS NOT NULL
),
part AS (
    SELECT about, kind, event_nid, events, participated, ids
    FROM found
    UNION ALL
    SELECT event_id, 'redaction', redacted_by, NULL, NULL, NULL
    FROM named
    WHERE is_usual AND redacted_by IS NOT NULL
    UNION ALL
    SELECT '', 'usual', NULL, NULL, NULL, array_agg(event_id)
    FROM named
    WHERE is_usual AND redacted_by IS NULL
)
SELECT COALESCE(user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences, room.world_audiences, room.shared_before, room.reader_nid, room.unread)
        AND was_there(e, room.joined_since, room.joined_audiences)
        AND e.state_key_nid IS NULL
        AND NOT ($6::boolean AND e.sender_nid = room.principal_nid), false) AS is_usual,
    t.about, t.kind, t.events, t.participated, t.ids, s.*
FROM part t
CROSS JOIN reader
LEFT JOIN stored_events s USING (event_nid)
LEFT JOIN events e USING (event_nid)
LEFT JOIN room ON room.room_nid = e.room_nid
