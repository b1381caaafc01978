-- Sent by storage.queries.inspect.resolution.state_path. Parameters: $1 bigint.

SELECT g.state_group, g.entry_count, g.runs, g.audience,
    (SELECT count(*) FROM own_entries(g.key_nids, g.event_nids, g.member_key_nids, g.member_event_nids, g.key_nid, g.member_key_nid, g.event_nid) AS own) AS entries
FROM state_path($1::bigint) AS step
JOIN state_groups g ON g.state_group = step.part
ORDER BY step.place
