CREATE TABLE defined_streams (
    stream_name text COLLATE "C" NOT NULL,
    CONSTRAINT defined_streams_pkey PRIMARY KEY (stream_name)
);
COMMENT ON TABLE defined_streams IS
    'The streams of the homeserver''s own facts, such as typing, by name (Store.define_stream). '
    'All processes follow them. Their facts are in published_facts.';
COMMENT ON CONSTRAINT defined_streams_pkey ON defined_streams IS
    'Serves: the streams that a process has to enter.';

CREATE SEQUENCE published_facts_stream AS bigint START 2;
COMMENT ON SEQUENCE published_facts_stream IS
    'Positions of all defined_streams, so that defining one needs no privilege.';
CREATE TABLE published_facts (
    stream_id bigint NOT NULL,
    published_ts bigint NOT NULL,
    writer_nid smallint NOT NULL,
    stream_name text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    wakes text[] COLLATE "C" NOT NULL,
    CONSTRAINT published_facts_pkey PRIMARY KEY (stream_name, stream_id)
);
COMMENT ON TABLE published_facts IS
    'Facts of defined_streams. The latest of each key stays. A later fact of the key deletes it '
    'after a minute, so that all processes have followed it by then.';
COMMENT ON COLUMN published_facts.published_ts IS
    'When it was published. Serves: deletion of superseded and expired facts.';
COMMENT ON COLUMN published_facts.key IS
    'The subject of the fact, as the homeserver chose it, up to 512 bytes. A purge of a room '
    'deletes the facts whose key is its id. An erasure of a user empties those of the user.';
COMMENT ON COLUMN published_facts.value IS 'JSON of any type.';
COMMENT ON COLUMN published_facts.wakes IS 'The user and room ids whose waiting syncs it wakes.';
COMMENT ON CONSTRAINT published_facts_pkey ON published_facts IS
    'Serves: rows of a stream in order; its oldest facts.';
CREATE INDEX published_facts_key_idx ON published_facts (key, stream_name, stream_id);
COMMENT ON INDEX published_facts_key_idx IS
    'Serves: the facts of a key, to read them and to delete those that a later one superseded.';

CREATE TABLE cursors (
    position bigint NOT NULL,
    name text COLLATE "C" NOT NULL,
    CONSTRAINT cursors_pkey PRIMARY KEY (name),
    CONSTRAINT cursors_position_check CHECK (position >= 0)
) WITH (fillfactor = 50);
COMMENT ON TABLE cursors IS
    'The positions up to which consumers of the homeserver have processed a stream, by name '
    '(Store.cursors).';
COMMENT ON CONSTRAINT cursors_pkey ON cursors IS 'Serves: a consumer that starts or goes on.';

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname, g.granted
        FROM (VALUES
            ('runtime', 'SELECT, INSERT ON defined_streams'),
            ('runtime', 'SELECT, INSERT, UPDATE (value), DELETE ON published_facts'),
            ('runtime', 'SELECT, INSERT, UPDATE (position) ON cursors'),
            ('runtime', 'USAGE, SELECT, UPDATE ON SEQUENCE published_facts_stream'),
            ('reader', 'SELECT ON defined_streams, published_facts, cursors'),
            ('purger', 'SELECT, INSERT ON defined_streams'),
            ('purger', 'SELECT, INSERT, UPDATE, DELETE ON published_facts, cursors'),
            ('purger', 'USAGE, SELECT, UPDATE ON SEQUENCE published_facts_stream'),
            ('reader', 'SELECT ON SEQUENCE published_facts_stream')
        ) AS g (role, granted)
        JOIN pg_roles r ON r.rolname = prefix || '_' || g.role
    LOOP
        EXECUTE format('GRANT %s TO %I', one.granted, one.rolname);
    END LOOP;
END
$$;
