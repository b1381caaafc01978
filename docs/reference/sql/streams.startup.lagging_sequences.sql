-- Sent by storage.streams.startup._is_continued and storage.streams.startup.set_sequences_forward.
-- Parameters: $1 text[], $2 text[].

SELECT s.name, max(s.last) AS last, max(s.used) AS used
FROM (
    SELECT u.name, COALESCE(pg_sequence_last_value(u.name::regclass) + u.step - 1, 0) AS last,
        u.used
    FROM (
        -- a position is at or past each fact of its writer, also where the facts are gone by now;
        -- at 1 nobody has written yet
        SELECT d.sequence_name, 1, p.stream_id
        FROM unnest($1::text[], $2::text[]) AS d (stream_name, sequence_name)
        JOIN stream_positions p USING (stream_name)
        WHERE p.stream_id > 1
        UNION ALL
        VALUES
            ('events_stream', 1, GREATEST((SELECT max(stream_ordering) FROM events),
                (SELECT max(stream_id) FROM outlier_memberships))),
            ('account_data_stream', 1, (SELECT max(stream_id) FROM account_data)),
            ('to_device_stream', 1, (SELECT max(stream_id) FROM to_device)),
            ('receipts_stream', 1, (SELECT max(stream_id) FROM receipts)),
            ('caches_stream', 1, (SELECT max(stream_id) FROM cache_invalidations)),
            ('published_facts_stream', 1, (SELECT max(f.stream_id)
                FROM defined_streams d
                CROSS JOIN LATERAL (SELECT stream_id FROM published_facts
                    WHERE stream_name = d.stream_name ORDER BY stream_id DESC LIMIT 1) AS f)),
            ('writer_nids', 1, (SELECT max(writer_nid) FROM writers)),
            ('sliding_connection_nids', 1, (SELECT max(connection_nid) FROM sliding_connections)),
            ('event_nids', 1000, GREATEST((SELECT max(event_nid) FROM events),
                (SELECT max(event_nid) FROM missing_events))),
            ('state_group_nids', 1000, (SELECT max(state_group) FROM state_groups)),
            ('state_key_nids', 100, (SELECT max(state_key_nid) FROM state_keys
                WHERE state_key_nid >= 1000 /* ASSIGNED_FROM */)),
            ('principal_nids', 100, (SELECT max(principal_nid) FROM principals
                WHERE principal_nid >= 1000 /* ASSIGNED_FROM */)),
            ('type_nids', 10, (SELECT max(type_nid) FROM event_types
                WHERE type_nid >= 1000 /* ASSIGNED_FROM */)),
            ('room_nids', 10, (SELECT max(room_nid) FROM rooms))
    ) AS u (name, step, used)
) AS s
GROUP BY s.name
HAVING max(s.used) > max(s.last)
ORDER BY s.name
