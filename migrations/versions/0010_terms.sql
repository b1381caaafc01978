ALTER TABLE moved_events RENAME TO reordered_events;
ALTER TABLE reordered_events RENAME CONSTRAINT moved_events_pkey TO reordered_events_pkey;
ALTER TABLE reordered_events RENAME CONSTRAINT moved_events_moves_check TO reordered_events_moves_check;
ALTER TABLE purge_leavings RENAME TO purge_retained_events;
ALTER TABLE purge_retained_events RENAME CONSTRAINT purge_leavings_pkey TO purge_retained_events_pkey;
ALTER TABLE past_visibility RENAME COLUMN stretches TO topological_ranges;
ALTER TABLE missing_events RENAME COLUMN covered TO superseded;
ALTER TABLE rooms RENAME COLUMN strays TO out_of_range;
DO $$
DECLARE
    one record;
BEGIN
    FOR one IN  -- Postgres 18 has a name for each NOT NULL
        SELECT c.conrelid::regclass AS relation, c.conname AS old, format('%s_%s_not_null', r.relname, a.attname) AS new
        FROM pg_constraint c
        JOIN pg_class r ON r.oid = c.conrelid
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
        WHERE c.contype = 'n' AND c.conrelid = ANY ('{reordered_events,purge_retained_events,past_visibility,missing_events,rooms}'::regclass[])
    LOOP
        IF one.old <> one.new THEN
            EXECUTE format('ALTER TABLE %s RENAME CONSTRAINT %I TO %I', one.relation, one.old, one.new);
        END IF;
    END LOOP;
END
$$;
DROP FUNCTION moved_across(int, bigint[], boolean, bigint);
DROP FUNCTION stretches_of(int, int, int8multirange, bigint, bigint, bigint);
DROP FUNCTION sight_near(int, int, int8multirange, bigint, bigint, bigint);
DROP FUNCTION stretches_apart(int, int8multirange, int8multirange, bigint, int8multirange);
DROP FUNCTION sight_of(int, int);
DROP FUNCTION has_lost_footing(bigint[], bigint[], bigint[], text[], bigint[], bigint[]);
COMMENT ON COLUMN deployment.incarnation IS
    'Which cluster, database and timeline this was when a store was opened last. In another one it was restored (storage/streams/restore_detection.py).';
COMMENT ON COLUMN rooms.moves IS
    'How many writes have moved events of the room in its topological order (reordered_events). 0 nearly everywhere: where depths are honest none does.';
COMMENT ON COLUMN rooms.removals IS
    'Grows by one with each transaction that throws away events or state groups of the room, or takes events out of its timeline. A writer that '
    'planned on an older number is refused only if what it builds on has gone (dependencies_purged).';
COMMENT ON COLUMN rooms.out_of_range IS
    'Stretches of the topological order with events that stand where audiences.opened_topological does not let one look for them: '
    'of long forks, of history. They are looked through by every reader, so that pages miss nothing. What no local user may ever see, as '
    'history from before the first of them came that was not shared, is not among them.';
COMMENT ON INDEX events_room_time_idx IS 'Serves: the event nearest to a time (storage/queries/timestamp_to_event.py).';
COMMENT ON INDEX events_received_ts_idx IS 'Serves: the events received within a time (storage/pipeline/source/filters.py).';
COMMENT ON TABLE reordered_events IS
    'Where events stood before they moved up (storage/graph/topological_ordering.py), so that a pagination token means what it meant when it was made. The place '
    'of an event as of a token is that of its first row with more moves than the token has, else the one where it stands.';
COMMENT ON COLUMN reordered_events.moves IS 'rooms.moves as this write made it.';
COMMENT ON COLUMN reordered_events.topological_before IS 'Less than in the next row of the event, or than events.topological_ordering. Its stream_ordering stays as it is.';
COMMENT ON CONSTRAINT reordered_events_pkey ON reordered_events IS 'Serves: what has moved in a room since a pagination token was made.';
COMMENT ON COLUMN missing_events.superseded IS
    'An accepted live event stands on it, directly or over events that were not accepted: it will be no forward extremity. Also where those were '
    'purged since, and where it was held and purged itself.';
