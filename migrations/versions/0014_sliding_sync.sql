CREATE SEQUENCE sliding_connection_nids AS bigint;
CREATE TABLE sliding_connections (
    connection_nid bigint NOT NULL,
    base bigint NOT NULL,
    last_number bigint NOT NULL,
    used_ts bigint NOT NULL,
    principal_nid int NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    conn_id text COLLATE "C" NOT NULL,
    unconfirmed bigint[] NOT NULL,
    required_states text[] COLLATE "C" NOT NULL,
    CONSTRAINT sliding_connections_pkey PRIMARY KEY (connection_nid),
    CONSTRAINT sliding_connections_conn_id_key UNIQUE (principal_nid, device_id, conn_id)
) WITH (fillfactor = 70);
COMMENT ON TABLE sliding_connections IS
    'The connections of sliding sync, by user, device and conn_id. A new one takes the place of the '
    'old one. Those that are not in use are deleted by gc.';
COMMENT ON COLUMN sliding_connections.base IS
    'The number of the state that the client has confirmed. Its rows in sliding_rooms have this '
    'number or a smaller one.';
COMMENT ON COLUMN sliding_connections.last_number IS
    'The largest number of a state. No number is used twice.';
COMMENT ON COLUMN sliding_connections.used_ts IS 'When it was in use, to the hour.';
COMMENT ON COLUMN sliding_connections.unconfirmed IS
    'The numbers of states that were sent on top of the base. The client may have one of them, or '
    'still the base: a request may be sent again. At most two, the oldest goes.';
COMMENT ON COLUMN sliding_connections.required_states IS
    'The values of required_state that sliding_rooms refers to by index, as JSON.';
COMMENT ON CONSTRAINT sliding_connections_pkey ON sliding_connections IS
    'Serves: the connection of a pos.';
COMMENT ON CONSTRAINT sliding_connections_conn_id_key ON sliding_connections IS
    'Serves: the connection that a new one replaces; the connections of a device.';
CREATE INDEX sliding_connections_used_ts_idx ON sliding_connections (used_ts);
COMMENT ON INDEX sliding_connections_used_ts_idx IS 'Serves: the connections that gc deletes.';

CREATE TABLE sliding_rooms (
    connection_nid bigint NOT NULL,
    number bigint NOT NULL,
    sent_upto bigint,
    receipts_upto bigint,
    account_data_upto bigint,
    room_nid int NOT NULL,
    timeline_limit int NOT NULL,
    required_state int NOT NULL,
    is_direct boolean NOT NULL,
    CONSTRAINT sliding_rooms_pkey PRIMARY KEY (connection_nid, room_nid, number)
) WITH (fillfactor = 85);
COMMENT ON TABLE sliding_rooms IS
    'The rooms that a connection of sliding sync was sent. A row is written where a room does not '
    'follow the pos of the client. So an event in a room that the client has writes nothing.';
COMMENT ON COLUMN sliding_rooms.number IS
    'The state of the connection that this row belongs to. A state has of each room the row with '
    'the largest number up to the base, unless it has a row of its own number.';
COMMENT ON COLUMN sliding_rooms.sent_upto IS
    'Up to which position the client has the events of the room. NULL: up to the pos.';
COMMENT ON COLUMN sliding_rooms.receipts_upto IS
    'The same for receipts, in the stream "receipts".';
COMMENT ON COLUMN sliding_rooms.account_data_upto IS
    'The same for the account data of the user in the room, in the stream "account_data".';
COMMENT ON COLUMN sliding_rooms.timeline_limit IS
    'So many of the latest events the client has at least.';
COMMENT ON COLUMN sliding_rooms.required_state IS
    'The state that the client has: an index of sliding_connections.required_states, from 1.';
COMMENT ON COLUMN sliding_rooms.is_direct IS 'Whether the client knows the room as one of m.direct.';
COMMENT ON CONSTRAINT sliding_rooms_pkey ON sliding_rooms IS
    'Serves: the state of a connection; replacing the row of a room.';
CREATE INDEX sliding_rooms_room_nid_idx ON sliding_rooms (room_nid);
COMMENT ON INDEX sliding_rooms_room_nid_idx IS 'Serves: the purge of a room.';

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname, g.granted
        FROM (VALUES
            ('runtime', 'SELECT, INSERT, UPDATE, DELETE ON sliding_connections, sliding_rooms'),
            ('runtime', 'USAGE, SELECT, UPDATE ON SEQUENCE sliding_connection_nids'),
            ('reader', 'SELECT ON sliding_connections, sliding_rooms'),
            ('reader', 'SELECT ON SEQUENCE sliding_connection_nids'),
            ('purger', 'SELECT, INSERT, UPDATE, DELETE ON sliding_connections, sliding_rooms'),
            ('purger', 'USAGE, SELECT, UPDATE ON SEQUENCE sliding_connection_nids')
        ) AS g (role, granted)
        JOIN pg_roles r ON r.rolname = prefix || '_' || g.role
    LOOP
        EXECUTE format('GRANT %s TO %I', one.granted, one.rolname);
    END LOOP;
END
$$;
