-- Per day and server: the lag of its new events, and how often they fork the room.
-- The lag is the time from the sender's clock to the receipt. An event forks if one of the same day
-- arrived before it and has the same topological position or a later one.
-- A clock may claim any 64-bit number. The lag from before -2^53 would not fit, so it counts from there.
SELECT
    day,
    server,
    count(*) AS events,
    CAST(percentile(lag_ms, 0.5) AS BIGINT) AS median_lag_ms,
    CAST(percentile(lag_ms, 0.95) AS BIGINT) AS p95_lag_ms,
    count_if(topological_ordering <= reached) AS forks,
    count_if(prev_count > 1) AS merges,
    count_if(rejected IS NOT NULL OR soft_failed) AS refused
FROM (
    SELECT
        *,
        substr(sender, instr(sender, ':') + 1) AS server,
        received_ts - greatest(origin_server_ts, -9007199254740991) AS lag_ms,
        max(topological_ordering) OVER (
            PARTITION BY day, room_id
            ORDER BY arrived
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS reached
    FROM {events}
    WHERE origin = 'live'
)
GROUP BY day, server
