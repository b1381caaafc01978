-- Sent by storage.queries.messages._statements. Parameters: $1 room_id text, $2 user_id text, $3
-- upper bigint, $4 upper_stream bigint, $5 upper_live bigint, $6 lower bigint, $7 lower_stream
-- bigint, $8 lower_live bigint, $9 page_max bigint, $10 ignored text[], $11 types text[], $12
-- not_types text[], $13 senders text[], $14 not_senders text[], $15 contains_url boolean, $16 above
-- bigint, $17 above_stream bigint, $18 moves bigint.

WITH
reader AS MATERIALIZED (
    SELECT COALESCE((SELECT principal_nid FROM principals WHERE name = $2::text),
        0) AS principal_nid
),
room AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, r.out_of_range, r.moves, reader.principal_nid,
        ARRAY(SELECT principal_nid FROM principals WHERE name = ANY(COALESCE($10::text[], ARRAY(
            -- clients can store anything there, also the one character that jsonb cannot have
            SELECT jsonb_path_query(replace(convert_from(d.content, 'UTF8'), '\u0000', '\ufffd')::jsonb,
                '$.ignored_users.keyvalue().key', silent => true) #>> ARRAY[]::text[]
            FROM principals p
            CROSS JOIN event_types t
            JOIN account_data d ON d.principal_nid = p.principal_nid AND d.room_nid = 0
                AND d.type_nid = t.type_nid
            WHERE p.name = $2::text AND t.type = 'm.ignored_user_list'
        )))) AS ignored
    FROM reader
    CROSS JOIN rooms r
    WHERE r.room_id = $1::text AND r.moves <= $18::bigint
),
newer AS MATERIALIZED (  -- events that arrived after a timeline, if one is the lower end
    SELECT e.topological_ordering
    FROM room r
    JOIN events e ON (e.room_nid, e.stream_ordering) > (r.room_nid, $8::bigint)
        AND (e.room_nid, e.stream_ordering) <= (r.room_nid, 9223372036854775807)
    WHERE $8::bigint < 9223372036854775807 AND $16::bigint = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- no event of the range is below: beside a timeline the oldest of the newer events is the lowest
lowest AS MATERIALIZED (
    SELECT CASE WHEN $8::bigint = 9223372036854775807 THEN $6::bigint
        WHEN $16::bigint > 0 THEN $16::bigint ELSE (
        SELECT LEAST($6::bigint, COALESCE(min(topological_ordering) - 1, $6::bigint)) FROM newer
    ) END AS topological_ordering
),
-- the topological ranges of the reader's audiences: the hidden events between them are not read
visible_range AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, s.*
    FROM room r
    CROSS JOIN filter_of($11::text[], $12::text[], $13::text[], $14::text[], $15::boolean) AS f
    CROSS JOIN lowest
        CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
            lowest.topological_ordering, 0, $9::bigint + 1) AS s
),
page AS MATERIALIZED (  -- one event more than the limit shows that there are more
    SELECT e.*
    FROM (SELECT * FROM visible_range ORDER BY lowest ASC) AS r
    CROSS JOIN LATERAL (
        SELECT e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering,
            e.depth, e.redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form,
            e.encoding, e.json,
            NOT was_there(e, r.joined_since, r.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (LEAST($3::bigint, r.highest), CASE
                                WHEN r.highest < $3::bigint THEN 9223372036854775807 ELSE $4::bigint END)
            AND (e.backfilled OR e.stream_ordering <= $5::bigint)
            AND e.topological_ordering >= GREATEST((SELECT topological_ordering FROM lowest), r.lowest)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($6::bigint, $7::bigint)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $8::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($16::bigint, $17::bigint)
                )
            )
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering ASC, e.stream_ordering ASC
        LIMIT $9::bigint + 1
    ) AS e
    ORDER BY r.lowest ASC, e.topological_ordering ASC, e.stream_ordering ASC
    LIMIT $9::bigint + 1
),
last AS (  -- a full page ends here
    SELECT (SELECT topological_ordering FROM page ORDER BY 1 ASC OFFSET $9::bigint
        LIMIT 1) AS topological_ordering
),
gap AS (  -- missing events with a child in the range of the page
    SELECT array_agg(m.event_id) AS ids, array_agg(e.topological_ordering) AS topological,
        array_agg(e.stream_ordering) AS stream
    FROM room r
    JOIN missing_events m USING (room_nid)
    JOIN events e ON e.event_nid = ANY(m.child_nids)
    CROSS JOIN last
    WHERE NOT e.outlier
        AND ((e.topological_ordering, e.stream_ordering) <= ($3::bigint, $4::bigint) )
        AND (e.backfilled OR e.stream_ordering <= $5::bigint )
        AND (
            (e.topological_ordering, e.stream_ordering) > ($6::bigint, $7::bigint)
            OR (
                NOT e.backfilled AND e.stream_ordering > $8::bigint
                    AND (e.topological_ordering, e.stream_ordering) > ($16::bigint, $17::bigint)
            )
        )
        AND e.topological_ordering <= COALESCE(last.topological_ordering, 9223372036854775807)
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    r.moves, NULL::bigint[] AS left_out_topological, NULL::bigint[] AS left_out_levels, COALESCE((SELECT bool_or(highest = 9223372036854775807) FROM visible_range), false) AS is_open, page.withheld,
    page.event_nid, page.event_id, r.room_id, r.room_version,
    page.stream_ordering, page.topological_ordering,
    claimed_depth(page.depth, page.topological_ordering) AS depth,
    CASE WHEN page.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = page.redacted_by) END AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding,
    page.json
FROM room r
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering ASC, page.stream_ordering ASC
