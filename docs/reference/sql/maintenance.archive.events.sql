-- Sent by storage.maintenance.archive.archive. Parameters: $1 bigint[], $2 boolean[].

SELECT
    e.event_id,
    e.json,
    CASE WHEN is_out_of_band(e) THEN 'out_of_band' WHEN e.outlier THEN 'outlier'
        WHEN e.backfilled THEN 'backfill' ELSE 'live' END AS origin,
    NOT e.outlier AND NOT wanted.is_readmission AND EXISTS (
        SELECT
        FROM unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS named (event_nid)
        LEFT JOIN events p USING (event_nid)
        WHERE p.stream_ordering IS NULL OR COALESCE(p.arrival_ordering, p.stream_ordering)
            > COALESCE(e.arrival_ordering, e.stream_ordering)
    ) AS is_undetermined,
    CASE WHEN is_out_of_band(e) THEN (
        SELECT o.stripped_state FROM out_of_band_memberships o
            WHERE o.room_nid = e.room_nid AND o.event_nid = e.event_nid
    ) END AS stripped_state,
    CASE WHEN e.arrival_ordering IS NULL THEN e.refused
        WHEN NOT wanted.is_readmission THEN 'readmitted later' END AS refused,
    wanted.is_readmission
FROM unnest($1::bigint[], $2::boolean[]) WITH ORDINALITY
    AS wanted (event_nid, is_readmission, place)
JOIN events e USING (event_nid)
ORDER BY wanted.place
