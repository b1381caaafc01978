-- Senders who wrote in many rooms on one day.
SELECT day, sender, count(*) AS rooms, sum(messages) AS messages
FROM {daily_senders}
WHERE messages > 0
GROUP BY day, sender
ORDER BY rooms DESC, messages DESC, day DESC, sender
