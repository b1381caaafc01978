CREATE TABLE dictionaries (
    dictionary_id int NOT NULL,
    events int NOT NULL,
    trained_ts bigint NOT NULL,
    data bytea NOT NULL,
    CONSTRAINT dictionaries_pkey PRIMARY KEY (dictionary_id)
);
ALTER TABLE dictionaries ALTER COLUMN data SET STORAGE EXTERNAL;
COMMENT ON TABLE dictionaries IS
    'Dictionaries of zstd that were trained on events of this deployment '
    '(room-storage train-dictionary). The first one is in the package. Rows of events name them '
    'by their ids, so none is ever deleted: no role may.';
COMMENT ON COLUMN dictionaries.dictionary_id IS
    'The first 3 bytes of the SHA-256 of data, as in events.json.';
COMMENT ON COLUMN dictionaries.events IS 'The number of events that it was trained on.';
COMMENT ON COLUMN dictionaries.trained_ts IS 'Writers use the latest one.';
COMMENT ON CONSTRAINT dictionaries_pkey ON dictionaries IS
    'Serves: the dictionaries that the bytes of events name.';

ALTER TABLE events ADD COLUMN describes_room boolean;
COMMENT ON COLUMN events.json IS
    'The bytes that encoding says, in a form that its first byte names (storage/codec/codec.py).';
COMMENT ON COLUMN events.encoding IS
    'The bytes that json holds, in any form: 0 = the bytes as received; 1 = censored, the '
    'canonical JSON of the redacted form (storage/maintenance/censor.py).';
COMMENT ON COLUMN events.redacted_form IS
    'Its content hash was wrong: only the redacted form is valid and ever shown. json holds the '
    'received bytes.';
COMMENT ON COLUMN events.describes_room IS
    'Of m.room.name and m.room.canonical_alias: whether its content has a name or an alias, a text '
    'that is not empty. Of m.room.create: whether it has a type, a text. NULL: another type or '
    'state key; or a row of a release that did not set it, whose json is the bytes themselves.';
COMMENT ON COLUMN import_events.json IS
    'The bytes of an event, in a form as events.json has; or a bundle of events without bytes.';

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname, g.granted
        FROM (VALUES
            ('runtime', 'SELECT, INSERT ON dictionaries'),
            ('reader', 'SELECT ON dictionaries'),
            ('purger', 'SELECT, INSERT ON dictionaries')
        ) AS g (role, granted)
        JOIN pg_roles r ON r.rolname = prefix || '_' || g.role
    LOOP
        EXECUTE format('GRANT %s TO %I', one.granted, one.rolname);
    END LOOP;
END
$$;
