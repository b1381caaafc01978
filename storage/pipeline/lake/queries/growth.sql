-- Events and bytes of each day, then of the next 90: a straight line through the last 28 whole
-- days, never below 0. The last day with events may not be over, so the line leaves it out.
WITH daily AS (
    SELECT day, sum(events) AS events, sum(bytes) AS bytes
    FROM {daily_senders}
    GROUP BY day
),
span AS (
    SELECT
        max(day) AS last,
        greatest(min(day), date_sub(max(day), 28)) AS first
    FROM daily
),
counted AS (
    SELECT n.day, datediff(n.day, n.last) AS x,
        coalesce(d.events, 0) AS events, coalesce(d.bytes, 0) AS bytes
    FROM (
        SELECT last, explode(sequence(first, greatest(date_sub(last, 1), first))) AS day
        FROM span
        WHERE last IS NOT NULL
    ) n
    LEFT JOIN daily d ON d.day = n.day
),
-- Sums of whole numbers, which do not depend on the order of rows.
sums AS (
    SELECT count(*) AS n, sum(x) AS x, sum(x * x) AS xx,
        sum(events) AS events, sum(x * events) AS x_events,
        sum(bytes) AS bytes, sum(x * bytes) AS x_bytes
    FROM counted
),
lines AS (
    SELECT *,
        coalesce(try_divide(n * x_events - x * events, n * xx - x * x), 0) AS more_events,
        coalesce(try_divide(n * x_bytes - x * bytes, n * xx - x * x), 0) AS more_bytes
    FROM sums
)
SELECT day, events, bytes, false AS forecast
FROM daily
UNION ALL
SELECT
    date_add(last, ahead) AS day,
    CAST(round(greatest(events / n + more_events * (ahead - x / n), 0)) AS BIGINT) AS events,
    CAST(round(greatest(bytes / n + more_bytes * (ahead - x / n), 0)) AS BIGINT) AS bytes,
    true AS forecast
FROM lines
CROSS JOIN span
CROSS JOIN (SELECT explode(sequence(1, 90)) AS ahead)
WHERE n > 0
ORDER BY day
