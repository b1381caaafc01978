ALTER TABLE events
    ALTER COLUMN prev_events DROP NOT NULL,
    ALTER COLUMN auth_events DROP NOT NULL,
    ADD COLUMN prev_distance int,
    ADD COLUMN auth_distance_1 int,
    ADD COLUMN auth_distance_2 int,
    ADD COLUMN auth_distance_3 int,
    ADD COLUMN auth_distance_4 int;
ALTER TABLE events
    ADD CONSTRAINT events_distance_check CHECK (
        (prev_events IS NULL OR prev_distance IS NULL)
        AND (auth_events IS NULL OR auth_distance_1 IS NULL)
    ) NOT VALID;
COMMENT ON COLUMN events.prev_events IS
    'Parents, in the order of the PDU: nids of events or of missing_events. NULL: prev_distance '
    'has them. Read both by prev_nids.';
COMMENT ON COLUMN events.auth_events IS
    'Auth events, in the order of the PDU. All are stored. NULL: auth_distance_1 to 4 have them. '
    'Read all by auth_nids.';
COMMENT ON COLUMN events.prev_distance IS
    'event_nid minus the nid of the only parent. An array of one takes 29 bytes. NULL: see '
    'prev_events; if that is NULL as well, there is no parent, as for outliers.';
COMMENT ON COLUMN events.auth_distance_1 IS
    'event_nid minus the nid of the first auth event; the next columns have those of up to three '
    'more. An array of three takes 45 bytes. NULL: see auth_events; if that is NULL as well, the '
    'event has no auth events.';
COMMENT ON COLUMN events.auth_distance_2 IS 'Of the second auth event. NULL: there is none.';
COMMENT ON COLUMN events.auth_distance_3 IS 'Of the third auth event. NULL: there is none.';
COMMENT ON COLUMN events.auth_distance_4 IS 'Of the fourth auth event. NULL: there is none.';

CREATE FUNCTION prev_nids(event_nid bigint, prev_events bigint[], prev_distance int)
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE($2, array_remove(ARRAY[$1 - $3], NULL))
$$;
COMMENT ON FUNCTION prev_nids IS
    'The parents of an event, in the order of the PDU, from the columns of these names.';

CREATE FUNCTION auth_nids(
    event_nid bigint, auth_events bigint[], auth_distance_1 int, auth_distance_2 int,
    auth_distance_3 int, auth_distance_4 int
) RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE($2, array_remove(ARRAY[$1 - $3, $1 - $4, $1 - $5, $1 - $6], NULL))
$$;
COMMENT ON FUNCTION auth_nids IS
    'The auth events of an event, in the order of the PDU, from the columns of these names.';

CREATE OR REPLACE FUNCTION is_out_of_band(event events) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT $1.outlier AND $1.rejected IS NULL AND COALESCE($1.membership <> 5, false)
        AND COALESCE($1.auth_events = '{}', $1.auth_distance_1 IS NULL)
$$;

CREATE OR REPLACE FUNCTION reordered_across(room_nid int, token bigint[], forwards boolean, rows_max bigint)
RETURNS TABLE (event_nid bigint, topological_ordering bigint, stream_ordering bigint, levels bigint)
LANGUAGE plpgsql STABLE ROWS 10 AS $$
DECLARE
    base CONSTANT int := CASE WHEN token[1] = 1 THEN 2 ELSE cardinality(token) - 2 END;
    readable CONSTANT bigint := rows_max / (cardinality(token) / 3);
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM reordered_events m
        WHERE m.room_nid = $1 AND m.moves > token[2] LIMIT readable + 1) AS m) > readable THEN
        RAISE EXCEPTION 'more than % moves of events since the token was made',
            readable USING ERRCODE = 'RS004';
    END IF;
    RETURN QUERY
    WITH level AS MATERIALIZED (
        SELECT i AS number, token[3 * i + 2] AS moves, token[3 * i + 3] AS topological,
            token[3 * i + 4] AS stream
        FROM generate_series(0, cardinality(token) / 3 - 1) AS i
    ),
    moved AS MATERIALIZED (
        SELECT m.moves, m.event_nid, m.topological_before
        FROM reordered_events m
        WHERE m.room_nid = $1 AND m.moves > token[2]
    ),
    was AS (  -- their positions as of each level
        SELECT DISTINCT ON (l.number, m.event_nid) l.number, m.event_nid, m.topological_before
        FROM level l
        JOIN moved m ON m.moves > l.moves
        ORDER BY l.number, m.event_nid, m.moves
    ),
    below AS MATERIALIZED (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events,
            bit_or(CASE WHEN at.below THEN 1::bigint << l.number ELSE 0 END) AS levels
        FROM (SELECT DISTINCT m.event_nid FROM moved m) AS m
        CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = m.event_nid OFFSET 0) AS e
        CROSS JOIN level l
        LEFT JOIN was w ON w.number = l.number AND w.event_nid = m.event_nid
        CROSS JOIN LATERAL (
            SELECT (COALESCE(w.topological_before, e.topological_ordering),
                e.stream_ordering) <= (l.topological, l.stream) AS below
        ) AS at
        WHERE (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
        GROUP BY e.event_nid, e.topological_ordering, e.stream_ordering, e.prev_events,
            e.prev_distance
        HAVING CASE WHEN token[1] = 1 THEN bool_and(at.below) ELSE bool_or(at.below) END
    ),
    found AS (
        SELECT b.event_nid, b.topological_ordering, b.stream_ordering, b.levels
        FROM below b
        UNION ALL
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering, b.levels
        FROM below b
        CROSS JOIN unnest(b.prev_events) AS n (event_nid)
        CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = n.event_nid OFFSET 0) AS e
        WHERE forwards AND e.room_nid = $1 AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
    )
    SELECT f.event_nid, f.topological_ordering, f.stream_ordering, bit_or(f.levels)
    FROM found f
    GROUP BY f.event_nid, f.topological_ordering, f.stream_ordering;
