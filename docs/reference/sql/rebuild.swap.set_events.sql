-- Sent by storage.rebuild.swap.swap. Parameters: $1 int.

WITH found AS MATERIALIZED (
    SELECT s.*, COALESCE(b.live, s.state_group_before) AS group_before,
        COALESCE(a.live, s.state_group_after) AS group_after
    FROM pg_temp.events s
    LEFT JOIN pg_temp.same_groups b ON b.shadow = s.state_group_before
    LEFT JOIN pg_temp.same_groups a ON a.shadow = s.state_group_after
    CROSS JOIN LATERAL (
        SELECT event_nid, depth, state_group_before, state_group_after, auth_distance_1, auth_distance_2, auth_distance_3, auth_distance_4, auth_events, prev_distance, prev_events,
            topological_ordering, origin_server_ts, audience, redacted_by, relates_to, sender_nid, type_nid, state_key_nid, rel_type_nid, membership, soft_failed, redacted_form, ineffective, replaces, has_url, after_gap, event_id, rejected, superseded, refused, describes_room
        FROM events
        WHERE event_nid = s.event_nid
        OFFSET 0
    ) AS e
    WHERE s.room_nid = $1::int
        AND (
            COALESCE(b.live, s.state_group_before), COALESCE(a.live, s.state_group_after),
            claimed_depth(s.depth, s.topological_ordering), prev_nids(s.event_nid, s.prev_events, s.prev_distance), auth_nids(s.event_nid, s.auth_events, s.auth_distance_1, s.auth_distance_2, s.auth_distance_3, s.auth_distance_4), s.topological_ordering, s.origin_server_ts, s.audience, s.redacted_by, s.relates_to, s.sender_nid, s.type_nid, s.state_key_nid, s.rel_type_nid, s.membership, s.soft_failed, s.redacted_form, s.ineffective, s.replaces, s.has_url, s.after_gap, s.event_id, s.rejected, s.superseded, s.refused, s.describes_room
        ) IS DISTINCT FROM (
            e.state_group_before, e.state_group_after,
            claimed_depth(e.depth, e.topological_ordering), prev_nids(e.event_nid, e.prev_events, e.prev_distance), auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4), e.topological_ordering, e.origin_server_ts, e.audience, e.redacted_by, e.relates_to, e.sender_nid, e.type_nid, e.state_key_nid, e.rel_type_nid, e.membership, e.soft_failed, e.redacted_form, e.ineffective, e.replaces, e.has_url, e.after_gap, e.event_id, e.rejected, e.superseded, e.refused, e.describes_room
        )
)
UPDATE events e
SET state_group_before = s.group_before,
    state_group_after = s.group_after,
    depth = s.depth,
    auth_distance_1 = s.auth_distance_1, auth_distance_2 = s.auth_distance_2, auth_distance_3 = s.auth_distance_3, auth_distance_4 = s.auth_distance_4, auth_events = s.auth_events, prev_distance = s.prev_distance, prev_events = s.prev_events,
    topological_ordering = s.topological_ordering, origin_server_ts = s.origin_server_ts, audience = s.audience, redacted_by = s.redacted_by, relates_to = s.relates_to, sender_nid = s.sender_nid, type_nid = s.type_nid, state_key_nid = s.state_key_nid, rel_type_nid = s.rel_type_nid, membership = s.membership, soft_failed = s.soft_failed, redacted_form = s.redacted_form, ineffective = s.ineffective, replaces = s.replaces, has_url = s.has_url, after_gap = s.after_gap, event_id = s.event_id, rejected = s.rejected, superseded = s.superseded, refused = s.refused, describes_room = s.describes_room
FROM found s
WHERE e.event_nid = s.event_nid
