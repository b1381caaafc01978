-- Sent by storage.maintenance.verify.graph.check_sequences. Parameters: $1 text[], $2 text[].

SELECT s.name, max(s.largest) AS largest,
    max(CASE WHEN q.last_value IS NULL THEN 0 ELSE q.last_value + q.increment_by END) AS next
FROM (
    SELECT 'event_nids' AS name,
        GREATEST((SELECT max(event_nid) FROM events),
            (SELECT max(event_nid) FROM missing_events)) AS largest
    UNION ALL SELECT 'events_stream',
        GREATEST((SELECT max(stream_ordering) FROM events),
            (SELECT max(stream_id) FROM outlier_memberships))
    UNION ALL SELECT 'account_data_stream', (SELECT max(stream_id) FROM account_data)
    UNION ALL SELECT 'to_device_stream', (SELECT max(stream_id) FROM to_device)
    UNION ALL SELECT 'receipts_stream', (SELECT max(stream_id) FROM receipts)
    UNION ALL SELECT 'caches_stream', (SELECT max(stream_id) FROM cache_invalidations)
    UNION ALL SELECT 'published_facts_stream', (SELECT max(stream_id) FROM published_facts)
    UNION ALL SELECT 'writer_nids', (SELECT max(writer_nid) FROM writers)
    UNION ALL SELECT 'sliding_connection_nids',
        (SELECT max(connection_nid) FROM sliding_connections)
    UNION ALL
    SELECT d.sequence_name, max(p.stream_id)  -- readers have passed these
    FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
    JOIN stream_positions p USING (stream_name)
    WHERE p.stream_id > 1
    GROUP BY d.sequence_name
    UNION ALL SELECT 'state_group_nids', (SELECT max(state_group) FROM state_groups)
    UNION ALL SELECT 'room_nids', (SELECT max(room_nid) FROM rooms)
    UNION ALL SELECT 'principal_nids',
        (SELECT max(principal_nid) FROM principals WHERE principal_nid >= 1000 /* ASSIGNED_FROM */)
    UNION ALL SELECT 'type_nids',
        (SELECT max(type_nid) FROM event_types WHERE type_nid >= 1000 /* ASSIGNED_FROM */)
    UNION ALL SELECT 'state_key_nids',
        (SELECT max(state_key_nid) FROM state_keys WHERE state_key_nid >= 1000 /* ASSIGNED_FROM */)
) AS s
LEFT JOIN pg_sequences q ON q.schemaname = current_schema() AND q.sequencename = s.name
WHERE s.largest IS NOT NULL
    AND s.largest >= CASE WHEN q.last_value IS NULL THEN 0 ELSE q.last_value + q.increment_by END
GROUP BY s.name
ORDER BY 1
