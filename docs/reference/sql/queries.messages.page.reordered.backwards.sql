-- Sent by storage.queries.messages.messages. Parameters: $1 room_id text, $2 user_id text, $3
-- ignored text[], $4 types text[], $5 not_types text[], $6 senders text[], $7 not_senders text[],
-- $8 contains_url boolean, $9 upper bigint, $10 upper_stream bigint, $11 upper_live bigint, $12
-- lower bigint, $13 lower_stream bigint, $14 lower_live bigint, $15 above bigint, $16 above_stream
-- bigint, $17 page_max bigint, $18 upper_numbers bigint[], $19 lower_numbers bigint[], $20
-- moves_max bigint, $21 behind bigint.

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
origin AS MATERIALIZED (
    SELECT r.room_nid, r.room_id, r.room_version, r.out_of_range, r.moves, reader.*
    FROM reader
    CROSS JOIN rooms r
    WHERE r.room_id = $1::text
),
newer AS MATERIALIZED (  -- events that arrived after a timeline, if one is the lower end
    SELECT e.topological_ordering
    FROM origin r
    JOIN events e ON (e.room_nid, e.stream_ordering) > (r.room_nid, $14::bigint)
        AND (e.room_nid, e.stream_ordering) <= (r.room_nid, 9223372036854775807)
    WHERE $14::bigint < 9223372036854775807 AND $15::bigint = 0 AND NOT e.outlier
        AND NOT e.backfilled
),
-- no event of the range is below: beside a timeline the oldest of the newer events is the lowest
lowest AS MATERIALIZED (
    SELECT CASE WHEN $14::bigint = 9223372036854775807 THEN $12::bigint
        WHEN $15::bigint > 0 THEN $15::bigint ELSE (
        SELECT LEAST($12::bigint, COALESCE(min(topological_ordering) - 1, $12::bigint)) FROM newer
    ) END AS topological_ordering
),
-- the topological ranges of the reader's audiences: the hidden events between them are not read
visible_range AS MATERIALIZED (
    SELECT r.room_nid, r.ignored, f.*, s.*
    FROM origin r
    CROSS JOIN filter_of($4::text[], $5::text[], $6::text[], $7::text[], $8::boolean) AS f
    CROSS JOIN lowest
    CROSS JOIN LATERAL topological_ranges_of(r.room_nid, r.principal_nid, r.out_of_range,
        CASE WHEN false THEN lowest.topological_ordering ELSE $9::bigint END,
        CASE WHEN false THEN 0 ELSE $17::bigint + 1 END,
        CASE WHEN false THEN $17::bigint + 1 ELSE 0 END) AS s
),
brought AS MATERIALIZED (  -- events that belong below the upper end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.stream_ordering
    FROM origin r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $18::bigint[], false, $20::bigint) AS m
    WHERE r.moves > ($18::bigint[])[2]
),
left_out AS MATERIALIZED (  -- events that belong below the lower end, reordered to above it
    SELECT m.event_nid, m.topological_ordering, m.levels
    FROM origin r
    CROSS JOIN LATERAL reordered_across(r.room_nid, $19::bigint[], false, $20::bigint) AS m
    WHERE r.moves > ($19::bigint[])[2]
),
page_range AS (
    SELECT s.*, GREATEST((SELECT topological_ordering FROM lowest), s.lowest) AS lower, 0::bigint AS lower_stream,
        LEAST($9::bigint, s.highest) AS upper, CASE
        WHEN s.highest < $9::bigint THEN 9223372036854775807 ELSE $10::bigint END AS upper_stream
    FROM visible_range s
    UNION ALL  -- each brought event is a range of its own
    SELECT s.*, m.topological_ordering, m.stream_ordering, m.topological_ordering, m.stream_ordering
    FROM brought m
    CROSS JOIN (SELECT * FROM visible_range LIMIT 1) AS s
),
page AS MATERIALIZED (
    SELECT e.*
    FROM (SELECT * FROM page_range ORDER BY upper DESC) AS r
    CROSS JOIN LATERAL (
        SELECT
            e.event_nid, e.event_id, e.stream_ordering, e.topological_ordering, e.depth, e.redacted_by,
            e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json , NOT was_there(e, r.joined_since, r.joined_audiences) AND EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AND NOT was_there_before(e, r.reader_nid, r.unread) AS withheld
        FROM events e
        WHERE e.room_nid = r.room_nid
            AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) <= (r.upper, r.upper_stream)
            AND (e.topological_ordering, e.stream_ordering) >= (r.lower, r.lower_stream)
            AND (e.backfilled OR e.stream_ordering <= $11::bigint)
            AND (
                (e.topological_ordering, e.stream_ordering) > ($12::bigint, $13::bigint) AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
                OR (
                    NOT e.backfilled AND e.stream_ordering > $14::bigint
                        AND (e.topological_ordering, e.stream_ordering) > ($15::bigint, $16::bigint)
                        AND e.event_nid NOT IN (SELECT event_nid FROM left_out WHERE levels & $21::bigint <> 0)
                )
            )
            AND user_sees(e, r.joined_since, r.own_audiences, r.shared_audiences, r.world_audiences, r.shared_before, r.reader_nid, r.unread)
            AND not_ignored(e, r.ignored)
            AND is_wanted(e, r.types, r.not_types, r.senders, r.not_senders, r.contains_url)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $17::bigint + 1
    ) AS e
    ORDER BY r.upper DESC, e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT $17::bigint + 1
),
last AS (  -- a full page ends here
    SELECT COALESCE((SELECT topological_ordering FROM page ORDER BY 1 DESC OFFSET $17::bigint
        LIMIT 1), -9223372036854775807 - 1) AS topological_ordering
),
gap AS (  -- missing events with a child in the range of the page
    SELECT array_agg(m.event_id) AS ids, array_agg(e.topological_ordering) AS topological,
        array_agg(e.stream_ordering) AS stream
    FROM origin r
    JOIN missing_events m USING (room_nid)
    JOIN events e ON e.event_nid = ANY(m.child_nids)
    CROSS JOIN last
    WHERE NOT e.outlier
        AND ((e.topological_ordering, e.stream_ordering) <= ($9::bigint, $10::bigint) OR e.event_nid IN (SELECT event_nid FROM brought))
        -- a page back from a timeline also has the gap at which that one begins
        AND (e.backfilled OR e.stream_ordering <= $11::bigint
            OR NOT false AND $9::bigint < 9223372036854775807)
        AND (
            (e.topological_ordering, e.stream_ordering) > ($12::bigint, $13::bigint) AND e.event_nid NOT IN (SELECT event_nid FROM left_out)
            OR (
                NOT e.backfilled AND e.stream_ordering > $14::bigint
                    AND (e.topological_ordering, e.stream_ordering) > ($15::bigint, $16::bigint)
                    AND e.event_nid NOT IN (SELECT event_nid FROM left_out WHERE levels & $21::bigint <> 0)
            )
        )
        AND e.topological_ordering >= last.topological_ordering
)
SELECT gap.ids AS gap_ids, gap.topological AS gap_topological, gap.stream AS gap_stream,
    false AND COALESCE(
        (SELECT bool_or(highest = 9223372036854775807) FROM visible_range), false) AS is_open,
    page.withheld,
    r.moves, CASE WHEN false THEN
        (SELECT array_agg(topological_ordering ORDER BY event_nid) FROM left_out)
    END AS left_out_topological, CASE WHEN false THEN
        (SELECT array_agg(levels ORDER BY event_nid) FROM left_out)
    END AS left_out_levels, page.event_nid, page.event_id, r.room_id, r.room_version,
    page.stream_ordering, page.topological_ordering,
    claimed_depth(page.depth, page.topological_ordering) AS depth,
    CASE WHEN page.redacted_by IS NOT NULL THEN (SELECT b.event_id FROM events b
        WHERE b.event_nid = page.redacted_by) END AS redacted_by,
    page.rejected, page.soft_failed, page.outlier, page.redacted_form, page.encoding,
    page.json
FROM origin r
CROSS JOIN gap
LEFT JOIN page ON true
ORDER BY page.topological_ordering DESC, page.stream_ordering DESC
