-- Sent by storage.maintenance.verify.row_rules.check_row_rules. Parameters: $1 int.

SELECT e.state_group::text AS subject, rule.name
FROM (SELECT * FROM state_groups WHERE room_nid = $1::int) AS e
CROSS JOIN LATERAL (VALUES
    ('a path has one of two forms, and ends with its group', (e.path IS NULL) <> (e.back IS NULL)
            AND COALESCE(e.back[cardinality(e.back)] = 0, true)
            AND (e.digest IS NOT NULL OR COALESCE(get_byte(e.path, 0) > 4, false))),
        ('each key has an event', cardinality(e.key_nids) IS NOT DISTINCT FROM cardinality(e.event_nids)
            AND cardinality(e.member_key_nids) IS NOT DISTINCT FROM cardinality(e.member_event_nids)),
        ('entries have one of two forms', CASE
            WHEN e.event_nid IS NULL THEN COALESCE(e.key_nid, e.member_key_nid) IS NULL
            ELSE (e.key_nid IS NULL) <> (e.member_key_nid IS NULL)
                AND COALESCE(e.key_nids, e.member_key_nids) IS NULL
        END)
) AS rule (name, holds)
WHERE NOT rule.holds
ORDER BY 1, 2