COMMENT ON TABLE dropped_extremities IS
    'Events that would be forward extremities but for the limit of them, and whose state the others covered (storage/persist/plan/extremity_limit.py), or '
    'because what named them was purged. An event that was dropped is never one again.';
COMMENT ON COLUMN past_visibility.topological_ranges IS
    'Where in the topological order the events of these audiences stand, as disjoint_topological_ranges tells: what audiences.opened_topological says '
    'of old numbers does not change any more.';
COMMENT ON INDEX past_visibility_order_idx IS 'Serves: the rows near to a place in the order (visibility_near).';
COMMENT ON TABLE audiences IS
    'The numbers in use. They lie on lines: the main line follows the current state in steps of 2^40, and the numbers between two '
    'steps are for lines that branch off there (storage/visibility/audience_numbering.py).';
COMMENT ON COLUMN audiences.opened_topological IS
    'On the main line: where the topological order had come to when the number was opened. It grows with the numbers, so events of '
    'this number, and of what branches off it, lie between this and the next number''s, give or take order_slack(), or in rooms.out_of_range. '
    'NULL: a number that branches off, or stands for one state alone.';
COMMENT ON CONSTRAINT audiences_pkey ON audiences IS
    'Serves: give a number to a new audience; where in the order the audiences of a reader lie (topological_ranges_of).';
COMMENT ON TABLE lost_positions IS
    'Gaps that were left in the streams when the database had been restored: positions between were given, if at all, to facts that are gone, and '
    'are never given again (storage/streams/restore_detection.py).';
COMMENT ON COLUMN purge_jobs.phase IS 'What it is at: history, deltas, groups, sweep, room; done.';
COMMENT ON TABLE purge_retained_events IS
    'What a purge has left of the history it took: events that became outliers, or stay in the timeline, because something may need them. Those that '
    'nothing needs go at its end; the others leave this table when they come back in the timeline.';
COMMENT ON COLUMN purge_retained_events.local IS 'Sent by a local user: goes only if a purge is to take those, too.';
COMMENT ON CONSTRAINT purge_retained_events_pkey ON purge_retained_events IS 'Serves: the end of a purge.';
CREATE FUNCTION dependencies_purged(
    standing bigint[], held bigint[], state_groups bigint[], event_ids text[], event_nids bigint[], settled bigint[]
) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (  -- $1: in the timeline still
        SELECT
        FROM unnest($1) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x WHERE x.event_nid = n.event_nid AND NOT x.outlier OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $2: held still
        SELECT
        FROM unnest($2) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x WHERE x.event_nid = n.event_nid OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $3: there still
        SELECT
        FROM unnest($3) AS n (state_group)
        LEFT JOIN LATERAL (SELECT true AS there FROM state_groups x WHERE x.state_group = n.state_group OFFSET 0) AS g ON true
        WHERE g.there IS NULL
    ) OR EXISTS (  -- $4 and $5: not waited for under another number
        SELECT
        FROM unnest($4, $5) AS n (event_id, event_nid)
        CROSS JOIN LATERAL (SELECT x.event_nid FROM missing_events x WHERE x.event_id = n.event_id OFFSET 0) AS m
        WHERE m.event_nid <> n.event_nid
    ) OR EXISTS (  -- nor by other redactions than $6
        SELECT
        FROM unnest($4) AS n (event_id)
        CROSS JOIN LATERAL (SELECT x.redaction_nid FROM waiting_redactions x WHERE x.target_event_id = n.event_id OFFSET 0) AS w
        WHERE w.redaction_nid <> ALL ($6)
    );
END
$$;
COMMENT ON FUNCTION dependencies_purged IS
    'Whether something has gone that a write builds on (storage/persist/write/dependencies.py). VOLATILE, so it sees what was committed while the write waited for '
    'its room, which the statement that calls it does not.';
