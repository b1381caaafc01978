-- Per day and text of at least 10 characters that came 3 times or more; `example` has the text.
SELECT
    day,
    sha2(body, 256) AS digest,
    min(event_id) AS example,
    count(*) AS times,
    count(DISTINCT sender) AS senders,
    count(DISTINCT room_id) AS rooms
FROM (
    SELECT *, get_json_object(CAST(pdu AS STRING), '$.content.body') AS body
    FROM {events}
    WHERE type = 'm.room.message' AND NOT redacted AND rejected IS NULL AND NOT soft_failed
)
WHERE length(body) >= 10
GROUP BY day, body
HAVING count(*) >= 3
