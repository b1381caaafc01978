-- Old ranges of visibility in rows of their own (storage/visibility/past.py), and the functions that read them. Those that the release
-- before uses stay beside them until 0005.

ALTER TABLE visibility ADD COLUMN first_audience bigint;

COMMENT ON COLUMN visibility.first_audience IS
    'The row tells which audiences the principal is in from this one on. Those below are in past_visibility. NULL: there are none.';

CREATE TABLE past_visibility (
    first_audience bigint NOT NULL,
    opened_topological bigint NOT NULL,
    room_nid int NOT NULL,
    principal_nid int NOT NULL,
    audiences int8multirange NOT NULL,
    invited_audiences int8multirange,
    stretches int8multirange NOT NULL,
    CONSTRAINT past_visibility_pkey PRIMARY KEY (room_nid, principal_nid, first_audience)
);
COMMENT ON TABLE past_visibility IS
    'The older ranges of a principal that has come and gone often, a few to a row (storage/visibility/past.py). A row tells which audiences the '
    'principal is in from first_audience up to the next row''s, the last one up to visibility.first_audience.';
COMMENT ON COLUMN past_visibility.opened_topological IS
    'Where the topological order had come to when first_audience was opened. It grows with first_audience.';
COMMENT ON COLUMN past_visibility.audiences IS 'As in visibility, of these audiences only.';
COMMENT ON COLUMN past_visibility.invited_audiences IS 'Likewise.';
COMMENT ON COLUMN past_visibility.stretches IS
    'Where in the topological order the events of these audiences stand, as stretches_apart tells: what audiences.opened_topological says '
    'of old numbers does not change any more.';
COMMENT ON CONSTRAINT past_visibility_pkey ON past_visibility IS 'Serves: whether a principal is in an old audience (saw_before).';
CREATE INDEX past_visibility_order_idx ON past_visibility (room_nid, principal_nid, opened_topological, first_audience);
COMMENT ON INDEX past_visibility_order_idx IS 'Serves: the rows near to a place in the order (sight_near).';

CREATE VIEW whole_visibility AS
SELECT v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count,
    v.audiences + COALESCE(past.audiences, '{}') AS audiences,
    COALESCE(v.invited_audiences, '{}') + COALESCE(past.invited_audiences, '{}') AS invited_audiences
FROM visibility v
LEFT JOIN LATERAL (
    SELECT range_agg(p.audiences * p.told) AS audiences, range_agg(p.invited_audiences * p.told) AS invited_audiences
    FROM (
        SELECT o.audiences, o.invited_audiences,
            int8multirange(int8range(o.first_audience, lead(o.first_audience, 1, v.first_audience) OVER (ORDER BY o.first_audience))) AS told
        FROM past_visibility o
        WHERE o.room_nid = v.room_nid AND o.principal_nid = v.principal_nid AND o.first_audience < v.first_audience
    ) AS p
) AS past ON v.first_audience IS NOT NULL;
COMMENT ON VIEW whole_visibility IS
    'All audiences of each principal in one value, however many: for maintenance and export. invited_audiences is empty for none.';

DROP FUNCTION sight_of(int, int);

CREATE FUNCTION sight_of(room_nid int, principal_nid int)
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
COMMENT ON FUNCTION sight_of IS
    'What a principal may see in a room, always one row: the audiences of its own, those under "shared", those readable by the world, '
    'and below which topological ordering the shared ones are a user''s own. For user_sees and server_sees. Also those of its own in '
    'which it is joined, for was_there; and the first of them, if it is in all that follow, so that a comparison of two numbers does for '
    'nearly every event what looking into the ranges does. "unread" are the audiences that past_visibility tells of, NULL for none: these '
    'columns say nothing of them, and saw_before does.';

