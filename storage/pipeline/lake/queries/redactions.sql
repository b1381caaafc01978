-- The share of redacted events of each sender who sent 20 or more.
SELECT
    sender,
    sum(sent) AS sent,
    sum(redacted) AS redacted,
    round(try_divide(sum(redacted), sum(sent)), 3) AS ratio
FROM {daily_senders}
GROUP BY sender
HAVING sum(sent) >= 20
ORDER BY ratio DESC, redacted DESC, sender
