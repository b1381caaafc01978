ALTER TABLE events ALTER COLUMN depth DROP NOT NULL;
ALTER TABLE events ADD CONSTRAINT events_depth_check
    CHECK (depth IS NOT NULL OR topological_ordering IS NOT NULL) NOT VALID;
COMMENT ON COLUMN events.depth IS
    'As claimed by the sender (clamped to int8). Never used for order. NULL: it equals '
    'topological_ordering, as where all depths are honest. Read both by claimed_depth.';

CREATE FUNCTION claimed_depth(depth bigint, topological_ordering bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE($1, $2)
$$;
COMMENT ON FUNCTION claimed_depth IS
    'The depth that the sender of an event claims, from the columns of these names.';

CREATE OR REPLACE VIEW stored_events AS
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.stream_ordering,
    e.topological_ordering, claimed_depth(e.depth, e.topological_ordering) AS depth,
    b.event_id AS redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding,
        e.json
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by;

CREATE OR REPLACE FUNCTION events_between(
    room_nid int, earliest bigint[], latest bigint[], wanted int, min_depth bigint, rows_max int
) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 20 AS $$
DECLARE
    -- all reached events, in the order of the walk; from `at` on their parents have not been looked
    -- up
    queue bigint[];
    orders bigint[];
    given boolean[];
    -- the reached events that the walk could reach again: lower in the topological order than an
    -- event that is still in the queue
    seen bigint[];
    seen_orders bigint[];
    seen_max int := 128;
    at int := 1;
    upto int;
    left_over int := $4;
    looked_up int := 0;
BEGIN
    SELECT array_agg(e.event_nid ORDER BY i.place),
        array_agg(e.topological_ordering ORDER BY i.place)
    INTO queue, orders
    FROM unnest($3) WITH ORDINALITY AS i (event_nid, place)
    CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.event_nid = i.event_nid OFFSET 0) AS e
    WHERE i.event_nid <> ALL ($2) AND e.room_nid = $1 AND NOT e.outlier;
    SELECT array_agg(e.event_nid), array_agg(e.topological_ordering)
    INTO seen, seen_orders
    FROM (SELECT * FROM events e WHERE e.event_nid = ANY ($2 || $3) OFFSET 0) AS e
    WHERE e.room_nid = $1 AND NOT e.outlier;
    WHILE left_over > 0 AND looked_up < $6 AND at <= cardinality(queue) LOOP
        upto := LEAST(cardinality(queue), at + left_over - 1, at + ($6 - looked_up - 1) / 20);
        SELECT looked_up + COALESCE(sum(cardinality(
            prev_nids(e.event_nid, e.prev_events, e.prev_distance))), 0)
        INTO looked_up
        FROM events e
        WHERE e.event_nid = ANY (queue[at:upto]);
        SELECT queue || array_agg(f.event_nid), orders || array_agg(f.topological_ordering),
            array_agg(f.is_given),
            seen || array_agg(f.event_nid), seen_orders || array_agg(f.topological_ordering)
        INTO queue, orders, given, seen, seen_orders
        FROM (
            SELECT f.*
            FROM (
                SELECT DISTINCT ON (p.event_nid) p.event_nid, p.topological_ordering, p.is_given,
                    c.place, i.place AS parent
                FROM unnest(queue[at:upto]) WITH ORDINALITY AS c (event_nid, place)
                CROSS JOIN LATERAL (
                    SELECT prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events
                    FROM events e
                    WHERE e.event_nid = c.event_nid
                    OFFSET 0
                ) AS e
                CROSS JOIN unnest(e.prev_events) WITH ORDINALITY AS i (event_nid, place)
                CROSS JOIN LATERAL (
                    SELECT p.event_nid, p.topological_ordering, p.rejected IS NULL
                        AND claimed_depth(p.depth, p.topological_ordering) >= $5 AS is_given,
                        p.room_nid, p.outlier
                    FROM events p
                    WHERE p.event_nid = i.event_nid
                    OFFSET 0
                ) AS p
                WHERE i.event_nid <> ALL (seen) AND p.room_nid = $1 AND NOT p.outlier
                ORDER BY p.event_nid, c.place, i.place
            ) AS f
            ORDER BY f.place, f.parent
        ) AS f;
        at := upto + 1;
        RETURN QUERY SELECT f.event_nid
            FROM unnest(queue[cardinality(queue) - cardinality(given) + 1:],
                given) WITH ORDINALITY AS f (event_nid, is_given, place)
            WHERE f.is_given
            ORDER BY f.place
            LIMIT left_over;
        left_over := left_over - COALESCE(cardinality(array_positions(given, true)), 0);
        IF cardinality(seen) > seen_max THEN
            SELECT array_agg(s.event_nid), array_agg(s.topological_ordering)
            INTO seen, seen_orders
            FROM unnest(seen, seen_orders) AS s (event_nid, topological_ordering)
            WHERE s.topological_ordering < (SELECT max(q) FROM unnest(orders[at:]) AS q);
            seen := COALESCE(seen, '{}');
            seen_orders := COALESCE(seen_orders, '{}');
            seen_max := GREATEST(128, 2 * cardinality(seen));
        END IF;
    END LOOP;
END
$$;

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
        EXECUTE format('GRANT UPDATE (depth) ON events TO %I', one.rolname);
    END LOOP;
END
$$;
