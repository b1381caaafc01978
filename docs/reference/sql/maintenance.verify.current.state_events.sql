-- Sent by storage.maintenance.verify.current._state_events. Parameters: $1 bigint[].

SELECT e.event_nid, e.membership, e.state_key_nid, k.state_key,
    e.type_nid = 2 /* TYPE_MEMBER */ AS is_member,
    e.outlier OR (e.backfilled AND e.rejected IS NULL AND NOT e.soft_failed) AS is_outside
FROM events e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.event_nid = ANY($1::bigint[])
