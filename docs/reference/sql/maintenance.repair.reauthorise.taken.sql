-- Sent by storage.maintenance.partial_state.positions.replayed and
-- storage.maintenance.repair.reauthorise.take_out. Parameters: $1 bigint[].

SELECT e.event_nid, e.event_id, r.room_id, e.stream_ordering, e.outlier, e.backfilled,
    e.redacted_form, e.encoding, e.received_ts,
    e.rejected IS NULL AS is_accepted, e.json,
    NOT e.outlier AND EXISTS (
        SELECT
        FROM unnest(prev_nids(e.event_nid, e.prev_events, e.prev_distance)) AS named (event_nid)
        LEFT JOIN events p USING (event_nid)
        WHERE p.stream_ordering IS NULL OR COALESCE(p.arrival_ordering, p.stream_ordering)
            > COALESCE(e.arrival_ordering, e.stream_ordering)
    ) AS is_undetermined,
    e.refused, COALESCE(e.arrival_ordering, e.stream_ordering) AS arrival, e.soft_failed
FROM events e
JOIN rooms r USING (room_nid)
WHERE e.event_nid = ANY($1::bigint[])
ORDER BY arrival NULLS FIRST, e.event_nid
