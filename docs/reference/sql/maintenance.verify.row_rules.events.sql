-- Sent by storage.maintenance.verify.row_rules.check_row_rules. Parameters: $1 int.

SELECT e.event_id AS subject, rule.name
FROM (
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
) AS e
CROSS JOIN LATERAL (VALUES
    ('an outlier has no position, state and audience, and any other event has all of them',
            e.outlier = (e.stream_ordering IS NULL) AND e.outlier = (e.topological_ordering IS NULL)
                AND e.outlier = (e.state_group_before IS NULL) AND e.outlier = (e.audience IS NULL)),
        ('an outlier has a depth', e.depth IS NOT NULL OR e.topological_ordering IS NOT NULL),
        ('only an accepted state event has a state after it', e.state_group_after IS NULL
            OR (e.state_key_nid IS NOT NULL AND e.rejected IS NULL AND NOT e.outlier)),
        ('a member event has a membership, and no other event has one',
            (e.membership IS NOT NULL) = (e.type_nid = 2 /* TYPE_MEMBER */ AND e.state_key_nid IS NOT NULL)),
        ('a relation has a type, and an edit says whether it replaces',
            (e.relates_to IS NULL) = (e.rel_type_nid IS NULL)
                AND (e.replaces IS NULL) = (e.rel_type_nid IS DISTINCT FROM 19 /* REL_REPLACE */)),
        ('a refused event is soft-failed', e.refused IS NULL OR e.soft_failed),
        ('only a refused event is superseded', e.superseded IS NULL OR e.refused IS NOT NULL),
        ('edges have one of two forms', (e.prev_events IS NULL OR e.prev_distance IS NULL)
            AND (e.auth_events IS NULL OR e.auth_distance_1 IS NULL))
) AS rule (name, holds)
WHERE NOT rule.holds
ORDER BY 1, 2
