-- Sent by storage.rebuild.swap._keep_columns. Parameters: $1 int, $2 int.

UPDATE pg_temp.events s
SET ineffective = e.ineffective, redacted_by = e.redacted_by
FROM events e
WHERE e.event_nid = s.event_nid AND s.room_nid = $2::int AND e.event_nid IN (
    SELECT unnest(ARRAY[target.event_nid, target.redacted_by])
    FROM events target
    JOIN pg_temp.events x USING (event_nid)
    WHERE target.room_nid = $1::int AND NOT target.outlier AND target.encoding = 1
        AND NOT target.redacted_form AND target.redacted_by IS NOT NULL AND x.redacted_by IS NULL
)
