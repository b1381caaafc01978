-- Sent by storage.queries.explain_visibility.is_reader_stored. Parameters: $1 text.

SELECT EXISTS (SELECT FROM principals WHERE name = $1::text)
    OR EXISTS (SELECT FROM state_keys WHERE type_nid = 2 /* TYPE_MEMBER */ AND state_key = $1::text)
