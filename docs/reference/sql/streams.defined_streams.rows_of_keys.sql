-- Sent by storage.streams.defined_streams.DefinedStream. Parameters: $1 text, $2 bigint, $3 text[],
-- $4 bigint[], $5 bigint, $6 text[], $7 bigint[], $8 bigint, $9 bigint, $10 text[].

SELECT f.stream_id, w.instance_name, f.key, f.value, f.wakes
FROM published_facts f
JOIN writers w USING (writer_nid)
LEFT JOIN unnest($3::text[], $4::bigint[]) AS a (instance_name, stream_id) USING (instance_name)
LEFT JOIN unnest($6::text[], $7::bigint[]) AS u (instance_name, stream_id) USING (instance_name)
WHERE f.stream_name = $1::text AND f.key = ANY($10::text[])
    AND f.stream_id > $2::bigint AND f.stream_id <= $8::bigint
    AND f.stream_id > COALESCE(a.stream_id, $2::bigint)
    AND f.stream_id <= COALESCE(u.stream_id, $5::bigint)
ORDER BY f.stream_id
LIMIT $9::bigint
