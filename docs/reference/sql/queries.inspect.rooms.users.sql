-- Sent by storage.queries.inspect.rooms.users_like. Parameters: $1 text, $2 bigint.

SELECT found.user_id
FROM (
    (
        SELECT p.name AS user_id
        FROM principals p
        WHERE p.name >= $1::text AND p.name < $1::text || chr(1114111)
        ORDER BY p.name
        LIMIT $2::bigint
    )
    UNION
    (
        SELECT k.state_key
        FROM state_keys k
        WHERE k.type_nid = 2 /* TYPE_MEMBER */ AND k.state_key >= $1::text
            AND k.state_key < $1::text || chr(1114111)
        ORDER BY k.state_key
        LIMIT $2::bigint
    )
) AS found
WHERE starts_with(found.user_id, '@')
ORDER BY found.user_id
LIMIT $2::bigint
