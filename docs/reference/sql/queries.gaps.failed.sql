-- Sent by storage.queries.gaps.gap_failed. Parameters: $1 room_id text, $2 event_ids text[], $3
-- now_ms bigint, $4 reason text, $5 servers text[], $6 retry_ms bigint, $7 retry_ms_max bigint.

WITH gap AS (
    SELECT m.event_nid
    FROM rooms r
    JOIN missing_events m USING (room_nid)
    WHERE r.room_id = $1::text AND m.event_id = ANY($2::text[])
    ORDER BY m.event_nid
    FOR KEY SHARE OF m
)
INSERT INTO gap_failures (event_nid, failures, failed_ts, retry_ts, reason, servers)
SELECT event_nid, 1, $3::bigint, $3::bigint + $6::bigint, $4::text, $5::text[]
FROM gap
ON CONFLICT (event_nid) DO UPDATE SET
    failures = gap_failures.failures + 1,
    failed_ts = EXCLUDED.failed_ts,
    retry_ts = EXCLUDED.failed_ts + LEAST($7::bigint,
        $6::bigint * 2 ^ LEAST(gap_failures.failures, 40))::bigint,
    reason = EXCLUDED.reason,
    servers = ARRAY(SELECT DISTINCT unnest(gap_failures.servers || EXCLUDED.servers) ORDER BY 1)