END
$$;

CREATE OR REPLACE FUNCTION ancestors_of(room_nid int, event_nids bigint[], wanted int,
    rows_max int) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 100 AS $$
DECLARE
    -- the front, latest first: events reached and not returned yet, never more than may still be
    -- returned
    nids bigint[];
    orders bigint[];
    streams bigint[];
    accepted boolean[];
    parents bigint[];
    left_over int := $3;
    looked_up int;
BEGIN
    SELECT array_agg(f.event_nid), array_agg(f.topological_ordering), array_agg(f.stream_ordering),
        array_agg(f.rejected IS NULL)
    INTO nids, orders, streams, accepted
    FROM (
        SELECT *
        -- by the primary key: the sort order would choose another index
        FROM (SELECT * FROM events e WHERE e.event_nid = ANY ($2) OFFSET 0) AS e
        WHERE e.room_nid = $1 AND NOT e.outlier
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $4
    ) AS f;
    looked_up := cardinality(nids);
    WHILE left_over > 0 AND cardinality(nids) > 0 LOOP
        IF accepted[1] THEN
            RETURN NEXT nids[1];
            left_over := left_over - 1;
        END IF;
        EXIT WHEN left_over = 0 OR looked_up >= $4;
        SELECT prev_nids(e.event_nid, e.prev_events, e.prev_distance) INTO parents
        FROM events e
        WHERE e.event_nid = nids[1];
        IF parents <@ nids[2:] THEN  -- reached already, as by siblings of this event
            nids := nids[2:];
            orders := orders[2:];
            streams := streams[2:];
            accepted := accepted[2:];
            CONTINUE;
        END IF;
        looked_up := looked_up + cardinality(parents);
        IF cardinality(parents) = 1 AND cardinality(nids) = 1 THEN  -- nearly always
            SELECT ARRAY[e.event_nid], ARRAY[e.topological_ordering], ARRAY[e.stream_ordering],
                ARRAY[e.rejected IS NULL]
            INTO nids, orders, streams, accepted
            FROM (SELECT * FROM events e WHERE e.event_nid = parents[1] OFFSET 0) AS e
            WHERE e.room_nid = $1 AND NOT e.outlier;
        ELSE
            SELECT array_agg(f.event_nid), array_agg(f.topological_ordering),
                array_agg(f.stream_ordering), array_agg(f.is_accepted)
            INTO nids, orders, streams, accepted
            FROM (
                SELECT f.*, count(*) FILTER (WHERE f.is_accepted)
                    OVER (ORDER BY f.topological_ordering DESC, f.stream_ordering DESC) AS place
                FROM (
                    SELECT * FROM unnest(nids[2:], orders[2:], streams[2:], accepted[2:])
                        AS f (event_nid, topological_ordering, stream_ordering, is_accepted)
                    UNION
                    SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
                        e.rejected IS NULL
                    FROM (SELECT * FROM events e WHERE e.event_nid = ANY (parents) OFFSET 0) AS e
                    WHERE e.room_nid = $1 AND NOT e.outlier
                ) AS f
                ORDER BY f.topological_ordering DESC, f.stream_ordering DESC
            ) AS f
            WHERE f.place <= left_over;
        END IF;
    END LOOP;
END
$$;

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
                        AND p.depth >= $5 AS is_given, p.room_nid, p.outlier
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

DROP TRIGGER events_auth_events_once ON events;
CREATE TRIGGER events_auth_events_once
    BEFORE UPDATE OF auth_events, auth_distance_1, auth_distance_2, auth_distance_3,
        auth_distance_4 ON events
    FOR EACH ROW
    WHEN (
        auth_nids(OLD.event_nid, OLD.auth_events, OLD.auth_distance_1, OLD.auth_distance_2,
            OLD.auth_distance_3, OLD.auth_distance_4)
        IS DISTINCT FROM auth_nids(NEW.event_nid, NEW.auth_events, NEW.auth_distance_1,
            NEW.auth_distance_2, NEW.auth_distance_3, NEW.auth_distance_4)
        AND NOT is_out_of_band(OLD)
    )
    EXECUTE FUNCTION keep_auth_events();

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
        EXECUTE format(
            'GRANT UPDATE (prev_distance, auth_distance_1, auth_distance_2, auth_distance_3, '
            'auth_distance_4) ON events TO %I', one.rolname
        );
    END LOOP;
END
$$;