CREATE FUNCTION visibility_of(room_nid int, principal_nid int)
RETURNS TABLE (
    own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange, shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT own.audiences, shared.audiences, world.audiences,
        CASE WHEN own.joined_count > 0 THEN 9223372036854775807 ELSE own.last_join_topological END,
        CASE WHEN own.invited_audiences IS NULL THEN own.audiences ELSE own.audiences - own.invited_audiences END,
        CASE
            WHEN own.invited_audiences IS NULL AND upper_inf(own.audiences) AND range_merge(own.audiences)::int8multirange = own.audiences
                THEN lower(own.audiences)
        END,
        $2,
        CASE WHEN COALESCE(own.first_audience, shared.first_audience, world.first_audience) IS NOT NULL
            THEN int8multirange(int8range(NULL, GREATEST(own.first_audience, shared.first_audience, world.first_audience)))
        END
    FROM (VALUES ($1)) AS room (room_nid)
    LEFT JOIN visibility own ON own.room_nid = room.room_nid AND own.principal_nid = $2
    LEFT JOIN visibility shared ON shared.room_nid = room.room_nid AND shared.principal_nid = 2
    LEFT JOIN visibility world ON world.room_nid = room.room_nid AND world.principal_nid = 1
$$;
COMMENT ON FUNCTION visibility_of IS
    'What a principal may see in a room, always one row: the audiences of its own, those under "shared", those readable by the world, '
    'and below which topological ordering the shared ones are a user''s own. For user_sees and server_sees. Also those of its own in '
    'which it is joined, for was_there; and the first of them, if it is in all that follow, so that a comparison of two numbers does for '
    'nearly every event what looking into the ranges does. "unread" are the audiences that past_visibility tells of, NULL for none: these '
    'columns say nothing of them, and saw_before does.';
COMMENT ON FUNCTION user_sees IS
    'Whether a local user may see an event. The one place where this is decided: by the audience that was settled when it was persisted. '
    'All but the event is as visibility_of or topological_ranges_of tell. '
    'CASE, as the planner takes half of the events for visible then; it would expect one in a hundred otherwise, and sort instead of '
    'following an index.';
COMMENT ON FUNCTION order_slack IS
    'How far an event may stand outside of its audience''s place in the order before it counts as a stray (storage/visibility/audience_ranges.py): '
    'what servers send at the same time crosses by a little.';
CREATE FUNCTION disjoint_topological_ranges(
    room_nid int, seen int8multirange, shared_audiences int8multirange, shared_before bigint, out_of_range int8multirange
) RETURNS int8multirange
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT range_agg(part.orders)
        FROM (
            SELECT int8range((
                SELECT a.opened_topological - order_slack()
                FROM audiences a
                WHERE a.room_nid = $1 AND a.audience <= (lower(runs.run) >> 40) << 40 AND a.opened_topological IS NOT NULL
                ORDER BY a.audience DESC
                LIMIT 1
            ), (
                SELECT a.opened_topological + order_slack() + 1
                FROM audiences a
                WHERE a.room_nid = $1 AND a.audience >= ((upper(runs.run) + 1099511627775) >> 40) << 40 AND a.opened_topological IS NOT NULL
                ORDER BY a.audience
                LIMIT 1
            )) * int8range(NULL, runs.below) AS orders
            FROM (
                SELECT unnest($2) AS run, NULL::bigint AS below
                UNION ALL
                SELECT unnest($3), $4 WHERE $4 < 9223372036854775807
            ) AS runs
            UNION ALL
            SELECT unnest($5) WHERE $2 <> '{}' OR $4 IS NOT NULL
        ) AS part
    );
END
$$;
COMMENT ON FUNCTION disjoint_topological_ranges IS
    'For topological_ranges_of, of a reader who came and went, or where events stray: two probes of audiences for each range. plpgsql, so that what '
    'few readers need is planned and set up only when it is.';
