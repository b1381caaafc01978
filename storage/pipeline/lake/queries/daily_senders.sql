-- Per day of receipt, room and sender: what they sent. `sent` leaves out state and redactions.
SELECT
    day,
    room_id,
    sender,
    substr(sender, instr(sender, ':') + 1) AS server,
    count(*) AS events,
    sum(length(pdu)) AS bytes,
    count_if(
        type IN ('m.room.message', 'm.room.encrypted')
        AND NOT redacted AND rejected IS NULL AND NOT soft_failed
    ) AS messages,
    count_if(state_key IS NULL AND type <> 'm.room.redaction') AS sent,
    count_if(state_key IS NULL AND type <> 'm.room.redaction' AND redacted) AS redacted
FROM {events}
GROUP BY day, room_id, sender
