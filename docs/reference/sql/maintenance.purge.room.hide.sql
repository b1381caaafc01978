-- Sent by storage.maintenance.purge.room.hide and storage.maintenance.purge.room._take. Parameters:
-- $1 int.

WITH
member AS (DELETE FROM memberships WHERE room_nid = $1::int),
out_of_band AS (DELETE FROM out_of_band_memberships WHERE room_nid = $1::int),
sight AS (DELETE FROM visibility WHERE room_nid = $1::int),
past AS (DELETE FROM past_visibility WHERE room_nid = $1::int),
state AS (DELETE FROM current_state WHERE room_nid = $1::int),
receipt AS (DELETE FROM receipts WHERE room_nid = $1::int),
account AS (DELETE FROM account_data WHERE room_nid = $1::int),
sent AS (DELETE FROM sliding_rooms WHERE room_nid = $1::int),
partial AS (DELETE FROM partial_rooms WHERE room_nid = $1::int),
fact AS (
    DELETE FROM published_facts
    WHERE key = (SELECT room_id FROM rooms WHERE room_nid = $1::int)
),
-- up to where local users came and went; users who are still joined (with --force) sync from the
-- beginning wherever they are
purged AS (
    INSERT INTO purged_streams (stream_name, purged_upto)
    SELECT 'events', GREATEST(max(m.stream_ordering),
        max(r.last_stream_ordering) FILTER (WHERE m.membership >= 3 /* KNOCK */))
    FROM rooms r
    JOIN memberships m USING (room_nid)
    WHERE r.room_nid = $1::int
    HAVING count(*) > 0
    ON CONFLICT (stream_name) DO UPDATE SET purged_upto = GREATEST(purged_streams.purged_upto,
        EXCLUDED.purged_upto)
)
UPDATE rooms
SET forward_extremities = '{}',
    current_state_group = NULL,
    last_stream_ordering = NULL,
    current_audience = 0,
    is_partial = false,
    completed_at = NULL,
    joined_count = 0,
    invited_count = 0,
    out_of_range = '{}',
    removals = removals + 1
WHERE room_nid = $1::int
