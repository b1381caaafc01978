-- Per event and mxc URL that its JSON names anywhere. JSON with escapes is written again first.
SELECT DISTINCT day, url, event_id, room_id, sender
FROM (
    SELECT
        *,
        explode(
            regexp_extract_all(
                CASE
                    WHEN contains(text, chr(92)) THEN coalesce(to_json(try_parse_json(text)), text)
                    ELSE text
                END,
                'mxc://[^/"<> ]+/[A-Za-z0-9_-]+',
                0
            )
        ) AS url
    FROM (SELECT *, CAST(pdu AS STRING) AS text FROM {events})
)
