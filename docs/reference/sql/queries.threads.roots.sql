-- Sent by storage.queries.threads._roots. Parameters: $1 room_id text, $2 user_id text, $3 ignored
-- text[], $4 root_ids text[], $5 participated boolean.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($3::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $2::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored
),
room AS MATERIALIZED (
    SELECT r.room_nid, reader.*, v.*
    FROM reader
    CROSS JOIN rooms r
    CROSS JOIN LATERAL visibility_of(r.room_nid, reader.principal_nid) AS v
    WHERE r.room_id = $1::text
)
SELECT form.withheld, s.*
FROM room r
JOIN events e ON e.event_nid = ANY(ARRAY(
    SELECT found.event_nid
    FROM unnest($4::text[]) AS one (id)
    CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = one.id OFFSET 0) AS found
)) AND e.room_nid = r.room_nid
CROSS JOIN LATERAL (
    SELECT NOT was_there(e, r.joined_since, r.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
) AS form
JOIN stored_events s USING (event_nid)
WHERE user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread)
    AND (e.rel_type_nid IS NULL OR e.redacted_by IS NOT NULL OR form.withheld)
    AND (NOT $5::boolean OR e.sender_nid = r.principal_nid OR EXISTS (
        SELECT
        FROM events e
        WHERE e.relates_to = relation_key(s.event_id) AND e.rel_type_nid = (SELECT 22 /* REL_THREAD */)
            AND e.room_nid + 0 = r.room_nid AND NOT e.outlier
            AND e.sender_nid = r.principal_nid
            AND user_sees_relation(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread, r.ignored)
                AND (was_there(e, r.joined_since, r.joined_audiences) OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) OR was_there_before(e, r.reader_nid, r.unread))
    ))
