-- Sent by storage.streams.startup._is_continued and storage.streams.startup.set_sequences_forward.
-- Parameters: $1 text[], $2 text[].

SELECT s.name, max(s.last) AS last, max(s.used) AS used
FROM (
    -- a position is at or past each fact of its writer, also where the facts are gone by now; at 1
    -- nobody has written yet
    SELECT d.sequence_name AS name,
        COALESCE(pg_sequence_last_value(d.sequence_name::regclass), 0) AS last, p.stream_id AS used
    FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
    JOIN stream_positions p USING (stream_name)
    WHERE p.stream_id > 1
    UNION ALL
    SELECT 'events_stream', COALESCE(pg_sequence_last_value('events_stream'), 0),
        GREATEST((SELECT max(stream_ordering) FROM events),
            (SELECT max(stream_id) FROM outlier_memberships))
    UNION ALL
    SELECT 'account_data_stream', COALESCE(pg_sequence_last_value('account_data_stream'), 0),
        (SELECT max(stream_id) FROM account_data)
    UNION ALL
    SELECT 'to_device_stream', COALESCE(pg_sequence_last_value('to_device_stream'), 0),
        (SELECT max(stream_id) FROM to_device)
    UNION ALL
    SELECT 'receipts_stream', COALESCE(pg_sequence_last_value('receipts_stream'), 0),
        (SELECT max(stream_id) FROM receipts)
    UNION ALL
    SELECT 'caches_stream', COALESCE(pg_sequence_last_value('caches_stream'), 0),
        (SELECT max(stream_id) FROM cache_invalidations)
    UNION ALL
    SELECT 'published_facts_stream', COALESCE(pg_sequence_last_value('published_facts_stream'), 0),
        max(f.stream_id)
    FROM defined_streams d
    CROSS JOIN LATERAL (SELECT stream_id FROM published_facts WHERE stream_name = d.stream_name
        ORDER BY stream_id DESC LIMIT 1) AS f
    UNION ALL
    SELECT 'writer_nids', COALESCE(pg_sequence_last_value('writer_nids'), 0),
        (SELECT max(writer_nid) FROM writers)
    UNION ALL
    SELECT 'sliding_connection_nids',
        COALESCE(pg_sequence_last_value('sliding_connection_nids'), 0),
        (SELECT max(connection_nid) FROM sliding_connections)
    UNION ALL
    SELECT 'event_nids', COALESCE(pg_sequence_last_value('event_nids') + 999, 0),
        GREATEST((SELECT max(event_nid) FROM events), (SELECT max(event_nid) FROM missing_events))
    UNION ALL
    SELECT 'state_group_nids', COALESCE(pg_sequence_last_value('state_group_nids') + 999, 0),
        (SELECT max(state_group) FROM state_groups)
    UNION ALL
    SELECT 'state_key_nids', COALESCE(pg_sequence_last_value('state_key_nids') + 99, 0),
        (SELECT max(state_key_nid) FROM state_keys WHERE state_key_nid >= 1000 /* ASSIGNED_FROM */)
    UNION ALL
    SELECT 'principal_nids', COALESCE(pg_sequence_last_value('principal_nids') + 99, 0),
        (SELECT max(principal_nid) FROM principals WHERE principal_nid >= 1000 /* ASSIGNED_FROM */)
    UNION ALL
    SELECT 'type_nids', COALESCE(pg_sequence_last_value('type_nids') + 9, 0),
        (SELECT max(type_nid) FROM event_types WHERE type_nid >= 1000 /* ASSIGNED_FROM */)
    UNION ALL
    SELECT 'room_nids', COALESCE(pg_sequence_last_value('room_nids') + 9, 0),
        (SELECT max(room_nid) FROM rooms)
) AS s
GROUP BY s.name
HAVING max(s.used) > max(s.last)
ORDER BY s.name
