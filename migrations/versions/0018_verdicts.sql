ALTER TABLE events
    ADD COLUMN arrival_ordering bigint,
    ADD COLUMN superseded boolean,
    ADD COLUMN refused text;
ALTER TABLE events
    ADD CONSTRAINT events_refused_check CHECK (refused IS NULL OR soft_failed) NOT VALID,
    ADD CONSTRAINT events_superseded_check CHECK (superseded IS NULL OR refused IS NOT NULL)
        NOT VALID;
COMMENT ON COLUMN events.soft_failed IS
    'Refused by the room''s current state when it arrived, or by the caller (refused): not shown '
    'to clients, and no extremity.';
COMMENT ON COLUMN events.refused IS
    'The reason why the caller refused an event that the auth rules accept, such as the verdict of '
    'a policy server. NULL: the caller did not refuse it, or has readmitted it.';
COMMENT ON COLUMN events.superseded IS
    'Of a refused event: an accepted live event descends from it, so it is no forward extremity '
    'once it is readmitted. NULL: none does, or the event is not refused.';
COMMENT ON COLUMN events.arrival_ordering IS
    'Of a readmitted event: the stream ordering that it had while it was refused. NULL: '
    'stream_ordering, or an outlier.';

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
            'GRANT UPDATE (arrival_ordering, superseded, refused) ON events TO %I', one.rolname
        );
    END LOOP;
END
$$;
