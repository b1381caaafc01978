ALTER TABLE events ADD COLUMN in_order_ts bigint DEFAULT -9223372036854775808;
ALTER TABLE rooms ADD COLUMN in_order_ts bigint NOT NULL DEFAULT -9223372036854775808;
COMMENT ON COLUMN events.in_order_ts IS
    'NULL, as for most events: a live event in time order. Its origin_server_ts is larger than '
    'that of each such event before it in the stream. Of any other event: rooms.in_order_ts when '
    'it took its stream position. The default, the smallest number: a row of an earlier release. '
    'NULL for outliers, or the default.';
COMMENT ON COLUMN rooms.in_order_ts IS
    'At least the origin_server_ts of each event in time order (events.in_order_ts). The default, '
    'the smallest number: there is none.';

CREATE FUNCTION in_order_position(room_nid int, earliest_ts bigint, low bigint, high bigint)
RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    first bigint;
    middle bigint;
    at bigint;
    reached bigint;
BEGIN
    WHILE low < high LOOP
        middle := low + (high - low) / 2;
        SELECT e.stream_ordering, COALESCE(e.in_order_ts, e.origin_server_ts) INTO at, reached
        FROM events e
        WHERE e.room_nid = $1 AND NOT e.outlier AND NOT e.backfilled
            AND e.stream_ordering >= middle AND e.stream_ordering < high
        ORDER BY e.stream_ordering
        LIMIT 1;
        IF at IS NOT NULL AND reached < $2 THEN
            low := at + 1;
        ELSE
            first := COALESCE(at, first);
            high := middle;
        END IF;
    END LOOP;
    RETURN first;
END
$$;
COMMENT ON FUNCTION in_order_position IS
    'The position, from "low" to before "high", of the first live event up to which the events in '
    'time order have reached this origin_server_ts. So it is in time order itself, unless the one '
    'that was is purged. NULL: there is none. By bisection, because what each live event says '
    'of the time reached never falls.';

CREATE FUNCTION in_order_positions(room_nid int, earliest_ts bigint, latest_ts bigint)
RETURNS TABLE (first bigint, last bigint)
LANGUAGE plpgsql STABLE ROWS 1 AS $$
DECLARE
    beyond bigint;
    reached bigint;
BEGIN
    SELECT min(e.stream_ordering), max(e.stream_ordering) + 1 INTO first, beyond
    FROM events e
    WHERE e.room_nid = $1 AND NOT e.outlier AND NOT e.backfilled;
    first := in_order_position($1, $2, first, beyond);
    IF $3 < 9223372036854775807 THEN
        beyond := COALESCE(in_order_position($1, $3 + 1, first, beyond), beyond);
    END IF;
    SELECT COALESCE(e.in_order_ts, e.origin_server_ts) INTO reached
    FROM events e
    WHERE e.room_nid = $1 AND NOT e.outlier AND NOT e.backfilled
        AND e.stream_ordering >= first AND e.stream_ordering < beyond
    ORDER BY e.stream_ordering DESC
    LIMIT 1;
    last := in_order_position($1, reached, first, beyond);
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION in_order_positions IS
    'The first and the last position of the events in time order whose origin_server_ts is within '
    'these times, both included; NULL if there is none. Between them are all of these, and events '
    'out of time order, whose number has no bound.';

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname
        FROM pg_roles r
        WHERE r.rolname = prefix || '_runtime'
    LOOP
        EXECUTE format('GRANT UPDATE (in_order_ts) ON events TO %I', one.rolname);
        EXECUTE format('GRANT UPDATE (in_order_ts) ON rooms TO %I', one.rolname);
    END LOOP;
END
$$;
