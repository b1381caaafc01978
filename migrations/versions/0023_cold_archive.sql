CREATE SEQUENCE archive_pack_numbers AS int;
COMMENT ON SEQUENCE archive_pack_numbers IS
    'archive_packs.pack. A number is never used again: an old snapshot may still refer to it.';

CREATE TABLE archive_packs (
    created_ts bigint NOT NULL,
    bytes bigint NOT NULL,
    events int NOT NULL,
    pack int NOT NULL,
    state text COLLATE "C" NOT NULL,
    url text COLLATE "C" NOT NULL,
    CONSTRAINT archive_packs_pkey PRIMARY KEY (pack),
    CONSTRAINT archive_packs_state_check CHECK (state IN ('writing', 'filling', 'complete',
        'deleting'))
);
COMMENT ON TABLE archive_packs IS
    'The packs of the archive: files with stored forms of old events, to which events.json refers '
    '(storage/maintenance/cold_archive).';
COMMENT ON COLUMN archive_packs.bytes IS 'The size of the file.';
COMMENT ON COLUMN archive_packs.events IS
    'The number of events when it was written. Some may have left it since.';
COMMENT ON COLUMN archive_packs.pack IS 'Its number, as in events.json.';
COMMENT ON COLUMN archive_packs.state IS
    'writing: there may be a part of the file, and nothing refers to it. filling: the file is '
    'whole, and events are being changed to refer to it. complete: the rule. deleting: nothing '
    'refers to it any more; first the file goes, then this row.';
COMMENT ON COLUMN archive_packs.url IS
    'The URL of the file. It may be changed after the file was moved.';
COMMENT ON CONSTRAINT archive_packs_pkey ON archive_packs IS
    'Serves: the files of the packs that rows of events refer to.';

CREATE TABLE archive_garbage (
    record_offset bigint NOT NULL,
    pack int NOT NULL,
    record_length int NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    CONSTRAINT archive_garbage_pkey PRIMARY KEY (pack, record_offset)
);
COMMENT ON TABLE archive_garbage IS
    'Records of packs to which their event refers no more: it was purged, censored or returned to '
    'the table. The sweep removes them from the file, and then the row.';
COMMENT ON COLUMN archive_garbage.record_offset IS 'As in the reference in events.json.';
COMMENT ON COLUMN archive_garbage.record_length IS 'As in the reference in events.json.';
COMMENT ON CONSTRAINT archive_garbage_pkey ON archive_garbage IS
    'Serves: the records of a pack that are to be removed.';

CREATE FUNCTION note_archive_garbage() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO archive_garbage (pack, record_offset, record_length, event_id)
    VALUES (
        ('x' || encode(substring(OLD.json FROM 2 FOR 4), 'hex'))::bit(32)::int,
        ('x' || encode(substring(OLD.json FROM 6 FOR 4), 'hex'))::bit(32)::bigint,
        ('x' || encode(substring(OLD.json FROM 10 FOR 3), 'hex'))::bit(24)::int,
        OLD.event_id
    )
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END
$$;
COMMENT ON FUNCTION note_archive_garbage IS
    'Notes that an event refers no more to its record in the archive. The reference has 1 byte '
    '0xA1, 4 of the pack, 4 of the offset, 3 of the length (storage/codec/reference.py).';
CREATE TRIGGER events_archive_update
    AFTER UPDATE OF json ON events
    FOR EACH ROW
    WHEN (
        octet_length(OLD.json) = 12 AND get_byte(OLD.json, 0) = 161
        AND NEW.json IS DISTINCT FROM OLD.json
    )
    EXECUTE FUNCTION note_archive_garbage();
CREATE TRIGGER events_archive_delete
    AFTER DELETE ON events
    FOR EACH ROW
    WHEN (octet_length(OLD.json) = 12 AND get_byte(OLD.json, 0) = 161)
    EXECUTE FUNCTION note_archive_garbage();

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname, g.granted
        FROM (VALUES
            ('runtime', 'SELECT ON archive_packs'),
            ('runtime', 'SELECT ON archive_garbage'),
            ('runtime', 'SELECT, USAGE, UPDATE ON SEQUENCE archive_pack_numbers'),
            ('reader', 'SELECT ON archive_packs'),
            ('reader', 'SELECT ON archive_garbage'),
            ('reader', 'SELECT ON SEQUENCE archive_pack_numbers'),
            ('purger', 'SELECT, INSERT, UPDATE, DELETE ON archive_packs'),
            ('purger', 'SELECT, INSERT, UPDATE, DELETE ON archive_garbage'),
            ('purger', 'SELECT, USAGE, UPDATE ON SEQUENCE archive_pack_numbers')
        ) AS g (role, granted)
        JOIN pg_roles r ON r.rolname = prefix || '_' || g.role
    LOOP
        EXECUTE format('GRANT %s TO %I', one.granted, one.rolname);
    END LOOP;
END
$$;