CREATE FUNCTION visibility_near(room_nid int, principal_nid int, out_of_range int8multirange, place bigint, below bigint, above bigint)
RETURNS int8multirange[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    last CONSTANT bigint := 9223372036854775807;
    at_place CONSTANT bigint := LEAST(place, last - 1000000);
    seen record;  -- the row of visibility: first of the reader, then of everybody and of what is shared
    past_audiences int8multirange;  -- what the rows of past_visibility near to the place tell
    past_invited int8multirange;
    past_ranges int8multirange;
    lowest bigint;
    highest bigint;
    beginning bigint;
    next bigint;  -- the first audience after those
    told int8multirange;  -- the audiences that were read
    sought int8multirange;  -- those of which it is to be found out where they stand
    own int8multirange;
    joined int8multirange;
    shared int8multirange;
    world int8multirange;
    unread int8multirange := '{}';
    shared_before bigint;
    sought_shared int8multirange;
    sought_others int8multirange := '{}';
    topological_ranges int8multirange := out_of_range + int8multirange(int8range(at_place, at_place + 1));
BEGIN
    FOR seen IN
        SELECT v.principal_nid, v.audiences, v.invited_audiences, v.first_audience, v.joined_count, v.last_join_topological
        FROM visibility v
        WHERE v.room_nid = $1 AND v.principal_nid IN ($2, 1, 2)
        ORDER BY v.principal_nid = $2 DESC
    LOOP
        told := seen.audiences;
        sought := seen.audiences;
        past_audiences := '{}';
        past_invited := '{}';
        past_ranges := '{}';
        IF seen.first_audience IS NOT NULL THEN
            beginning := CASE WHEN above > 0 THEN (
                SELECT max(p.first_audience)
                FROM past_visibility p
                WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.first_audience <= COALESCE((
                    SELECT (o.first_audience >> 40) << 40  -- what is before the block of such a row was over when the block was opened
                    FROM past_visibility o
                    WHERE o.room_nid = $1 AND o.principal_nid = seen.principal_nid AND o.opened_topological < at_place - order_slack()
                    ORDER BY o.opened_topological DESC, o.first_audience DESC
                    LIMIT 1
                ), 0)
            ) END;
            SELECT COALESCE(range_agg(p.audiences), '{}'), COALESCE(range_agg(p.invited_audiences), '{}'), COALESCE(range_agg(p.topological_ranges), '{}'),
                min(p.first_audience), max(p.first_audience)
            INTO past_audiences, past_invited, past_ranges, lowest, highest
            FROM (
                (
                    SELECT p.*
                    FROM past_visibility p
                    WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.opened_topological <= at_place + order_slack()
                    ORDER BY p.opened_topological DESC, p.first_audience DESC
                    LIMIT CASE WHEN below > 0 THEN below / 16 + 4 ELSE 0 END
                )
                UNION ALL
                (
                    SELECT p.*
                    FROM past_visibility p
                    WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.first_audience >= beginning
                    ORDER BY p.first_audience
                    LIMIT CASE WHEN above > 0 THEN above / 16 + 4 ELSE 0 END
                )
            ) AS p;
            next := (
                SELECT p.first_audience
                FROM past_visibility p
                WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.first_audience > highest
                ORDER BY p.first_audience
                LIMIT 1
            );
            told := told + past_audiences;
            IF highest IS NULL THEN  -- nothing was read
                unread := unread + int8multirange(int8range(NULL, seen.first_audience));
                sought := int8multirange(int8range(NULL, NULL));
            END IF;
            IF next IS NOT NULL THEN
                unread := unread + int8multirange(int8range(next, seen.first_audience));
                sought := CASE WHEN above > 0 THEN int8multirange(int8range(next, NULL)) ELSE '{}' END;
            END IF;
            IF lowest > 0 THEN
                unread := unread + int8multirange(int8range(NULL, lowest));
                sought := sought + CASE WHEN below > 0 THEN int8multirange(int8range(NULL, lowest)) ELSE '{}' END;
            END IF;
        END IF;
        CASE
            WHEN seen.principal_nid = 2 THEN
                shared := told;
                IF shared_before = last THEN
                    sought_others := sought_others + sought;
                    topological_ranges := topological_ranges + past_ranges;
                ELSIF shared_before IS NOT NULL THEN
                    sought_shared := sought;
                    topological_ranges := topological_ranges + past_ranges * int8multirange(int8range(NULL, shared_before));
                END IF;
            WHEN seen.principal_nid = 1 THEN
                world := told;
                sought_others := sought_others + sought;
                topological_ranges := topological_ranges + past_ranges;
            ELSE
                own := told;
                joined := told - COALESCE(seen.invited_audiences, '{}') - past_invited;
                shared_before := CASE WHEN seen.joined_count > 0 THEN last ELSE seen.last_join_topological END;
                sought_others := sought_others + sought;
                topological_ranges := topological_ranges + past_ranges;
        END CASE;
    END LOOP;
    topological_ranges := topological_ranges + COALESCE(disjoint_topological_ranges($1, sought_others, sought_shared, shared_before, '{}'), '{}');
    RETURN ARRAY[topological_ranges, own, shared, world, joined, unread];
END
$$;
COMMENT ON FUNCTION visibility_near IS
    'For topological_ranges_of, of a reader with rows in past_visibility: the stretches; the audiences of its own, those under "shared" and those '
    'readable by the world; those that it is joined in; and those that were not read. Of past_visibility as many rows are read as hold what is '
    'wanted on each side of the place, if every range has two events: who joins sees that, and the leaving. Some more are read, as those '
    'nearest to the place may lie on its other side, within order_slack(). Where the audiences that were not '
    'read may lie is one stretch on each side, so nothing is missed where that is not so. The place itself is always looked at, so that '
    'there is a stretch to tell the rest with.';
CREATE FUNCTION topological_ranges_of(room_nid int, principal_nid int, out_of_range int8multirange, place bigint, below bigint, above bigint)
RETURNS TABLE (
    lowest bigint, highest bigint, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange, shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT COALESCE(lower(part.stretch), 0), COALESCE(upper(part.stretch) - 1, 9223372036854775807),
        COALESCE(part.near[2], part.own_audiences), COALESCE(part.near[3], part.shared_audiences),
        COALESCE(part.near[4], part.world_audiences), part.shared_before, COALESCE(part.near[5], part.joined_audiences), part.joined_since,
        part.reader_nid, COALESCE(part.near[6], part.unread)
    FROM (
        SELECT s.*, unnest(CASE
            WHEN s.near IS NOT NULL THEN s.near[1]
            WHEN $3 = '{}' AND (s.shared_before IS NULL OR s.shared_before = 9223372036854775807)
                AND upper_inf(s.seen) AND range_merge(s.seen)::int8multirange = s.seen  -- who came once and is there
                THEN int8multirange(int8range((
                    SELECT a.opened_topological - order_slack()
                    FROM audiences a
                    WHERE a.room_nid = $1 AND a.audience <= (lower(s.seen) >> 40) << 40 AND a.opened_topological IS NOT NULL
                    ORDER BY a.audience DESC
                    LIMIT 1
                ), NULL))
            ELSE disjoint_topological_ranges($1, s.seen, s.shared_audiences, s.shared_before, $3)
        END) AS stretch
        FROM (
            SELECT sight.*, COALESCE(sight.own_audiences, '{}') + COALESCE(sight.world_audiences, '{}') + CASE
                WHEN sight.shared_before = 9223372036854775807 THEN COALESCE(sight.shared_audiences, '{}') ELSE '{}'
            END AS seen,
            CASE WHEN sight.unread IS NOT NULL AND NOT COALESCE(  -- not where what is shared is all there is
                sight.shared_before = 9223372036854775807 AND sight.shared_audiences @> int8range(1099511627776, NULL), false
            ) THEN visibility_near($1, $2, $3, $4, $5, $6) END AS near
            FROM visibility_of($1, $2) AS sight
            OFFSET 0
        ) AS s
    ) AS part
$$;
COMMENT ON FUNCTION topological_ranges_of IS
    'The stretches of a room''s topological order outside of which there is nothing that user_sees, apart from each other, with what '
    'visibility_of tells. The strays are those of the room. "below" and "above" are how many events are wanted before a place and after it: on a side '
    'where none are, stretches may be missing. What is hidden within the stretches (little) is for user_sees to leave out. It is put '
    'into the queries, whose plans are kept: for who came once and is there it costs them one probe, and calls nothing.';
CREATE FUNCTION reordered_across(room_nid int, token bigint[], forwards boolean, rows_max bigint)
RETURNS TABLE (event_nid bigint, topological_ordering bigint, stream_ordering bigint, levels bigint)
LANGUAGE plpgsql STABLE ROWS 10 AS $$
DECLARE
    base CONSTANT int := CASE WHEN token[1] = 1 THEN 2 ELSE cardinality(token) - 2 END;
    readable CONSTANT bigint := rows_max / (cardinality(token) / 3);
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM reordered_events m WHERE m.room_nid = $1 AND m.moves > token[2] LIMIT readable + 1) AS m) > readable THEN
        RAISE EXCEPTION 'more than % moves of events since the token was made', readable USING ERRCODE = 'RS004';
    END IF;
    RETURN QUERY
    WITH level AS MATERIALIZED (
        SELECT i AS number, token[3 * i + 2] AS moves, token[3 * i + 3] AS topological, token[3 * i + 4] AS stream
        FROM generate_series(0, cardinality(token) / 3 - 1) AS i
    ),
    moved AS MATERIALIZED (
        SELECT m.moves, m.event_nid, m.topological_before
        FROM reordered_events m
        WHERE m.room_nid = $1 AND m.moves > token[2]
    ),
    was AS (  -- where they stood as of each level
        SELECT DISTINCT ON (l.number, m.event_nid) l.number, m.event_nid, m.topological_before
        FROM level l
        JOIN moved m ON m.moves > l.moves
        ORDER BY l.number, m.event_nid, m.moves
    ),
    below AS MATERIALIZED (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.prev_events,
            bit_or(CASE WHEN at.below THEN 1::bigint << l.number ELSE 0 END) AS levels
        FROM (SELECT DISTINCT m.event_nid FROM moved m) AS m
        CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = m.event_nid OFFSET 0) AS e
        CROSS JOIN level l
        LEFT JOIN was w ON w.number = l.number AND w.event_nid = m.event_nid
        CROSS JOIN LATERAL (
            SELECT (COALESCE(w.topological_before, e.topological_ordering), e.stream_ordering) <= (l.topological, l.stream) AS below
        ) AS at
        WHERE (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
        GROUP BY e.event_nid, e.topological_ordering, e.stream_ordering, e.prev_events
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
        WHERE forwards AND e.room_nid = $1 AND NOT e.outlier AND (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
    )
    SELECT f.event_nid, f.topological_ordering, f.stream_ordering, bit_or(f.levels)
    FROM found f
    GROUP BY f.event_nid, f.topological_ordering, f.stream_ordering;
END
$$;
COMMENT ON FUNCTION reordered_across IS
    'The events of a room that stand above the place of a pagination token, and belong below it, as they stood there when it was made. The token '
    'is 1 (below is what lies below all of its levels) or 0 (below any), then of each level: moves, topological, stream (storage/streams/tokens.py). '
    '"levels" has a bit for each level below which the event belongs. "forwards": with their parents that stand above it. Those have arrived since '
    '(else they would have stood below, too), and whoever walks forwards and has met a child is not to meet its parent after it. '
    'Reads what has moved since then, for each level; refuses (RS004) where that is more than "rows_max". plpgsql, so that it costs nothing where it '
    'is not called.';
UPDATE purge_jobs SET phase = 'sweep' WHERE phase = 'leavings';
