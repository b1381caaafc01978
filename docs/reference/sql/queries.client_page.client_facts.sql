-- Sent by storage.queries.client_page.client_facts. Parameters: $1 user_id text, $2 event_ids
-- text[], $3 device_id text.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $1::text),
        0) AS principal_nid,
        COALESCE((SELECT state_key_nid FROM state_keys WHERE type_nid = 2 /* TYPE_MEMBER */
            AND state_key = $1::text),
            0) AS own_key_nid
),
named AS MATERIALIZED (
    SELECT event_nid, room_nid, redacted_by
    FROM events
    WHERE event_nid = ANY(ARRAY(
        SELECT found.event_nid
        FROM unnest($2::text[]) AS one (id)
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
    ))
),
chosen AS (  -- with the redactions that took effect on them
    SELECT event_nid, room_nid, false AS is_redaction
    FROM named
    UNION ALL
    SELECT DISTINCT redacted_by, room_nid, true
    FROM named
    WHERE redacted_by IS NOT NULL
),
room AS MATERIALIZED (
    SELECT one.room_nid, reader.principal_nid, reader.own_key_nid, v.*
    FROM (SELECT DISTINCT room_nid FROM named) AS one
    CROSS JOIN reader
    CROSS JOIN LATERAL visibility_of(one.room_nid, reader.principal_nid) AS v
),
about AS MATERIALIZED (
    SELECT e.event_nid, e.event_id, e.room_nid, e.redacted_by, e.sender_nid, e.state_key_nid,
        e.state_group_before, e.membership, e.outlier, c.is_redaction, room.own_key_nid,
        room.principal_nid,
        COALESCE(e.state_key_nid = room.own_key_nid, false) AS is_own_membership,
        form.is_visible, form.was_there,
        form.was_there OR NOT EXISTS (SELECT FROM erased_users u
            WHERE u.principal_nid = e.sender_nid) AS is_whole,
        form.is_visible OR COALESCE(e.state_key_nid = room.own_key_nid, false)
            AND e.rejected IS NULL AND NOT e.soft_failed AS is_shown
    FROM chosen c
    JOIN room USING (room_nid)
    JOIN events e USING (event_nid)
    CROSS JOIN LATERAL (
        SELECT COALESCE(user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences, room.world_audiences, room.shared_before, room.reader_nid, room.unread),
                false) AS is_visible,
            NOT e.outlier AND (was_there(e, room.joined_since, room.joined_audiences)
                OR was_there_before(e, room.reader_nid, room.unread)) AS was_there
    ) AS form
),
sought AS MATERIALIZED (  -- keys of the states before the events
    SELECT state_group_before AS state_group, own_key_nid AS state_key_nid, true AS is_member
    FROM about
    WHERE NOT was_there AND NOT is_own_membership AND own_key_nid > 0 AND NOT outlier AND is_shown
    UNION
    SELECT state_group_before, state_key_nid, membership IS NOT NULL
    FROM about
    WHERE state_key_nid IS NOT NULL AND NOT outlier AND NOT is_redaction AND is_shown
),
entry AS MATERIALIZED (  -- the last row of the path that has the key
    SELECT s.state_group, s.state_key_nid, last.event_nid, last.is_lost
    FROM sought s
    CROSS JOIN LATERAL (
        SELECT part.event_nid, part.state_group IS NULL AS is_lost
        FROM (
            SELECT step.part AS state_group, step.place
            FROM state_path(s.state_group) AS step
            ORDER BY step.place DESC
        ) AS path
        LEFT JOIN LATERAL (
            SELECT p.state_group,
                own_entry(s.state_key_nid, s.is_member, p.key_nids, p.event_nids, p.member_key_nids, p.member_event_nids, p.key_nid, p.member_key_nid, p.event_nid) AS event_nid
            FROM state_groups p
            WHERE p.state_group = path.state_group
        ) AS part ON true
        WHERE part.state_group IS NULL OR part.event_nid IS NOT NULL
        ORDER BY path.place DESC
        LIMIT 1
    ) AS last
    WHERE last.is_lost OR last.event_nid <> 0  -- 0 removes the key
)
SELECT a.event_id AS about, a.is_redaction, a.is_visible, a.is_shown, a.is_whole,
    (SELECT b.event_id FROM events b WHERE b.event_nid = a.redacted_by) AS redaction_id,
    CASE
        WHEN a.is_own_membership THEN a.membership
        WHEN a.was_there THEN 5 /* JOIN */
        WHEN NOT a.outlier THEN COALESCE((SELECT m.membership FROM events m
            WHERE m.event_nid = own.event_nid), 0)
    END AS membership,
    (
        SELECT t.transaction_id
        FROM local_transactions t
        WHERE a.sender_nid = a.principal_nid AND t.event_nid = a.event_nid
            AND t.sender_nid = a.principal_nid AND t.device_id = $3::text
    ) AS transaction_id,
    CASE
        WHEN own.is_lost OR replaced.is_lost OR replaced.event_nid <> 0 AND e.event_nid IS NULL
            THEN a.state_group_before
    END AS lost_group,
    -- a reader of the state before the event, or of the own membership, may see what it replaced
    a.was_there OR a.is_own_membership
        OR COALESCE(user_sees(e, room.joined_since, room.own_audiences, room.shared_audiences, room.world_audiences, room.shared_before, room.reader_nid, room.unread), false) AS may_see_other,
    -- whoever was joined at the event had that state, whole
    a.was_there OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        OR NOT e.outlier AND (was_there(e, room.joined_since, room.joined_audiences)
            OR was_there_before(e, room.reader_nid, room.unread)) AS is_other_whole,
    other.*
FROM about a
JOIN room USING (room_nid)
LEFT JOIN entry own ON own.state_group = a.state_group_before
    AND own.state_key_nid = a.own_key_nid AND NOT a.was_there AND NOT a.is_own_membership
LEFT JOIN entry replaced ON replaced.state_group = a.state_group_before
    AND replaced.state_key_nid = a.state_key_nid AND NOT a.is_redaction
LEFT JOIN events e ON e.event_nid = replaced.event_nid
LEFT JOIN LATERAL (
    SELECT * FROM stored_events s
    WHERE s.event_nid = CASE WHEN a.is_redaction THEN a.event_nid ELSE replaced.event_nid END
) AS other ON true
