-- Sent by storage.queries.explain_visibility._membership. Parameters: $1 bigint, $2 text.

SELECT COALESCE(max(e.membership), 0)
FROM state_entries($1::bigint) AS s
JOIN state_keys k ON k.state_key_nid = s.state_key_nid
JOIN events e ON e.event_nid = s.event_nid
WHERE k.type_nid = 2 /* TYPE_MEMBER */
    AND CASE WHEN $2::text LIKE '@%' THEN k.state_key = $2::text
        ELSE substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text END
