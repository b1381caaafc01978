-- Roles and privileges: three roles without login. Make the login roles members of them.
-- The role that migrates owns the whole schema.
-- Migration 0001 runs this script; `room-storage migrate --grants` runs it again.
-- Afterwards the roles have exactly these privileges, whatever they had before.
--
--   PREFIX_runtime  the processes of a homeserver: INSERT, SELECT, and UPDATE of mutable columns.
--                   They cannot delete events or change event bytes.
--   PREFIX_reader   SELECT: room-storage stats, verify, explain.
--   PREFIX_purger   deletions and repairs: purge, censor, gc, verify --repair, rebuild-visibility.
--
-- The setting room_storage.role_prefix is the prefix; with "none" there are no roles.

DO $$
DECLARE
    prefix text := COALESCE(
        NULLIF(current_setting('room_storage.role_prefix', true), ''), 'room_storage'
    );
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
            -- Another database of this server creates the role at the same time.
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN missing := missing || role;
        END;
    END LOOP;
    IF missing <> '{}' THEN
        RAISE WARNING 'the roles % do not exist and % may not make them: '
            'the schema serves without, its owner may everything',
            array_to_string(missing, ', '), current_user
            USING HINT = format(
                'as a role with CREATEROLE: %s; then run `room-storage migrate --grants` as %s',
                (SELECT string_agg(format('CREATE ROLE %I NOLOGIN', m), '; ')
                    FROM unnest(missing) AS m),
                current_user);
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
            ('deployment',
                'SELECT, INSERT, UPDATE (server_name, incarnation)',
                'SELECT, UPDATE (incarnation)'),
            ('principals', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE'),
            ('event_types', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE'),
            ('state_keys', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE'),
            ('rooms',
                'SELECT, INSERT, UPDATE (write_version, next_audience, current_state_group, '
                'last_stream_ordering, max_topological_ordering, '
                'current_audience, moves, joined_count, invited_count, forward_extremities, '
                'out_of_range, is_partial, in_order_ts)',
                'SELECT, UPDATE, DELETE'),
            ('partial_rooms', 'SELECT, INSERT, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('events',
                'SELECT, INSERT, UPDATE (stream_ordering, topological_ordering, depth, '
                'state_group_before, state_group_after, audience, redacted_by, '
                'arrival_ordering, writer_nid, outlier, backfilled, soft_failed, ineffective, '
                'after_gap, superseded, rejected, refused, prev_events, prev_distance, '
                'auth_events, auth_distance_1, auth_distance_2, auth_distance_3, '
                'auth_distance_4, in_order_ts)',
                'SELECT, UPDATE, DELETE'),
            ('dictionaries', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('archive_packs', 'SELECT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('archive_garbage', 'SELECT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('reordered_events', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('missing_events',
                'SELECT, INSERT, UPDATE (superseded, child_nids), DELETE',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('gap_failures', 'SELECT, INSERT, UPDATE, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('dropped_extremities', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('waiting_redactions', 'SELECT, INSERT, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('state_groups', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('current_state',
                'SELECT, INSERT, UPDATE (event_nid, membership), DELETE',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('state_deltas', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('memberships',
                'SELECT, INSERT, UPDATE (stream_ordering, event_nid, writer_nid, membership, '
                'forgotten)',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('out_of_band_memberships',
                'SELECT, INSERT, UPDATE (event_nid, stripped_state), DELETE',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('outlier_memberships', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('local_transactions', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('auth_chains', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('auth_chain_links', 'SELECT, INSERT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('visibility',
                'SELECT, INSERT, UPDATE (last_join_topological, joined_count, invited_count, '
                'audiences, invited_audiences, '
                'first_audience)',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('past_visibility',
                'SELECT, INSERT, UPDATE (audiences, invited_audiences, topological_ranges)',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('audiences',
                'SELECT, INSERT, UPDATE (branches, continued)',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('erased_users', 'SELECT, INSERT, DELETE', 'SELECT'),
            ('stream_positions', 'SELECT, INSERT, UPDATE', 'SELECT, INSERT, UPDATE'),
            ('lost_positions', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('purged_streams', 'SELECT', 'SELECT, INSERT, UPDATE'),
            ('writers',
                'SELECT, INSERT, UPDATE (schema_revision)',
                'SELECT, INSERT, UPDATE (schema_revision)'),
            ('account_data', 'SELECT, INSERT, UPDATE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('to_device', 'SELECT, INSERT, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('receipts', 'SELECT, INSERT, UPDATE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('cache_invalidations', 'SELECT, INSERT', 'SELECT, INSERT, DELETE'),
            ('defined_streams', 'SELECT, INSERT', 'SELECT, INSERT'),
            ('published_facts',
                'SELECT, INSERT, UPDATE (value), DELETE',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('cursors', 'SELECT, INSERT, UPDATE (position)', 'SELECT, INSERT, UPDATE, DELETE'),
            ('sliding_connections',
                'SELECT, INSERT, UPDATE, DELETE',
                'SELECT, INSERT, UPDATE, DELETE'),
            ('sliding_rooms', 'SELECT, INSERT, UPDATE, DELETE', 'SELECT, INSERT, UPDATE, DELETE'),
            ('import_events', 'SELECT, INSERT, DELETE, TRUNCATE', 'SELECT'),
            ('purge_jobs', 'SELECT', 'SELECT, INSERT, UPDATE, DELETE'),
            ('purge_retained_events', 'SELECT', 'SELECT, INSERT, UPDATE, DELETE'),
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
        FROM unnest(ARRAY[
            'principal_nids', 'type_nids', 'state_key_nids', 'room_nids', 'event_nids',
            'events_stream', 'state_group_nids', 'writer_nids',
            'account_data_stream', 'to_device_stream', 'receipts_stream', 'caches_stream',
            'published_facts_stream', 'sliding_connection_nids', 'import_numbers', 'purge_job_ids',
            'archive_pack_numbers'
        ]) AS s (name)
        JOIN pg_class c ON c.oid = to_regclass(quote_ident(s.name))
    LOOP
        EXECUTE format(
            'GRANT USAGE, SELECT, UPDATE ON SEQUENCE %s TO %I, %I', one.name, runtime, purger);
        EXECUTE format('GRANT SELECT ON SEQUENCE %s TO %I', one.name, reader);
    END LOOP;
END
$$;