CREATE FUNCTION saw_before(room_nid int, principal_nid int, audience bigint, shared boolean) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 4 AS $$
BEGIN
    RETURN COALESCE((
        SELECT p.audiences @> $3
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = $2 AND p.first_audience <= $3
        ORDER BY p.first_audience DESC
        LIMIT 1
    ), false) OR ($4 AND COALESCE((
        SELECT p.audiences @> $3
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = 2 AND p.first_audience <= $3
        ORDER BY p.first_audience DESC
        LIMIT 1
    ), false)) OR COALESCE((
        SELECT p.audiences @> $3
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = 1 AND p.first_audience <= $3
        ORDER BY p.first_audience DESC
        LIMIT 1
    ), false);
END
$$;
COMMENT ON FUNCTION saw_before IS
    'Whether past_visibility has an audience among those of a principal, of everybody, or, if the shared ones are the principal''s, among '
    'these. One probe of an index each. plpgsql, so that only an event that needs it costs anything.';

CREATE FUNCTION joined_before(room_nid int, principal_nid int, audience bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 4 AS $$
BEGIN
    RETURN COALESCE((
        SELECT p.audiences @> $3 AND NOT COALESCE(p.invited_audiences @> $3, false)
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = $2 AND p.first_audience <= $3
        ORDER BY p.first_audience DESC
        LIMIT 1
    ), false);
END
$$;
COMMENT ON FUNCTION joined_before IS 'Whether past_visibility has an audience among those that a principal is joined in. For was_there_before.';

CREATE FUNCTION user_sees(
    event events, joined_since bigint, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange,
    shared_before bigint, reader_nid int, unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT $1.outlier AND $1.rejected IS NULL AND NOT $1.soft_failed AND NOT $1.ineffective AND CASE
        WHEN $1.audience >= $2 OR $3 @> $1.audience OR ($4 @> $1.audience AND $1.topological_ordering < $6) OR $5 @> $1.audience THEN true
        WHEN $8 @> $1.audience THEN saw_before($1.room_nid, $7, $1.audience, $1.topological_ordering < $6)
        ELSE false
    END
$$;
COMMENT ON FUNCTION user_sees(events, bigint, int8multirange, int8multirange, int8multirange, bigint, int, int8multirange) IS
    'Whether a local user may see an event. The one place where this is decided: by the audience that was settled when it was persisted. '
    'All but the event is as sight_of or stretches_of tell. '
    'CASE, as the planner takes half of the events for visible then; it would expect one in a hundred otherwise, and sort instead of '
    'following an index.';

CREATE FUNCTION was_there_before(event events, reader_nid int, unread int8multirange) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN $3 @> $1.audience THEN joined_before($1.room_nid, $2, $1.audience) ELSE false END
$$;
COMMENT ON FUNCTION was_there_before IS
    'The same for the audiences that were not read. Apart, so that it is asked last: of events whose sender was erased.';

CREATE FUNCTION user_sees_relation(
    event events, joined_since bigint, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange,
    shared_before bigint, reader_nid int, unread int8multirange, ignored int[]
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT $1.redacted_by IS NULL AND user_sees($1, $2, $3, $4, $5, $6, $7, $8) AND not_ignored($1, $9)
$$;
COMMENT ON FUNCTION user_sees_relation(events, bigint, int8multirange, int8multirange, int8multirange, bigint, int, int8multirange, int[]) IS
    'Whether an event relates to anything in the eyes of a user: a redaction takes that away. So does the erasure of its sender for whoever '
    'was not there; the queries look at that themselves, as a function with a subquery is not put into them.';

CREATE FUNCTION sight_near(room_nid int, principal_nid int, strays int8multirange, place bigint, below bigint, above bigint)
RETURNS int8multirange[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    last CONSTANT bigint := 9223372036854775807;
    at_place CONSTANT bigint := LEAST(place, last - 1000000);
    seen record;  -- the row of visibility: first of the reader, then of everybody and of what is shared
    past_audiences int8multirange;  -- what the rows of past_visibility near to the place tell
    past_invited int8multirange;
    past_stretches int8multirange;
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
    stretches int8multirange := strays + int8multirange(int8range(at_place, at_place + 1));
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
        past_stretches := '{}';
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
            SELECT COALESCE(range_agg(p.audiences), '{}'), COALESCE(range_agg(p.invited_audiences), '{}'), COALESCE(range_agg(p.stretches), '{}'),
                min(p.first_audience), max(p.first_audience)
            INTO past_audiences, past_invited, past_stretches, lowest, highest
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
                    stretches := stretches + past_stretches;
                ELSIF shared_before IS NOT NULL THEN
                    sought_shared := sought;
                    stretches := stretches + past_stretches * int8multirange(int8range(NULL, shared_before));
                END IF;
            WHEN seen.principal_nid = 1 THEN
                world := told;
                sought_others := sought_others + sought;
                stretches := stretches + past_stretches;
            ELSE
                own := told;
                joined := told - COALESCE(seen.invited_audiences, '{}') - past_invited;
                shared_before := CASE WHEN seen.joined_count > 0 THEN last ELSE seen.last_join_topological END;
                sought_others := sought_others + sought;
                stretches := stretches + past_stretches;
        END CASE;
    END LOOP;
    stretches := stretches + COALESCE(stretches_apart($1, sought_others, sought_shared, shared_before, '{}'), '{}');
    RETURN ARRAY[stretches, own, shared, world, joined, unread];
END
$$;
COMMENT ON FUNCTION sight_near IS
    'For stretches_of, of a reader with rows in past_visibility: the stretches; the audiences of its own, those under "shared" and those '
    'readable by the world; those that it is joined in; and those that were not read. Of past_visibility as many rows are read as hold what is '
    'wanted on each side of the place, if every range has two events: who joins sees that, and the leaving. Some more are read, as those '
    'nearest to the place may lie on its other side, within order_slack(). Where the audiences that were not '
    'read may lie is one stretch on each side, so nothing is missed where that is not so. The place itself is always looked at, so that '
    'there is a stretch to tell the rest with.';

CREATE FUNCTION stretches_of(room_nid int, principal_nid int, strays int8multirange, place bigint, below bigint, above bigint)
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
            ELSE stretches_apart($1, s.seen, s.shared_audiences, s.shared_before, $3)
        END) AS stretch
        FROM (
            SELECT sight.*, COALESCE(sight.own_audiences, '{}') + COALESCE(sight.world_audiences, '{}') + CASE
                WHEN sight.shared_before = 9223372036854775807 THEN COALESCE(sight.shared_audiences, '{}') ELSE '{}'
            END AS seen,
            CASE WHEN sight.unread IS NOT NULL AND NOT COALESCE(  -- not where what is shared is all there is
                sight.shared_before = 9223372036854775807 AND sight.shared_audiences @> int8range(1099511627776, NULL), false
            ) THEN sight_near($1, $2, $3, $4, $5, $6) END AS near
            FROM sight_of($1, $2) AS sight
            OFFSET 0
        ) AS s
    ) AS part
$$;
COMMENT ON FUNCTION stretches_of(int, int, int8multirange, bigint, bigint, bigint) IS
    'The stretches of a room''s topological order outside of which there is nothing that user_sees, apart from each other, with what '
    'sight_of tells. The strays are those of the room. "below" and "above" are how many events are wanted before a place and after it: on a side '
    'where none are, stretches may be missing. What is hidden within the stretches (little) is for user_sees to leave out. It is put '
    'into the queries, whose plans are kept: for who came once and is there it costs them one probe, and calls nothing.';

CREATE FUNCTION server_sees(
    event events, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange, reader_nid int,
    unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT $1.outlier AND $1.rejected IS NULL AND CASE
        WHEN $2 @> $1.audience OR $3 @> $1.audience OR $4 @> $1.audience THEN true
        WHEN $6 @> $1.audience THEN saw_before($1.room_nid, $5, $1.audience, true)
        ELSE false
    END
$$;
COMMENT ON FUNCTION server_sees(events, int8multirange, int8multirange, int8multirange, int, int8multirange) IS
    'Whether history visibility allows a server the whole event; otherwise it gets the redacted form. server_gets is tested as well.';

CREATE FUNCTION got_before(room_nid int, principal_nid int, audience bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 4 AS $$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = $2 AND p.audiences <> COALESCE(p.invited_audiences, '{}')
    ) OR saw_before($1, 1, $3, false);
END
$$;
COMMENT ON FUNCTION got_before IS
    'Whether past_visibility has any audience that a server was joined in, or this one among those readable by the world. For server_gets.';

CREATE FUNCTION server_gets(
    event events, joined_audiences int8multirange, world_audiences int8multirange, reader_nid int, unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN $2 <> '{}' OR $3 @> $1.audience THEN true
        WHEN $5 IS NOT NULL THEN got_before($1.room_nid, $4, $1.audience)
        ELSE false
    END
$$;
COMMENT ON FUNCTION server_gets(events, int8multirange, int8multirange, int, int8multirange) IS
    'Whether a server gets an event in any form. A server that was never joined to the room gets world-readable events only. It was joined '
    'if it is in any audience otherwise than by an invitation.';

-- Who may what: three roles without login, for logins to be members of; whoever migrates owns everything. Run by migration 0002, and again by
-- `room-storage migrate --grants`. It leaves exactly these privileges, whatever there was before.
--
--   PREFIX_runtime  a homeserver's processes: INSERT and SELECT, UPDATE of what may change. No event is deleted, no bytes change.
--   PREFIX_reader   SELECT: room-storage stats, verify, explain.
--   PREFIX_purger   what takes away or mends: purge, censor, gc, verify --repair, rebuild-visibility.
--
-- The prefix is the setting room_storage.role_prefix; "none": no roles.

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''), 'room_storage');
    runtime text := prefix || '_runtime';
    reader text := prefix || '_reader';
    purger text := prefix || '_purger';
    role text;
    missing text[] := '{}';
    one record;
BEGIN
    IF prefix = 'none' THEN
        RETURN;
    END IF;
    FOREACH role IN ARRAY ARRAY[runtime, reader, purger] LOOP
        CONTINUE WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = role);
        BEGIN
            EXECUTE format('CREATE ROLE %I NOLOGIN', role);
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;  -- another database of this server does the same at this moment
            WHEN insufficient_privilege THEN missing := missing || role;
        END;
    END LOOP;
    IF missing <> '{}' THEN
        RAISE WARNING 'the roles % do not exist and % may not make them: the schema serves without, its owner may everything',
            array_to_string(missing, ', '), current_user
            USING HINT = format('as a role with CREATEROLE: %s; then run `room-storage migrate --grants` as %s',
                (SELECT string_agg(format('CREATE ROLE %I NOLOGIN', m), '; ') FROM unnest(missing) AS m), current_user);
        RETURN;
    END IF;
    FOREACH role IN ARRAY ARRAY[runtime, reader, purger] LOOP
        IF NOT has_schema_privilege(role, current_schema(), 'USAGE') THEN
            EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), role);
        END IF;
    END LOOP;
    FOR one IN
        SELECT *
        FROM (VALUES
            ('alembic_version', 'SELECT', 'SELECT'),
            ('schema_compatibility', 'SELECT', 'SELECT'),
            ('background_jobs', 'SELECT', 'SELECT'),
            ('deployment', 'SELECT, INSERT, UPDATE (server_name, incarnation)', 'SELECT, UPDATE (incarnation)'),
            ('principals', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('event_types', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('state_keys', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('rooms',
                'SELECT, INSERT, UPDATE (write_version, next_audience, current_state_group, last_stream_ordering, max_topological_ordering, '
                'current_audience, moves, joined_count, invited_count, forward_extremities, strays)',
                'SELECT, UPDATE, DELETE'),
            ('events',
                'SELECT, INSERT, UPDATE (stream_ordering, topological_ordering, state_group_before, state_group_after, audience, redacted_by, '
                'writer_nid, outlier, backfilled, soft_failed, ineffective, after_gap, rejected, prev_events)',
                'SELECT, UPDATE, DELETE'),
            ('moved_events', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('missing_events', 'SELECT, INSERT, UPDATE (covered, child_nids), DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('gap_failures', 'SELECT, INSERT, UPDATE, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('dropped_extremities', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('waiting_redactions', 'SELECT, INSERT, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('state_groups', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('current_state', 'SELECT, INSERT, UPDATE (event_nid, membership), DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('state_deltas', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('memberships', 'SELECT, INSERT, UPDATE (stream_ordering, event_nid, writer_nid, membership)', 'SELECT, INSERT, UPDATE, DELETE'),
            ('outlier_memberships', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('auth_chains', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('auth_chain_links', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('visibility',
                'SELECT, INSERT, UPDATE (last_join_topological, joined_count, invited_count, audiences, invited_audiences, '
                'first_audience)',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('past_visibility', 'SELECT, INSERT, UPDATE (audiences, invited_audiences, stretches)', 'SELECT, INSERT, UPDATE, DELETE'),
            ('audiences', 'SELECT, INSERT, UPDATE (branches, continued)', 'SELECT, INSERT, UPDATE, DELETE'),
            ('erased_users', 'SELECT, INSERT, DELETE', 'SELECT'),
            ('stream_positions', 'SELECT, INSERT, UPDATE', 'SELECT, INSERT, UPDATE'),
            ('lost_positions', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('purged_streams', 'SELECT', 'SELECT, INSERT, UPDATE'),
            ('writers', 'SELECT, INSERT, UPDATE (schema_revision)', 'SELECT, INSERT, UPDATE (schema_revision)'),
            ('account_data', 'SELECT, INSERT, UPDATE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('to_device', 'SELECT, INSERT, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('receipts', 'SELECT, INSERT, UPDATE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('cache_invalidations', 'SELECT, INSERT', 'SELECT, INSERT, DELETE'),
            ('import_events', 'SELECT, INSERT, DELETE, TRUNCATE', 'SELECT'),
            ('purge_jobs', 'SELECT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('purge_leavings', 'SELECT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('stored_events', 'SELECT', 'SELECT'),
            ('whole_visibility', 'SELECT', 'SELECT')
        ) AS t (name, for_runtime, for_purger)
        WHERE to_regclass(quote_ident(t.name)) IS NOT NULL
    LOOP
        EXECUTE format('REVOKE ALL ON %I FROM %I, %I, %I', one.name, runtime, reader, purger);
        EXECUTE format('GRANT %s ON %I TO %I', one.for_runtime, one.name, runtime);
        EXECUTE format('GRANT SELECT ON %I TO %I', one.name, reader);
        EXECUTE format('GRANT %s ON %I TO %I', one.for_purger, one.name, purger);
    END LOOP;
    FOR one IN
        SELECT c.oid::regclass AS name
        FROM unnest(ARRAY['principal_nids', 'type_nids', 'state_key_nids', 'room_nids', 'event_nids', 'events_stream', 'state_group_nids',
            'auth_chain_nids', 'writer_nids', 'account_data_stream', 'to_device_stream', 'receipts_stream', 'caches_stream',
            'import_numbers', 'purge_job_ids']) AS s (name)
        JOIN pg_class c ON c.oid = to_regclass(quote_ident(s.name))
    LOOP
        EXECUTE format('GRANT USAGE, SELECT, UPDATE ON SEQUENCE %s TO %I, %I', one.name, runtime, purger);
        EXECUTE format('GRANT SELECT ON SEQUENCE %s TO %I', one.name, reader);
    END LOOP;
END
$$;
