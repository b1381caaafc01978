CREATE TABLE local_transactions (
    event_nid bigint NOT NULL,
    sent_ts bigint NOT NULL,
    room_nid int NOT NULL,
    sender_nid int NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    transaction_id text COLLATE "C" NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    CONSTRAINT local_transactions_pkey PRIMARY KEY (room_nid, sender_nid, device_id,
        transaction_id),
    CONSTRAINT local_transactions_event_nid_key UNIQUE (event_nid)
);
COMMENT ON TABLE local_transactions IS
    'The transaction ids with which local users sent events: a request that a client repeats '
    'returns the first event. Stored with the event in one statement. "room-storage gc" deletes '
    'rows that are older than transaction_keep_ms.';
COMMENT ON COLUMN local_transactions.sent_ts IS 'When the event was stored.';
COMMENT ON COLUMN local_transactions.sender_nid IS 'The user, of principals.';
COMMENT ON COLUMN local_transactions.device_id IS 'The device that sent it, up to 255 bytes.';
COMMENT ON COLUMN local_transactions.transaction_id IS
    'As the client chose it, up to 255 bytes.';
COMMENT ON COLUMN local_transactions.event_id IS
    'As in events. It is repeated here because the row stays when the event is purged.';
COMMENT ON CONSTRAINT local_transactions_pkey ON local_transactions IS
    'Serves: the event of a repeated request; two processes that store the same request; all '
    'rows of a room.';
COMMENT ON CONSTRAINT local_transactions_event_nid_key ON local_transactions IS
    'Serves: unsigned.transaction_id of events; deleting old rows in batches.';
COMMENT ON COLUMN events.ineffective IS
    'An accepted redaction that took no effect: its target is not in the timeline yet, is in '
    'another room, or was sent by another user. It is not shown to users, and is decided again '
    'when the target arrives.';

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname, g.granted
        FROM (VALUES
            ('runtime', 'SELECT, INSERT'),
            ('reader', 'SELECT'),
            ('purger', 'SELECT, INSERT, UPDATE, DELETE')
        ) AS g (role, granted)
        JOIN pg_roles r ON r.rolname = prefix || '_' || g.role
    LOOP
        EXECUTE format('GRANT %s ON local_transactions TO %I', one.granted, one.rolname);
    END LOOP;
END
$$;
