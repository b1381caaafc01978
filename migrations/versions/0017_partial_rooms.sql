ALTER TABLE rooms
    ADD COLUMN is_partial boolean NOT NULL DEFAULT false,
    ADD COLUMN completed_at bigint;
COMMENT ON COLUMN rooms.last_stream_ordering IS
    'Position of the latest live event, or completed_at if that is later. Serves: the rooms that '
    'changed since a token.';
COMMENT ON COLUMN rooms.is_partial IS
    'The states from a join on lack members (partial_rooms). A member key that is absent there is '
    'unknown.';
COMMENT ON COLUMN rooms.completed_at IS
    'Position of the state_deltas with the members that a partial state lacked. There is no event '
    'at this position. NULL: the room was never partial, or still is for the first time.';

CREATE TABLE partial_rooms (
    began_ts bigint NOT NULL,
    room_nid int NOT NULL,
    join_event_id text COLLATE "C" NOT NULL,
    origin text COLLATE "C" NOT NULL,
    servers text[] COLLATE "C" NOT NULL,
    CONSTRAINT partial_rooms_pkey PRIMARY KEY (room_nid)
);
COMMENT ON TABLE partial_rooms IS
    'Rooms that this server has joined with the members omitted (MSC3706), until the rest of the '
    'state is stored. rooms.is_partial is true for exactly these rooms. The row is older than the '
    'join: without the join, nothing is partial.';
COMMENT ON COLUMN partial_rooms.began_ts IS 'When the answer to send_join arrived.';
COMMENT ON COLUMN partial_rooms.join_event_id IS
    'The join: the states from it on lack members.';
COMMENT ON COLUMN partial_rooms.origin IS 'The server that answered.';
COMMENT ON COLUMN partial_rooms.servers IS
    'The servers in the room before the join, as the origin says (servers_in_room).';
COMMENT ON CONSTRAINT partial_rooms_pkey ON partial_rooms IS
    'Serves: the partial rooms; the join of a room.';

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    one record;
BEGIN
    FOR one IN
        SELECT r.rolname, g.granted
        FROM (VALUES
            ('runtime', 'SELECT, INSERT, DELETE ON partial_rooms'),
            ('runtime', 'UPDATE (is_partial) ON rooms'),
            ('reader', 'SELECT ON partial_rooms'),
            ('purger', 'SELECT, INSERT, UPDATE, DELETE ON partial_rooms')
        ) AS g (role, granted)
        JOIN pg_roles r ON r.rolname = prefix || '_' || g.role
    LOOP
        EXECUTE format('GRANT %s TO %I', one.granted, one.rolname);
    END LOOP;
END
$$;
