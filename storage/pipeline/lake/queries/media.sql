-- The events that name an mxc URL.
SELECT url, day, event_id, room_id, sender
FROM {daily_media}
ORDER BY url, day, event_id
