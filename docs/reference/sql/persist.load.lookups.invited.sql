-- Sent by storage.persist.load.lookups._invited. Parameters: $1 bigint[].

SELECT state_key_nid
FROM events
WHERE event_nid = ANY($1::bigint[]) AND membership = 4 /* INVITE */
