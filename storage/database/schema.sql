-- The current schema, complete and commented. The migrations result in exactly this schema; a test
-- compares the two catalogues.
--
-- Conventions
--   * Rooms, event types, state keys, users and servers are interned: other tables refer to their
--     numbers (nids), not to the text. A nid never changes and is never reused. 0 is never a nid.
--   * nids and state groups are assigned in blocks: a sequence gives the first number of a block
--     as long as its increment. So they have holes and do not define an order.
--   * stream_ordering (order of arrival at this server) and topological_ordering (causality) define
--     the order.
--   * Times are milliseconds since 1970, UTC, as int8.
--   * Every index names the query it serves. No index without a query.
--   * A write is planned in memory against rooms.write_version and applied by one statement that
--     compares and sets it (storage/persist). Rows read while planning are immutable, or guarded
--     by that number.

-- ------------------------------------------------------------------------------------------------
-- this deployment

CREATE TABLE deployment (
    deployment_id text NOT NULL,
    created_ts bigint NOT NULL,
    singleton boolean NOT NULL DEFAULT true,
    server_name text COLLATE "C",
    incarnation text COLLATE "C",
    CONSTRAINT deployment_pkey PRIMARY KEY (singleton),
    CONSTRAINT deployment_singleton_check CHECK (singleton)
);
COMMENT ON TABLE deployment IS
    'One row. Tokens carry the deployment id, so that a token of another database is refused.';
COMMENT ON COLUMN deployment.incarnation IS
    'The cluster, database and timeline when a store was last opened. If it differs, the database '
    'was restored (storage/streams/restore_detection.py).';
COMMENT ON COLUMN deployment.server_name IS
    'The homeserver whose users are local: visibility and memberships are stored for them. The '
    'first store that opens sets it. Another name is refused once there are rooms or data of '
    'users; until then a store of another name sets that, if no other process uses the database. '
    'NULL: all rooms so far were imported without a name.';

CREATE TABLE schema_compatibility (
    singleton boolean NOT NULL DEFAULT true,
    code_revision text COLLATE "C" NOT NULL,
    CONSTRAINT schema_compatibility_pkey PRIMARY KEY (singleton),
    CONSTRAINT schema_compatibility_singleton_check CHECK (singleton)
);
COMMENT ON TABLE schema_compatibility IS
    'One row. Code for an older schema than code_revision cannot serve this one. Each "post" step '
    'of a migration sets it. alembic_version has the revision of the schema.';
INSERT INTO schema_compatibility (code_revision) VALUES ('0001');

CREATE TABLE background_jobs (
    name text COLLATE "C" NOT NULL,
    revision text COLLATE "C" NOT NULL,
    place bigint NOT NULL DEFAULT 0,
    rows_done bigint NOT NULL DEFAULT 0,
    rows_expected bigint,
    batch_rows int NOT NULL DEFAULT 100,
    registered_ts bigint NOT NULL,
    started_ts bigint,
    updated_ts bigint,
    finished_ts bigint,
    error text,
    CONSTRAINT background_jobs_pkey PRIMARY KEY (name),
    CONSTRAINT background_jobs_batch_check CHECK (batch_rows > 0)
);
COMMENT ON TABLE background_jobs IS
    'Long data steps of migrations (storage/database/background.py) and their progress. They run '
    'in small batches while servers run. Each batch commits with its row.';
COMMENT ON COLUMN background_jobs.revision IS
    'The revision that registered it and defines the batch, or the newest one when a command did.';
COMMENT ON COLUMN background_jobs.place IS
    'The next batch begins after this key. 0: at the beginning.';
COMMENT ON COLUMN background_jobs.rows_expected IS
    'As estimated at the start. NULL: not started, or unknown.';
COMMENT ON COLUMN background_jobs.batch_rows IS
    'Rows of the next batch: as many as take a fraction of a second.';
COMMENT ON COLUMN background_jobs.error IS 'The error of the last run. NULL: it did not fail.';

-- ------------------------------------------------------------------------------------------------
-- interned names

CREATE SEQUENCE principal_nids AS int START 1000 INCREMENT 100;
CREATE TABLE principals (
    principal_nid int NOT NULL,
    name text COLLATE "C" NOT NULL,
    CONSTRAINT principals_pkey PRIMARY KEY (principal_nid) WITH (fillfactor = 100),
    CONSTRAINT principals_name_key UNIQUE (name)
);
COMMENT ON TABLE principals IS
    'Users (name starts with @) and servers (a bare server name). Two rows are no real '
    'principals: 1 means everybody (world-readable audiences), 2 all users that joined at some '
    'time ("shared" audiences).';
COMMENT ON CONSTRAINT principals_name_key ON principals IS
    'Serves: intern a user or server by name.';
INSERT INTO principals (principal_nid, name) VALUES (1, '*everybody'), (2, '*shared');

CREATE SEQUENCE type_nids AS int START 1000 INCREMENT 10;
CREATE TABLE event_types (
    type_nid int NOT NULL,
    type text COLLATE "C" NOT NULL,
    CONSTRAINT event_types_pkey PRIMARY KEY (type_nid),
    CONSTRAINT event_types_type_key UNIQUE (type)
);
COMMENT ON TABLE event_types IS
    'Event types, and types of relations. The code knows those below 1000 '
    '(storage/database/names.py).';
COMMENT ON CONSTRAINT event_types_type_key ON event_types IS
    'Serves: intern an event type, or a type of relations.';
INSERT INTO event_types (type_nid, type) VALUES
    (1, 'm.room.create'),
    (2, 'm.room.member'),
    (3, 'm.room.power_levels'),
    (4, 'm.room.join_rules'),
    (5, 'm.room.history_visibility'),
    (6, 'm.room.third_party_invite'),
    (7, 'm.room.redaction'),
    (8, 'm.room.message'),
    (9, 'm.room.name'),
    (10, 'm.room.topic'),
    (11, 'm.room.canonical_alias'),
    (12, 'm.room.avatar'),
    (13, 'm.room.encryption'),
    (14, 'm.room.guest_access'),
    (15, 'm.room.server_acl'),
    (16, 'm.room.tombstone'),
    (17, 'm.reaction'),
    (18, 'm.room.encrypted'),
    (19, 'm.replace'),
    (20, 'm.annotation'),
    (21, 'm.reference'),
    (22, 'm.thread');

CREATE SEQUENCE state_key_nids AS int START 1000 INCREMENT 100;
CREATE TABLE state_keys (
    state_key_nid int NOT NULL,
    type_nid int NOT NULL,
    state_key text COLLATE "C" NOT NULL,
    CONSTRAINT state_keys_pkey PRIMARY KEY (state_key_nid) WITH (fillfactor = 100),
    CONSTRAINT state_keys_type_nid_state_key_key UNIQUE (type_nid, state_key),
    CONSTRAINT state_keys_type_nid_fkey FOREIGN KEY (type_nid) REFERENCES event_types (type_nid)
);
COMMENT ON TABLE state_keys IS
    'Pairs (type, state key). The code knows those below 1000 (storage/database/names.py): type n '
    'with the empty state key is n.';
COMMENT ON CONSTRAINT state_keys_type_nid_state_key_key ON state_keys IS
    'Serves: intern a state key; all members of a state.';
INSERT INTO state_keys (state_key_nid, type_nid, state_key)
SELECT type_nid, type_nid, '' FROM event_types
    WHERE type_nid IN (1, 3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 16);

-- ------------------------------------------------------------------------------------------------
-- rooms

CREATE SEQUENCE room_nids AS int START 1 INCREMENT 10;
CREATE TABLE rooms (
    write_version bigint NOT NULL,
    room_nid int NOT NULL,
    next_audience bigint NOT NULL,
    current_state_group bigint,
    last_stream_ordering bigint,
    max_topological_ordering bigint NOT NULL,
    current_audience bigint NOT NULL DEFAULT 0,
    moves bigint NOT NULL DEFAULT 0,
    removals bigint NOT NULL DEFAULT 0,
    joined_count int NOT NULL DEFAULT 0,
    invited_count int NOT NULL DEFAULT 0,
    room_id text COLLATE "C" NOT NULL,
    room_version text COLLATE "C" NOT NULL,
    forward_extremities bigint[] NOT NULL,
    out_of_range int8multirange NOT NULL DEFAULT '{}',
    is_partial boolean NOT NULL DEFAULT false,
    completed_at bigint,
    in_order_ts bigint NOT NULL DEFAULT -9223372036854775808,
    CONSTRAINT rooms_pkey PRIMARY KEY (room_nid),
    CONSTRAINT rooms_room_id_key UNIQUE (room_id)
) WITH (fillfactor = 70);
COMMENT ON TABLE rooms IS
    'One row per room, updated by every append (its free space keeps those updates in the page). '
    'A room known only by outliers has no forward extremity and no current state.';
COMMENT ON COLUMN rooms.write_version IS
    'Grows by one with each write to the room. A write that was planned on an older number is '
    'refused.';
COMMENT ON COLUMN rooms.next_audience IS 'The next audience of the main line (see visibility).';
COMMENT ON COLUMN rooms.current_state_group IS
    'The resolution of the states after the forward extremities; an empty state if there are none '
    'yet.';
COMMENT ON COLUMN rooms.last_stream_ordering IS
    'Position of the latest live event, or completed_at if that is later. Serves: the rooms that '
    'changed since a token.';
COMMENT ON COLUMN rooms.max_topological_ordering IS
    'Largest topological ordering ever assigned in the room; 0 for none.';
COMMENT ON COLUMN rooms.current_audience IS
    'The audience of the current state: the number of the main line opened last. 0 for none.';
COMMENT ON COLUMN rooms.moves IS
    'The number of writes that moved events of the room in its topological order '
    '(reordered_events). Usually 0: where depths are honest no event moves.';
COMMENT ON COLUMN rooms.removals IS
    'Grows by one with each transaction that deletes events or state groups of the room, or '
    'removes events from its timeline. A write that was planned on an older number is refused '
    'only if a row that it depends on was deleted (dependencies_purged).';
COMMENT ON COLUMN rooms.joined_count IS
    'Joined members of the current state. Serves: the summary of a room, without counting.';
COMMENT ON COLUMN rooms.invited_count IS 'The same for invited.';
COMMENT ON COLUMN rooms.out_of_range IS
    'Topological ranges that every reader must scan, because they hold events outside the range '
    'that audiences.opened_topological predicts: events of long forks and of history. Events that '
    'no local user may ever see are excluded, such as history before the first of them joined '
    'that was not shared.';
COMMENT ON COLUMN rooms.forward_extremities IS
    'Accepted live events that are no prev_event of a stored, accepted live event, without '
    'dropped_extremities.';
COMMENT ON COLUMN rooms.is_partial IS
    'The states from a join on lack members (partial_rooms). A member key that is absent there is '
    'unknown.';
COMMENT ON COLUMN rooms.completed_at IS
    'Position of the state_deltas with the members that a partial state lacked. There is no event '
    'at this position. NULL: the room was never partial, or still is for the first time.';
COMMENT ON COLUMN rooms.in_order_ts IS
    'At least the origin_server_ts of each event in time order (events.in_order_ts). The default, '
    'the smallest number: there is none.';
COMMENT ON CONSTRAINT rooms_room_id_key ON rooms IS 'Serves: intern a room.';

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

-- ------------------------------------------------------------------------------------------------
-- events

CREATE SEQUENCE event_nids AS bigint START 1 INCREMENT 1000;
CREATE SEQUENCE events_stream AS bigint START 2;
COMMENT ON SEQUENCE events_stream IS
    'Positions of the streams "events" and "backfill". They share one sequence, so that '
    'stream_ordering is unique over all events.';

CREATE TABLE events (
    event_nid bigint NOT NULL,
    stream_ordering bigint,
    topological_ordering bigint,
    depth bigint,
    origin_server_ts bigint NOT NULL,
    received_ts bigint NOT NULL,
    state_group_before bigint,
    state_group_after bigint,
    audience bigint,
    redacted_by bigint,
    relates_to bigint,
    room_nid int NOT NULL,
    sender_nid int NOT NULL,
    type_nid int NOT NULL,
    state_key_nid int,
    rel_type_nid int,
    encoding smallint NOT NULL,
    writer_nid smallint NOT NULL,
    membership smallint,
    outlier boolean NOT NULL,
    backfilled boolean NOT NULL,
    soft_failed boolean NOT NULL,
    redacted_form boolean NOT NULL,
    ineffective boolean NOT NULL DEFAULT false,
    replaces boolean,
    has_url boolean,
    after_gap boolean,
    event_id text COLLATE "C" NOT NULL,
    rejected text,
    prev_events bigint[],
    auth_events bigint[],
    json bytea NOT NULL,
    arrival_ordering bigint,
    superseded boolean,
    refused text,
    prev_distance int,
    auth_distance_1 int,
    auth_distance_2 int,
    auth_distance_3 int,
    auth_distance_4 int,
    describes_room boolean,
    in_order_ts bigint DEFAULT -9223372036854775808,
    CONSTRAINT events_pkey PRIMARY KEY (event_nid) WITH (fillfactor = 100),
    CONSTRAINT events_stream_ordering_key UNIQUE (stream_ordering) WITH (fillfactor = 100)
);
ALTER TABLE events ALTER COLUMN json SET STORAGE EXTERNAL;
-- makes the planner use the index even where one event has most of the relations
ALTER TABLE events ALTER COLUMN relates_to SET (n_distinct = -0.5);
COMMENT ON TABLE events IS
    'One row holds everything about an event. Only the flags change, and the columns that an '
    'outlier lacks.';
COMMENT ON COLUMN events.event_nid IS
    'Never changes, even when an outlier becomes a timeline event.';
COMMENT ON COLUMN events.stream_ordering IS
    'The order of arrival at this server: its position in the stream "events", or "backfill" if '
    'backfilled. NULL for outliers.';
COMMENT ON COLUMN events.topological_ordering IS
    'Causal order: larger than that of every stored parent in the room. Computed here, never the '
    'claimed depth. NULL for outliers.';
COMMENT ON COLUMN events.relates_to IS
    'The target of its relation (m.relates_to), as relation_key(event id), so that the target may '
    'be missing. NULL, as are the next two: no relation. It depends on the bytes alone, not on '
    'the state of the event or its target; a censored event has none.';
COMMENT ON COLUMN events.rel_type_nid IS 'The type of the relation, of event_types.';
COMMENT ON COLUMN events.replaces IS
    'Of m.replace: whether the event itself allows it to replace another '
    '(storage/event/model.py).';
COMMENT ON COLUMN events.has_url IS
    'Its content has a key "url", even if redacted since, but not if censored. NULL: it has none. '
    'Serves: filters with contains_url.';
COMMENT ON COLUMN events.after_gap IS
    'A live event with a parent that was missing when it arrived. A timeline stops there, because '
    'backfilled history never goes down /sync. It stays set when the gap is filled. NULL: all '
    'parents were stored.';
COMMENT ON COLUMN events.depth IS
    'As claimed by the sender (clamped to int8). Never used for order. NULL: it equals '
    'topological_ordering, as where all depths are honest. Read both by claimed_depth.';
COMMENT ON COLUMN events.origin_server_ts IS 'As claimed by the sender (clamped to int8).';
COMMENT ON COLUMN events.state_group_before IS 'The state before the event. NULL for outliers.';
COMMENT ON COLUMN events.state_group_after IS
    'The state after an accepted state event. NULL: the same as before it.';
COMMENT ON COLUMN events.audience IS
    'The audience that may see it, a number in visibility.audiences. NULL for outliers.';
COMMENT ON COLUMN events.redacted_by IS
    'The redaction that took effect on it: smallest (origin_server_ts, event_id) if there are '
    'several.';
COMMENT ON COLUMN events.encoding IS
    'The bytes that json holds, in any form: 0 = the bytes as received; 1 = censored, the '
    'canonical JSON of the redacted form (storage/maintenance/censor.py).';
COMMENT ON COLUMN events.writer_nid IS
    'The writer that assigned its stream ordering. Within a room stream orderings follow the '
    'order of commits, for all writers.';
COMMENT ON COLUMN events.membership IS
    'Of m.room.member: 0 other or missing, 1 ban, 2 leave, 3 knock, 4 invite, 5 join.';
COMMENT ON COLUMN events.backfilled IS 'History: never goes down /sync.';
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
COMMENT ON COLUMN events.redacted_form IS
    'Its content hash was wrong: only the redacted form is valid and ever shown. json holds the '
    'received bytes.';
COMMENT ON COLUMN events.ineffective IS
    'An accepted redaction that took no effect: its target is not in the timeline yet, is in '
    'another room, or was sent by another user. It is not shown to users, and is decided again '
    'when the target arrives.';
COMMENT ON COLUMN events.rejected IS
    'The auth rule that refused it, with the reason. NULL: accepted.';
COMMENT ON COLUMN events.prev_events IS
    'Parents, in the order of the PDU: nids of events or of missing_events. NULL: prev_distance '
    'has them. Read both by prev_nids.';
COMMENT ON COLUMN events.auth_events IS
    'Auth events, in the order of the PDU. All are stored. NULL: auth_distance_1 to 4 have them. '
    'Read all by auth_nids.';
COMMENT ON COLUMN events.prev_distance IS
    'event_nid minus the nid of the only parent. An array of one takes 29 bytes. NULL: see '
    'prev_events; if that is NULL as well, there is no parent, as for outliers.';
COMMENT ON COLUMN events.auth_distance_1 IS
    'event_nid minus the nid of the first auth event; the next columns have those of up to three '
    'more. An array of three takes 45 bytes. NULL: see auth_events; if that is NULL as well, the '
    'event has no auth events.';
COMMENT ON COLUMN events.auth_distance_2 IS 'Of the second auth event. NULL: there is none.';
COMMENT ON COLUMN events.auth_distance_3 IS 'Of the third auth event. NULL: there is none.';
COMMENT ON COLUMN events.auth_distance_4 IS 'Of the fourth auth event. NULL: there is none.';
COMMENT ON COLUMN events.json IS
    'The bytes that encoding says, in a form that its first byte names (storage/codec/codec.py).';
COMMENT ON COLUMN events.describes_room IS
    'Of m.room.name and m.room.canonical_alias: whether its content has a name or an alias, a text '
    'that is not empty. Of m.room.create: whether it has a type, a text. NULL: another type or '
    'state key.';
COMMENT ON COLUMN events.in_order_ts IS
    'NULL, as for most events: a live event in time order. Its origin_server_ts is larger than '
    'that of each such event before it in the stream. Of any other event: rooms.in_order_ts when '
    'it took its stream position. NULL for outliers, or the default, the smallest number.';
COMMENT ON CONSTRAINT events_pkey ON events IS 'Serves: events by nid; traversal of edges.';
COMMENT ON CONSTRAINT events_stream_ordering_key ON events IS
    'Serves: rows of the streams "events" and "backfill" in order.';

CREATE FUNCTION prev_nids(event_nid bigint, prev_events bigint[], prev_distance int)
RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE($2, array_remove(ARRAY[$1 - $3], NULL))
$$;
COMMENT ON FUNCTION prev_nids IS
    'The parents of an event, in the order of the PDU, from the columns of these names.';

CREATE FUNCTION claimed_depth(depth bigint, topological_ordering bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE($1, $2)
$$;
COMMENT ON FUNCTION claimed_depth IS
    'The depth that the sender of an event claims, from the columns of these names.';

CREATE FUNCTION auth_nids(
    event_nid bigint, auth_events bigint[], auth_distance_1 int, auth_distance_2 int,
    auth_distance_3 int, auth_distance_4 int
) RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT COALESCE($2, array_remove(ARRAY[$1 - $3, $1 - $4, $1 - $5, $1 - $6], NULL))
$$;
COMMENT ON FUNCTION auth_nids IS
    'The auth events of an event, in the order of the PDU, from the columns of these names.';

CREATE INDEX events_event_id_idx ON events USING hash (event_id);
COMMENT ON INDEX events_event_id_idx IS
    'Serves: events by id. It has 4 bytes of a hash for each id, so it is not unique. A write '
    'looks for its new events, and the writers of a room take turns (rooms.write_version).';
CREATE UNIQUE INDEX events_chosen_id_key ON events (event_id) WHERE position(':' IN event_id) > 0;
COMMENT ON INDEX events_chosen_id_key IS
    'Serves: duplicates of ids that servers choose (room versions 1 and 2), in any two rooms.';
CREATE INDEX events_room_topological_idx ON events (room_nid, topological_ordering, stream_ordering)
    WITH (fillfactor = 100) WHERE NOT outlier;
COMMENT ON INDEX events_room_topological_idx IS
    'Serves: pages of history; children within a topological range (repair).';
CREATE INDEX events_create_idx ON events (room_nid) WHERE type_nid = 1;
COMMENT ON INDEX events_create_idx IS 'Serves: whether a room already has its create event.';
CREATE INDEX events_room_outlier_idx ON events (room_nid, event_nid) WHERE outlier;
COMMENT ON INDEX events_room_outlier_idx IS
    'Serves: the outliers of a room, for verification; some at a time, for a purge.';
CREATE INDEX events_room_stream_idx ON events (room_nid, stream_ordering)
    WITH (fillfactor = 100) WHERE NOT outlier AND NOT backfilled;
COMMENT ON INDEX events_room_stream_idx IS 'Serves: the timeline of a room for /sync.';
CREATE INDEX events_gap_idx ON events (room_nid, stream_ordering) WHERE after_gap;
COMMENT ON INDEX events_gap_idx IS 'Serves: the last gap that a timeline would cross.';
CREATE INDEX events_out_of_order_idx ON events (room_nid, origin_server_ts)
    WHERE in_order_ts IS NOT NULL AND NOT outlier;
COMMENT ON INDEX events_out_of_order_idx IS
    'Serves: the event nearest to a time (storage/queries/timestamp_to_event.py). It has the '
    'events out of time order; those in time order are found by in_order_position.';
CREATE INDEX events_received_idx ON events USING brin (received_ts) WITH (pages_per_range = 8);
COMMENT ON INDEX events_received_idx IS
    'Serves: the events received in a period (storage/pipeline/source/filters.py). It has the '
    'first and last time of each 8 pages. VACUUM adds new pages; until then each search reads '
    'them. Postgres can request that page by page (autosummarize), but an import fills the queue '
    'of these requests, and each further one is a line in the log of the server.';
CREATE INDEX events_uncensored_idx ON events (event_nid)
    WHERE encoding = 0 AND (redacted_by IS NOT NULL OR redacted_form);
COMMENT ON INDEX events_uncensored_idx IS
    'Serves: the events to censor (storage/maintenance/censor.py). It has redacted events only, '
    'and an event leaves it when it is censored.';
CREATE INDEX events_relation_idx
    ON events (relates_to, rel_type_nid, topological_ordering, stream_ordering)
    WHERE relates_to IS NOT NULL AND NOT outlier;
COMMENT ON INDEX events_relation_idx IS
    'Serves: the relations of an event, in order (storage/queries/relations.py), and their '
    'aggregation (storage/queries/relations.py). Events without a relation are not in it.';
CREATE INDEX events_thread_idx
    ON events (room_nid, topological_ordering, stream_ordering) INCLUDE (relates_to)
    WHERE rel_type_nid = 22 AND NOT outlier;
COMMENT ON INDEX events_thread_idx IS
    'Serves: the threads of a room, latest reply first (storage/queries/threads.py). It has the '
    'replies only.';
CREATE INDEX events_related_stream_idx ON events (room_nid, stream_ordering)
    WHERE rel_type_nid NOT IN (19, 20) AND NOT outlier AND NOT backfilled;
COMMENT ON INDEX events_related_stream_idx IS
    'Serves: the unread replies in the threads of a room, and what relates to them '
    '(storage/queries/unread.py). It has neither edits nor annotations.';

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

CREATE TABLE reordered_events (
    moves bigint NOT NULL,
    event_nid bigint NOT NULL,
    topological_before bigint NOT NULL,
    room_nid int NOT NULL,
    CONSTRAINT reordered_events_pkey PRIMARY KEY (room_nid, moves, event_nid)
);
COMMENT ON TABLE reordered_events IS
    'Former topological positions of events that moved up '
    '(storage/graph/topological_ordering.py), so that a pagination token keeps its meaning. The '
    'position of an event as of a token is that of its first row with more moves than the token, '
    'else its current position.';
COMMENT ON COLUMN reordered_events.moves IS 'rooms.moves after this write.';
COMMENT ON COLUMN reordered_events.topological_before IS
    'Less than in the next row of the event, or than events.topological_ordering. The '
    'stream_ordering does not change.';
COMMENT ON CONSTRAINT reordered_events_pkey ON reordered_events IS
    'Serves: the events of a room that moved since a pagination token was made.';

CREATE TABLE missing_events (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    superseded boolean NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    child_nids bigint[] NOT NULL,
    CONSTRAINT missing_events_pkey PRIMARY KEY (event_nid),
    CONSTRAINT missing_events_event_id_key UNIQUE (event_id)
);
COMMENT ON TABLE missing_events IS
    'Parents that a stored event names and that are not stored, or only as outliers: the backward '
    'extremities. When the event arrives it takes over the nid and its row here is deleted, so '
    'that edges are never rewritten.';
COMMENT ON COLUMN missing_events.superseded IS
    'An accepted live event has it as prev_event, directly or over events that were not accepted, '
    'so it will be no forward extremity. It stays set where those were purged since, and where '
    'the event itself was stored and purged.';
COMMENT ON COLUMN missing_events.child_nids IS 'The stored events that name it.';
COMMENT ON CONSTRAINT missing_events_event_id_key ON missing_events IS
    'Serves: the nid that is reserved for an arriving event.';
CREATE INDEX missing_events_room_idx ON missing_events (room_nid);
COMMENT ON INDEX missing_events_room_idx IS 'Serves: the backward extremities of a room.';

CREATE TABLE gap_failures (
    event_nid bigint NOT NULL,
    failures int NOT NULL,
    failed_ts bigint NOT NULL,
    retry_ts bigint NOT NULL,
    reason text NOT NULL,
    servers text[] NOT NULL,
    CONSTRAINT gap_failures_pkey PRIMARY KEY (event_nid),
    CONSTRAINT gap_failures_event_nid_fkey FOREIGN KEY (event_nid)
        REFERENCES missing_events (event_nid) ON DELETE CASCADE
);
COMMENT ON TABLE gap_failures IS
    'Missing events that were requested without result, and when to retry '
    '(storage/queries/gaps.py). It cannot be derived from events. A row is deleted when the event '
    'arrives, or the room is purged.';
COMMENT ON COLUMN gap_failures.failures IS
    'The number of failures since a server among those that failed was last reported to be up '
    'again.';
COMMENT ON COLUMN gap_failures.failed_ts IS 'The time of the last failure.';
COMMENT ON COLUMN gap_failures.retry_ts IS 'The earliest time to retry.';
COMMENT ON COLUMN gap_failures.reason IS
    'The reason of the last failure, as the homeserver reports it.';
COMMENT ON COLUMN gap_failures.servers IS 'The servers that were requested, as far as reported.';
COMMENT ON CONSTRAINT gap_failures_pkey ON gap_failures IS
    'Serves: the failures of a gap; deletion with the gap.';

CREATE TABLE dropped_extremities (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    CONSTRAINT dropped_extremities_pkey PRIMARY KEY (room_nid, event_nid)
);
COMMENT ON TABLE dropped_extremities IS
    'Events that would be forward extremities but were dropped. Either they exceeded the limit '
    'and the others superseded their state (storage/persist/plan/topology.py), or the '
    'events that named them were purged. A dropped event is never an extremity again.';
COMMENT ON CONSTRAINT dropped_extremities_pkey ON dropped_extremities IS
    'Serves: the forward extremities of a room from its events, for verification.';

CREATE TABLE waiting_redactions (
    redaction_nid bigint NOT NULL,
    room_nid int NOT NULL,
    target_event_id text COLLATE "C" NOT NULL,
    CONSTRAINT waiting_redactions_pkey PRIMARY KEY (redaction_nid)
);
COMMENT ON TABLE waiting_redactions IS
    'Accepted redactions whose target is missing (or stored only as an outlier).';
CREATE INDEX waiting_redactions_target_idx ON waiting_redactions (target_event_id);
COMMENT ON INDEX waiting_redactions_target_idx IS
    'Serves: the redactions that wait for an arriving event.';

-- ------------------------------------------------------------------------------------------------
-- state

CREATE SEQUENCE state_group_nids AS bigint START 1 INCREMENT 1000;
CREATE TABLE state_groups (
    state_group bigint NOT NULL,
    digest bigint,
    audience bigint NOT NULL,
    room_nid int NOT NULL,
    entry_count int NOT NULL,
    runs int NOT NULL,
    back int[],
    key_nids int[],
    event_nids bigint[],
    member_key_nids int[],
    member_event_nids bigint[],
    key_nid int,
    member_key_nid int,
    event_nid bigint,
    path bytea,
    CONSTRAINT state_groups_pkey PRIMARY KEY (state_group) WITH (fillfactor = 100)
);
ALTER TABLE state_groups
    ALTER COLUMN key_nids SET STORAGE EXTERNAL,
    ALTER COLUMN event_nids SET STORAGE EXTERNAL,
    ALTER COLUMN member_key_nids SET STORAGE EXTERNAL,
    ALTER COLUMN member_event_nids SET STORAGE EXTERNAL;
COMMENT ON TABLE state_groups IS
    'One immutable row per distinct state, with the changes against its path only. To read it, '
    'fold the rows of the path (state_path), root first, by position in the path; own_entries has '
    'those of a row. Members are in columns of their own, so that a read of the rest of a big root '
    'does not read them. There is a row for every state change, so the columns are as narrow as '
    'possible.';
COMMENT ON COLUMN state_groups.digest IS
    'Order-independent sum over the entries: equal states have equal digests. NULL: the state '
    'after one event, on the low level of its path. Its digest follows from the last group of its '
    'path that has one.';
COMMENT ON COLUMN state_groups.audience IS
    'The audience of events that are sent under this state and do not change it.';
COMMENT ON COLUMN state_groups.entry_count IS 'Size of the whole state.';
COMMENT ON COLUMN state_groups.back IS
    'The whole path, the groups to fold: the difference of this group''s number to each of theirs. '
    'Root first, this group (0) last. NULL: see path.';
COMMENT ON COLUMN state_groups.runs IS
    'The number of rows of the path at each level (pack in storage/state/paths.py).';
COMMENT ON COLUMN state_groups.key_nids IS 'NULL: member keys only, or a single entry.';
COMMENT ON COLUMN state_groups.event_nids IS '0 removes the key.';
COMMENT ON COLUMN state_groups.member_key_nids IS 'NULL: no member, or a single entry.';
COMMENT ON COLUMN state_groups.member_event_nids IS '0 removes the key.';
COMMENT ON COLUMN state_groups.key_nid IS
    'The key of a single entry that is no member. Arrays of one key and one event take 54 bytes. '
    'NULL: another entry, none, or several.';
COMMENT ON COLUMN state_groups.member_key_nid IS 'The same of a member.';
COMMENT ON COLUMN state_groups.event_nid IS 'The event of a single entry; 0 removes the key.';
COMMENT ON COLUMN state_groups.path IS
    'The path in bytes (storage/state/paths.py): the differences as in back, without this group. A '
    'row on the low level has those to the rows of its level and to the last row before them, '
    'which has the beginning of the path. NULL: see back.';
CREATE INDEX state_groups_room_nid_idx ON state_groups (room_nid);
COMMENT ON INDEX state_groups_room_nid_idx IS
    'Serves: the groups of a room: garbage, purge, verification. Equal keys share their bytes, so '
    'it has no other column.';
CREATE INDEX state_groups_known_digest_idx ON state_groups (digest) WHERE digest IS NOT NULL;
COMMENT ON INDEX state_groups_known_digest_idx IS
    'Serves: the group that already has the resolved state of a merge.';

CREATE FUNCTION distance_in_path(path bytea, place int) RETURNS int
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE get_byte($1, 0) & 7
        WHEN 1 THEN get_byte($1, $2)
        WHEN 2 THEN (get_byte($1, 2 * $2 - 1) << 8) | get_byte($1, 2 * $2)
        WHEN 3 THEN (get_byte($1, 3 * $2 - 2) << 16) | (get_byte($1, 3 * $2 - 1) << 8)
            | get_byte($1, 3 * $2)
        ELSE (get_byte($1, 4 * $2 - 3) << 24) | (get_byte($1, 4 * $2 - 2) << 16)
            | (get_byte($1, 4 * $2 - 1) << 8) | get_byte($1, 4 * $2)
    END
$$;
COMMENT ON FUNCTION distance_in_path IS
    'The difference at a place, from 1, of state_groups.path. The lower three bits of its first '
    'byte are the number of bytes of each.';

CREATE FUNCTION distances_in_path(back int[], path bytea) RETURNS TABLE (distance int, place int)
LANGUAGE sql IMMUTABLE PARALLEL SAFE ROWS 8 AS $$
    SELECT COALESCE($1[i.place], distance_in_path($2, i.place)), i.place
    -- the planner expects ten rows, and a thousand of generate_series; no path has 72 groups
    FROM unnest((ARRAY[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
        22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44,
        45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67,
        68, 69, 70, 71])[1 : COALESCE(cardinality($1) - 1,
            (octet_length($2) - 1) / (get_byte($2, 0) & 7))]) AS i (place)
$$;
COMMENT ON FUNCTION distances_in_path IS
    'The differences that a row of state_groups has, from the columns of these names, without the '
    'group itself.';

CREATE FUNCTION state_path(state_group bigint) RETURNS TABLE (part bigint, place int)
LANGUAGE sql STABLE ROWS 20 AS $$
    SELECT b.state_group - d.distance, d.place - 100
    FROM state_groups g
    JOIN state_groups b ON b.state_group = g.state_group - distance_in_path(g.path, 1)
    CROSS JOIN LATERAL distances_in_path(b.back, b.path) AS d
    WHERE g.state_group = $1 AND get_byte(g.path, 0) > 4
    UNION ALL
    SELECT g.state_group - d.distance, d.place
    FROM state_groups g
    CROSS JOIN LATERAL distances_in_path(g.back, g.path) AS d
    WHERE g.state_group = $1
    UNION ALL
    SELECT $1, 100 WHERE $1 IS NOT NULL
$$;
COMMENT ON FUNCTION state_path IS
    'The groups to fold for a state, in the order of "place": root first, the group itself last. '
    'Missing groups are among them, but the groups before a missing one may not be.';

CREATE FUNCTION path_of(state_group bigint) RETURNS bigint[]
LANGUAGE sql STABLE STRICT AS $$
    SELECT ARRAY(SELECT step.part FROM state_path($1) AS step ORDER BY step.place)
$$;
COMMENT ON FUNCTION path_of IS 'The groups of state_path in one value. NULL for NULL.';

CREATE FUNCTION own_entries(
    key_nids int[], event_nids bigint[], member_key_nids int[], member_event_nids bigint[],
    key_nid int, member_key_nid int, event_nid bigint
) RETURNS TABLE (state_key_nid int, event_nid bigint, is_member boolean)
LANGUAGE sql IMMUTABLE PARALLEL SAFE ROWS 4 AS $$
    SELECT o.*, false FROM unnest($1, $2) AS o
    UNION ALL
    SELECT m.*, true FROM unnest($3, $4) AS m
    UNION ALL
    SELECT COALESCE($5, $6), $7, $5 IS NULL WHERE $7 IS NOT NULL
$$;
COMMENT ON FUNCTION own_entries IS
    'The entries of a row of state_groups, from the columns of these names. Event 0 removes the '
    'key.';

CREATE FUNCTION own_others(
    key_nids int[], event_nids bigint[], key_nid int, event_nid bigint
) RETURNS TABLE (state_key_nid int, event_nid bigint)
LANGUAGE sql IMMUTABLE PARALLEL SAFE ROWS 2 AS $$
    SELECT * FROM unnest($1, $2)
    UNION ALL
    SELECT $3, $4 WHERE $3 IS NOT NULL
$$;
COMMENT ON FUNCTION own_others IS 'As own_entries, without the members, which are not read.';

CREATE FUNCTION own_entry(
    wanted_nid int, is_member boolean,
    key_nids int[], event_nids bigint[], member_key_nids int[], member_event_nids bigint[],
    key_nid int, member_key_nid int, event_nid bigint
) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN $9 IS NOT NULL THEN CASE WHEN $1 = COALESCE($7, $8) THEN $9 END
        WHEN $2 THEN $6[array_position($5, $1)]
        ELSE $4[array_position($3, $1)]
    END
$$;
COMMENT ON FUNCTION own_entry IS
    'The event of a key in a row of state_groups, from the columns of these names; 0 removes the '
    'key. NULL: the row does not have it. A key that is no member does not read the members.';

CREATE TABLE current_state (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    state_key_nid int NOT NULL,
    membership smallint,
    CONSTRAINT current_state_pkey PRIMARY KEY (room_nid, state_key_nid)
) WITH (fillfactor = 85);
COMMENT ON TABLE current_state IS
    'The resolved state of each room, that of rooms.current_state_group, by key.';
COMMENT ON COLUMN current_state.membership IS 'As events.membership; NULL for other types.';
COMMENT ON CONSTRAINT current_state_pkey ON current_state IS
    'Serves: current state of a room, whole or by key.';
CREATE INDEX current_state_key_idx ON current_state (state_key_nid, room_nid);
COMMENT ON INDEX current_state_key_idx IS
    'Serves: the rooms of a user of any server (storage/queries/sharing.py).';

CREATE TABLE state_deltas (
    stream_ordering bigint NOT NULL,
    event_nid bigint,
    prev_event_nid bigint,
    room_nid int NOT NULL,
    state_key_nid int NOT NULL,
    writer_nid smallint NOT NULL,
    CONSTRAINT state_deltas_pkey PRIMARY KEY (room_nid, stream_ordering, state_key_nid)
        WITH (fillfactor = 100)
);
COMMENT ON TABLE state_deltas IS
    'The changes of each position of the events stream to the current state of its room.';
COMMENT ON COLUMN state_deltas.event_nid IS
    'The new value. NULL: the key was removed (by state resolution).';
COMMENT ON COLUMN state_deltas.prev_event_nid IS 'The value before. NULL: the key is new.';
COMMENT ON CONSTRAINT state_deltas_pkey ON state_deltas IS
    'Serves: the state that changed between two tokens.';

CREATE TABLE memberships (
    stream_ordering bigint NOT NULL,
    event_nid bigint NOT NULL,
    principal_nid int NOT NULL,
    room_nid int NOT NULL,
    writer_nid smallint NOT NULL,
    membership smallint NOT NULL,
    forgotten boolean NOT NULL DEFAULT false,
    CONSTRAINT memberships_pkey PRIMARY KEY (principal_nid, room_nid)
) WITH (fillfactor = 85);
COMMENT ON TABLE memberships IS
    'Each local user''s membership in each room: of the current state, or of an outlier (an '
    'invite or knock over federation) where this server is not in the room.';
COMMENT ON COLUMN memberships.stream_ordering IS 'Position of the last change.';
COMMENT ON COLUMN memberships.forgotten IS
    'The user has forgotten the room: it is not among the rooms that they left, and its history '
    'is hidden from them as from a user who was never there. It counts only while the membership '
    'is a leave or a ban. Any other membership clears it.';
COMMENT ON CONSTRAINT memberships_pkey ON memberships IS 'Serves: rooms of a user.';

CREATE TABLE outlier_memberships (
    stream_id bigint NOT NULL,
    event_nid bigint NOT NULL,
    writer_nid smallint NOT NULL,
    CONSTRAINT outlier_memberships_pkey PRIMARY KEY (stream_id)
);
COMMENT ON TABLE outlier_memberships IS
    'Facts of the stream "events" that are no timeline events: a local user''s invite or knock '
    'over federation, or its end.';
COMMENT ON CONSTRAINT outlier_memberships_pkey ON outlier_memberships IS
    'Serves: rows of the stream "events" in order.';

CREATE TABLE out_of_band_memberships (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    principal_nid int NOT NULL,
    stripped_state text COLLATE "C",
    CONSTRAINT out_of_band_memberships_pkey PRIMARY KEY (room_nid, principal_nid)
);
COMMENT ON TABLE out_of_band_memberships IS
    'Memberships of local users from an outlier, where this server is not in the room. The row is '
    'deleted when the room''s state has a membership of the user. It counts only while '
    'memberships has the same event.';
COMMENT ON COLUMN out_of_band_memberships.stripped_state IS
    'The room''s state that came with an invite or knock: a JSON list of stripped events.';
COMMENT ON CONSTRAINT out_of_band_memberships_pkey ON out_of_band_memberships IS
    'Serves: the memberships that end when this server joins the room; stripped state.';

CREATE FUNCTION is_out_of_band(event events) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT $1.outlier AND $1.rejected IS NULL AND COALESCE($1.membership <> 5, false)
        AND COALESCE($1.auth_events = '{}', $1.auth_distance_1 IS NULL)
$$;
COMMENT ON FUNCTION is_out_of_band IS
    'Whether an event is a membership that arrived out of band and was not authorised yet. The '
    'rules require auth events for each of these; it has none here.';

CREATE FUNCTION keep_auth_events() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT has_table_privilege(TG_RELID, 'UPDATE') THEN
        RAISE EXCEPTION 'the auth events of an event do not change'
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION keep_auth_events IS
    'Refuses new auth events for an event that has some already. Only roles that may change all '
    'columns may change them: a rebuild.';
CREATE TRIGGER events_auth_events_once
    BEFORE UPDATE OF auth_events, auth_distance_1, auth_distance_2, auth_distance_3,
        auth_distance_4 ON events
    FOR EACH ROW
    WHEN (
        auth_nids(OLD.event_nid, OLD.auth_events, OLD.auth_distance_1, OLD.auth_distance_2,
            OLD.auth_distance_3, OLD.auth_distance_4)
        IS DISTINCT FROM auth_nids(NEW.event_nid, NEW.auth_events, NEW.auth_distance_1,
            NEW.auth_distance_2, NEW.auth_distance_3, NEW.auth_distance_4)
        AND NOT is_out_of_band(OLD)
    )
    EXECUTE FUNCTION keep_auth_events();

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
    '0xA1, 4 of the pack, 4 of the offset, 3 of the length (storage/codec/codec.py).';
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

-- ------------------------------------------------------------------------------------------------
-- transactions of local users

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

-- ------------------------------------------------------------------------------------------------
-- auth chains

CREATE TABLE auth_chains (
    event_nid bigint NOT NULL,
    chain_nid bigint,
    sequence_number int NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    state_key text COLLATE "C" NOT NULL,
    link_1 bigint,
    link_2 bigint,
    CONSTRAINT auth_chains_pkey PRIMARY KEY (event_nid) WITH (fillfactor = 100)
);
COMMENT ON TABLE auth_chains IS
    'Chain cover of the auth graph: each state event has a position in one chain, and reaches '
    'every earlier position of that chain. A link means: from this position on, the chain reaches '
    'the target chain up to the target position. Only links that extend earlier ones are stored. '
    'Read the rows of a chain by chain_rows, and its links by reached_from.';
COMMENT ON COLUMN auth_chains.chain_nid IS
    'The number of the chain: minus the nid of its first event. NULL: the event is the first of '
    'a chain.';
COMMENT ON COLUMN auth_chains.event_id IS
    'As in events. This and the state key are repeated here because reads of a state or an auth '
    'chain fetch them by the thousand. These rows are dense; those of events hold the bytes.';
COMMENT ON COLUMN auth_chains.state_key IS 'As in state_keys.';
COMMENT ON COLUMN auth_chains.link_1 IS
    'A link that begins here: in the upper 32 bits event_nid minus the nid of the first event of '
    'the target chain, in the lower ones the target position. NULL: none. A row of '
    'auth_chain_links and its index entries take 100 bytes.';
COMMENT ON COLUMN auth_chains.link_2 IS 'Another one. Further ones are in auth_chain_links.';
COMMENT ON CONSTRAINT auth_chains_pkey ON auth_chains IS
    'Serves: the position of an event; the first event of a chain; the ids of a state and of an '
    'auth chain.';
CREATE UNIQUE INDEX auth_chains_position_key
    ON auth_chains (chain_nid DESC, sequence_number DESC)
    WITH (fillfactor = 100) WHERE chain_nid IS NOT NULL;
COMMENT ON INDEX auth_chains_position_key IS
    'Serves: the events of a range of a chain, without its first event. Most chains have no other. '
    'The numbers of chains fall, so it grows at its last page.';
CREATE INDEX auth_chains_link_1_idx
    ON auth_chains (((link_1 >> 32) - event_nid) DESC, ((link_1 & 4294967295)) DESC)
    WHERE link_1 IS NOT NULL;
COMMENT ON INDEX auth_chains_link_1_idx IS
    'Serves: the positions that reach a given one (linking_to). Most links lead to few targets, '
    'and equal keys share their bytes.';
CREATE INDEX auth_chains_link_2_idx
    ON auth_chains (((link_2 >> 32) - event_nid) DESC, ((link_2 & 4294967295)) DESC)
    WHERE link_2 IS NOT NULL;
COMMENT ON INDEX auth_chains_link_2_idx IS 'Serves: the same.';

CREATE TABLE auth_chain_links (
    chain_nid bigint NOT NULL,
    target_chain_nid bigint NOT NULL,
    sequence_number int NOT NULL,
    target_sequence_number int NOT NULL,
    CONSTRAINT auth_chain_links_pkey PRIMARY KEY (chain_nid, sequence_number, target_chain_nid)
);
COMMENT ON TABLE auth_chain_links IS
    'Links that do not fit into auth_chains: the third of a position and further ones, and links '
    'to events whose nids are far away.';
COMMENT ON CONSTRAINT auth_chain_links_pkey ON auth_chain_links IS
    'Serves: the chains that a position reaches.';
CREATE INDEX auth_chain_links_target_idx
    ON auth_chain_links (target_chain_nid, target_sequence_number);
COMMENT ON INDEX auth_chain_links_target_idx IS 'Serves: the positions that reach a given one.';

-- ------------------------------------------------------------------------------------------------
-- visibility

CREATE TABLE visibility (
    last_join_topological bigint,
    room_nid int NOT NULL,
    principal_nid int NOT NULL,
    joined_count int NOT NULL,
    invited_count int NOT NULL,
    audiences int8multirange NOT NULL,
    invited_audiences int8multirange,
    first_audience bigint,
    CONSTRAINT visibility_pkey PRIMARY KEY (room_nid, principal_nid)
) WITH (fillfactor = 85);
COMMENT ON TABLE visibility IS
    'The audiences of a room that a principal is in: a local user, a server, everybody (principal '
    '1) or all users that joined later (principal 2). An event is visible to a principal whose '
    'audiences contain the event''s audience.';
COMMENT ON COLUMN visibility.last_join_topological IS
    'Local users: largest topological ordering of their accepted joins; "shared" events before it '
    'are visible to them. NULL: never joined.';
COMMENT ON COLUMN visibility.joined_count IS
    'Users of this principal (itself, or those of the server) that are joined in the current '
    'state.';
COMMENT ON COLUMN visibility.invited_count IS 'The same for invited.';
COMMENT ON COLUMN visibility.audiences IS
    'A range without an upper end means that the principal is in the audience of the current '
    'state, and so by default in later ones.';
COMMENT ON COLUMN visibility.invited_audiences IS
    'The audiences that the principal is in by an invitation alone, under "invited". Events of '
    'erased senders are visible only to those who were joined. NULL for none.';
COMMENT ON COLUMN visibility.first_audience IS
    'The row covers the audiences from this one on. Those below are in past_visibility. NULL: '
    'there are none.';
COMMENT ON CONSTRAINT visibility_pkey ON visibility IS
    'Serves: the join of every read that filters.';
CREATE INDEX visibility_servers_idx ON visibility (room_nid) WHERE last_join_topological IS NULL;
COMMENT ON INDEX visibility_servers_idx IS
    'Serves: the servers in a room (storage/queries/members.py). It lacks the local users '
    'who have joined, of whom a room may have many thousands.';

CREATE TABLE past_visibility (
    first_audience bigint NOT NULL,
    opened_topological bigint NOT NULL,
    room_nid int NOT NULL,
    principal_nid int NOT NULL,
    audiences int8multirange NOT NULL,
    invited_audiences int8multirange,
    topological_ranges int8multirange NOT NULL,
    CONSTRAINT past_visibility_pkey PRIMARY KEY (room_nid, principal_nid, first_audience)
);
COMMENT ON TABLE past_visibility IS
    'The older ranges of a principal that has joined and left often, a few per row '
    '(storage/visibility/rule.py). A row covers the audiences from first_audience up to the next '
    'row''s, the last one up to visibility.first_audience.';
COMMENT ON COLUMN past_visibility.opened_topological IS
    'The maximum of the topological order when first_audience was opened. It grows with '
    'first_audience.';
COMMENT ON COLUMN past_visibility.audiences IS 'As in visibility, of these audiences only.';
COMMENT ON COLUMN past_visibility.invited_audiences IS 'As in visibility, of these audiences only.';
COMMENT ON COLUMN past_visibility.topological_ranges IS
    'The topological ranges with the events of these audiences, from disjoint_topological_ranges. '
    'They never change, because audiences.opened_topological of old numbers does not.';
COMMENT ON CONSTRAINT past_visibility_pkey ON past_visibility IS
    'Serves: whether a principal is in an old audience (saw_before).';
CREATE INDEX past_visibility_order_idx
    ON past_visibility (room_nid, principal_nid, opened_topological, first_audience);
COMMENT ON INDEX past_visibility_order_idx IS
    'Serves: the rows near a topological position (visibility_near).';

CREATE VIEW whole_visibility AS
SELECT v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count,
    v.audiences + COALESCE(past.audiences, '{}') AS audiences,
    COALESCE(v.invited_audiences, '{}') + COALESCE(past.invited_audiences,
        '{}') AS invited_audiences
FROM visibility v
LEFT JOIN LATERAL (
    SELECT range_agg(p.audiences * p.numbers) AS audiences,
        range_agg(p.invited_audiences * p.numbers) AS invited_audiences
    FROM (
        SELECT o.audiences, o.invited_audiences,
            int8multirange(int8range(o.first_audience,
                lead(o.first_audience, 1, v.first_audience)
                    OVER (ORDER BY o.first_audience))) AS numbers
        FROM past_visibility o
        WHERE o.room_nid = v.room_nid AND o.principal_nid = v.principal_nid
            AND o.first_audience < v.first_audience
    ) AS p
) AS past ON v.first_audience IS NOT NULL;
COMMENT ON VIEW whole_visibility IS
    'All audiences of each principal in one value, for maintenance and export. invited_audiences '
    'is empty for none.';

CREATE TABLE audiences (
    audience bigint NOT NULL,
    opened_topological bigint,
    room_nid int NOT NULL,
    branches int NOT NULL,
    continued boolean,
    CONSTRAINT audiences_pkey PRIMARY KEY (room_nid, audience) WITH (fillfactor = 100)
);
COMMENT ON TABLE audiences IS
    'The numbers in use. They are on lines: the main line follows the current state in steps of '
    '2^40, and the numbers between two steps are for lines that branch off there '
    '(storage/visibility/multirange.py).';
COMMENT ON COLUMN audiences.branches IS 'The number of lines that branch off this number.';
COMMENT ON COLUMN audiences.continued IS
    'The line has further numbers after this one. NULL: it has none.';
COMMENT ON COLUMN audiences.opened_topological IS
    'On the main line: the maximum of the topological order when the number was opened. It grows '
    'with the numbers. So events of this number, and of its branches, lie between this and the '
    'next number''s value, within order_slack(), or in rooms.out_of_range. NULL: a number that '
    'branches off, or one for a single state.';
COMMENT ON CONSTRAINT audiences_pkey ON audiences IS
    'Serves: the number of a new audience; the topological ranges of a reader''s audiences '
    '(topological_ranges_of).';

CREATE TABLE erased_users (
    erased_ts bigint NOT NULL,
    principal_nid int NOT NULL,
    CONSTRAINT erased_users_pkey PRIMARY KEY (principal_nid)
);
COMMENT ON TABLE erased_users IS
    'Senders who requested erasure. Readers who were not joined at an event of theirs get its '
    'redacted form. Their events stay unchanged.';
COMMENT ON CONSTRAINT erased_users_pkey ON erased_users IS
    'Serves: every read that shows events to users or servers.';

-- ------------------------------------------------------------------------------------------------
-- streams

CREATE TABLE stream_positions (
    stream_name text COLLATE "C" NOT NULL,
    instance_name text COLLATE "C" NOT NULL,
    stream_id bigint NOT NULL,
    entered_at bigint NOT NULL DEFAULT 0,
    epoch int NOT NULL DEFAULT 0,
    CONSTRAINT stream_positions_pkey PRIMARY KEY (stream_name, instance_name)
) WITH (fillfactor = 50);
COMMENT ON TABLE stream_positions IS
    'The position of each writer in each stream: all its facts up to here are committed. Written '
    'in the transaction of the facts.';
COMMENT ON COLUMN stream_positions.epoch IS
    'A new number whenever the writer starts again: when it opens, and when it resolves the '
    'outcome of a write whose response was lost. A late write of an earlier epoch is refused, and '
    'a running one is waited for, because each updates this row.';
COMMENT ON COLUMN stream_positions.entered_at IS
    'The value of the sequence when the writer first started: all its facts are above.';
COMMENT ON CONSTRAINT stream_positions_pkey ON stream_positions IS
    'Serves: positions at start-up and in each sync.';

CREATE TABLE purged_streams (
    stream_name text COLLATE "C" NOT NULL,
    purged_upto bigint NOT NULL,
    CONSTRAINT purged_streams_pkey PRIMARY KEY (stream_name)
);
COMMENT ON TABLE purged_streams IS
    'Streams with deleted facts that a reader with an old token may need. For "events": facts '
    '(including state_deltas) up to there may be deleted, so a sync from an earlier token must '
    'restart (ResyncNeeded). No row: nothing was deleted.';
COMMENT ON COLUMN purged_streams.purged_upto IS
    'The largest such position. Each deletion sets it, in the same transaction.';
COMMENT ON CONSTRAINT purged_streams_pkey ON purged_streams IS 'Serves: each sync.';

CREATE TABLE lost_positions (
    stream_name text COLLATE "C" NOT NULL,
    lost_after bigint NOT NULL,
    lost_upto bigint NOT NULL,
    instance_names text[] COLLATE "C" NOT NULL DEFAULT '{}',
    kept_upto bigint[] NOT NULL DEFAULT '{}',
    CONSTRAINT lost_positions_pkey PRIMARY KEY (stream_name, lost_upto),
    CONSTRAINT lost_positions_check CHECK (lost_after < lost_upto),
    CONSTRAINT lost_positions_writers_check CHECK (cardinality(instance_names)
        = cardinality(kept_upto))
);
COMMENT ON TABLE lost_positions IS
    'Gaps in the streams from a restore of the database. Positions between were assigned, if at '
    'all, to facts that are lost, and are never assigned again '
    '(storage/streams/restore_detection.py).';
COMMENT ON COLUMN lost_positions.instance_names IS
    'The writers of the stream. Empty: the gap is from code that did not store them.';
COMMENT ON COLUMN lost_positions.kept_upto IS
    'For each of these writers, the position up to which its facts were kept. Its gap begins '
    'there, at or before lost_after, because writers do not commit in the order of their ids.';
COMMENT ON CONSTRAINT lost_positions_pkey ON lost_positions IS
    'Serves: the tokens that an opening store has to refuse.';

CREATE SEQUENCE writer_nids AS smallint START 1;
CREATE TABLE writers (
    writer_nid smallint NOT NULL DEFAULT nextval('writer_nids'),
    instance_name text COLLATE "C" NOT NULL,
    schema_revision text COLLATE "C" NOT NULL DEFAULT '',
    CONSTRAINT writers_pkey PRIMARY KEY (writer_nid),
    CONSTRAINT writers_instance_name_key UNIQUE (instance_name)
);
COMMENT ON TABLE writers IS
    'The processes that write facts, by name. A fact names its writer, because positions are kept '
    'per writer.';
COMMENT ON COLUMN writers.schema_revision IS
    'The latest revision that the code of the last process of this name knows. Serves: "post" '
    'steps of migrations.';
COMMENT ON CONSTRAINT writers_instance_name_key ON writers IS
    'Serves: the number of a store that opens.';

CREATE SEQUENCE account_data_stream AS bigint START 2;
CREATE TABLE account_data (
    stream_id bigint NOT NULL,
    principal_nid int NOT NULL,
    room_nid int NOT NULL,
    type_nid int NOT NULL,
    writer_nid smallint NOT NULL,
    content bytea NOT NULL,
    CONSTRAINT account_data_pkey PRIMARY KEY (principal_nid, room_nid, type_nid),
    CONSTRAINT account_data_stream_id_key UNIQUE (stream_id)
);
COMMENT ON TABLE account_data IS
    'Data that a local user''s clients store on the server: the latest content of each type.';
COMMENT ON COLUMN account_data.room_nid IS '0: global, not of a room.';
COMMENT ON COLUMN account_data.content IS 'The JSON object as received.';
COMMENT ON CONSTRAINT account_data_pkey ON account_data IS 'Serves: the account data of a user.';
COMMENT ON CONSTRAINT account_data_stream_id_key ON account_data IS
    'Serves: rows of the stream in order.';
CREATE INDEX account_data_user_idx ON account_data (principal_nid, stream_id);
COMMENT ON INDEX account_data_user_idx IS
    'Serves: the account data of a user that changed since a position.';

CREATE SEQUENCE to_device_stream AS bigint START 2;
CREATE TABLE to_device (
    stream_id bigint NOT NULL,
    principal_nid int NOT NULL,
    writer_nid smallint NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    content bytea NOT NULL,
    CONSTRAINT to_device_pkey PRIMARY KEY (stream_id)
);
COMMENT ON TABLE to_device IS
    'Messages that wait for a device of a local user; deleted once the device has them.';
COMMENT ON CONSTRAINT to_device_pkey ON to_device IS 'Serves: rows of the stream in order.';
CREATE INDEX to_device_inbox_idx ON to_device (principal_nid, device_id, stream_id);
COMMENT ON INDEX to_device_inbox_idx IS 'Serves: the inbox of a device.';

CREATE SEQUENCE receipts_stream AS bigint START 2;
CREATE TABLE receipts (
    stream_id bigint NOT NULL,
    room_nid int NOT NULL,
    principal_nid int NOT NULL,
    writer_nid smallint NOT NULL,
    receipt_type text COLLATE "C" NOT NULL,
    thread_id text COLLATE "C" NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    CONSTRAINT receipts_pkey PRIMARY KEY (room_nid, principal_nid, receipt_type, thread_id),
    CONSTRAINT receipts_stream_id_key UNIQUE (stream_id)
);
COMMENT ON TABLE receipts IS
    'The read position of each user in a room: the latest receipt of each type and thread.';
COMMENT ON COLUMN receipts.thread_id IS 'Empty: not of a thread.';
COMMENT ON COLUMN receipts.data IS 'The JSON object as received.';
COMMENT ON CONSTRAINT receipts_pkey ON receipts IS 'Serves: the receipts of a room.';
COMMENT ON CONSTRAINT receipts_stream_id_key ON receipts IS 'Serves: rows of the stream in order.';
CREATE INDEX receipts_room_stream_idx ON receipts (room_nid, stream_id);
COMMENT ON INDEX receipts_room_stream_idx IS 'Serves: the receipts of a room since a token.';

CREATE SEQUENCE caches_stream AS bigint START 2;
CREATE TABLE cache_invalidations (
    stream_id bigint NOT NULL,
    invalidation_ts bigint NOT NULL,
    writer_nid smallint NOT NULL,
    cache_name text COLLATE "C" NOT NULL,
    keys text[],
    CONSTRAINT cache_invalidations_pkey PRIMARY KEY (stream_id)
);
COMMENT ON TABLE cache_invalidations IS
    'Cache entries that other processes have to drop: the facts of the stream "caches".';
COMMENT ON COLUMN cache_invalidations.keys IS 'The key of the entry. NULL: the whole cache.';
COMMENT ON CONSTRAINT cache_invalidations_pkey ON cache_invalidations IS
    'Serves: rows of the stream in order.';

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

-- ------------------------------------------------------------------------------------------------
-- sliding sync

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

-- ------------------------------------------------------------------------------------------------
-- purges

CREATE SEQUENCE purge_job_ids AS int START 1;
CREATE TABLE purge_jobs (
    topological_cut bigint,
    stream_cut bigint,
    arrived_upto bigint NOT NULL,
    started_ts bigint NOT NULL,
    updated_ts bigint NOT NULL,
    finished_ts bigint,
    deleted_count bigint NOT NULL DEFAULT 0,
    set_aside_count bigint NOT NULL DEFAULT 0,
    swept_count bigint NOT NULL DEFAULT 0,
    state_group_count bigint NOT NULL DEFAULT 0,
    job_id int NOT NULL,
    room_nid int NOT NULL,
    local boolean NOT NULL,
    room_id text COLLATE "C" NOT NULL,
    phase text COLLATE "C" NOT NULL,
    error text,
    CONSTRAINT purge_jobs_pkey PRIMARY KEY (job_id),
    CONSTRAINT purge_jobs_cut_check CHECK ((topological_cut IS NULL) = (stream_cut IS NULL)),
    CONSTRAINT purge_jobs_finished_check CHECK ((finished_ts IS NULL) = (phase <> 'done'))
);
COMMENT ON TABLE purge_jobs IS
    'Purges of rooms and their progress (storage/maintenance/purge). An unfinished one was '
    'interrupted, or is running: then a session has the advisory lock (1919905646, room_nid). '
    'Rows of finished ones stay: they show verification that history was deleted on purpose.';
COMMENT ON COLUMN purge_jobs.topological_cut IS
    'Events below it are deleted. NULL, as the next: the whole room.';
COMMENT ON COLUMN purge_jobs.stream_cut IS
    'Live events above it are not deleted: purged_streams never passes it.';
COMMENT ON COLUMN purge_jobs.arrived_upto IS
    'The stream position when the job began. Later arrivals are not touched.';
COMMENT ON COLUMN purge_jobs.deleted_count IS 'Deleted timeline events.';
COMMENT ON COLUMN purge_jobs.set_aside_count IS 'Timeline events that became outliers.';
COMMENT ON COLUMN purge_jobs.swept_count IS
    'Deleted outliers, among those set aside, that nothing needed at the end.';
COMMENT ON COLUMN purge_jobs.state_group_count IS 'Deleted state groups.';
COMMENT ON COLUMN purge_jobs.local IS
    'Also delete events of local users, which no other server may have.';
COMMENT ON COLUMN purge_jobs.room_id IS
    'For people: after the purge of a whole room it is stored nowhere else.';
COMMENT ON COLUMN purge_jobs.phase IS
    'The current phase: history, deltas, groups, sweep, room; done.';
COMMENT ON COLUMN purge_jobs.error IS 'The error of the last interrupted run.';
CREATE INDEX purge_jobs_room_idx ON purge_jobs (room_nid);
COMMENT ON INDEX purge_jobs_room_idx IS
    'Serves: the job to resume; whether a room was purged, for verification.';

CREATE TABLE purge_retained_events (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    local boolean NOT NULL,
    CONSTRAINT purge_retained_events_pkey PRIMARY KEY (room_nid, event_nid)
);
COMMENT ON TABLE purge_retained_events IS
    'Events that a purge retained: they became outliers, or stay in the timeline, because '
    'something may need them. The purge deletes at its end those that nothing needs. The others '
    'leave this table when they come back to the timeline.';
COMMENT ON COLUMN purge_retained_events.local IS
    'Sent by a local user: deleted only if a purge includes local events.';
COMMENT ON CONSTRAINT purge_retained_events_pkey ON purge_retained_events IS
    'Serves: the end of a purge.';

-- ------------------------------------------------------------------------------------------------
-- imports

CREATE SEQUENCE import_numbers AS int START 1;
CREATE UNLOGGED TABLE import_events (
    place bigint NOT NULL,
    import_number int NOT NULL,
    json bytea NOT NULL,
    CONSTRAINT import_events_pkey PRIMARY KEY (import_number, place)
);
ALTER TABLE import_events ALTER COLUMN json SET STORAGE EXTERNAL;
COMMENT ON TABLE import_events IS
    'The received bytes of an import on Spark (storage/pipeline), from the read of a line until '
    'its room is stored. Empty at other times. Unlogged: a crash empties it, and the import is '
    'run again.';
COMMENT ON COLUMN import_events.place IS 'The file and the line, as the import numbers them.';
COMMENT ON COLUMN import_events.import_number IS
    'It separates the rows of a leftover task of an ended import from the next import.';
COMMENT ON COLUMN import_events.json IS
    'The bytes of an event, in a form as events.json has; or a bundle of events without bytes.';
COMMENT ON CONSTRAINT import_events_pkey ON import_events IS
    'Serves: the bytes of planned events; the earlier rows of a repeated task.';

-- ------------------------------------------------------------------------------------------------
-- functions

CREATE FUNCTION refuse_stale_plan(detail text) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the plan of this write is out of date' USING ERRCODE = 'RS001',
        DETAIL = detail;
END
$$;
COMMENT ON FUNCTION refuse_stale_plan IS
    'Ends a write whose plan no longer fits the tables; the writer plans again.';

CREATE FUNCTION dependencies_purged(
    timeline_nids bigint[], stored_nids bigint[], state_groups bigint[], event_ids text[],
    event_nids bigint[], redaction_nids bigint[]
) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (  -- $1: no longer in the timeline
        SELECT
        FROM unnest($1) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x
            WHERE x.event_nid = n.event_nid AND NOT x.outlier OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $2: no longer stored
        SELECT
        FROM unnest($2) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x
            WHERE x.event_nid = n.event_nid OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $3: no longer stored
        SELECT
        FROM unnest($3) AS n (state_group)
        LEFT JOIN LATERAL (SELECT true AS there FROM state_groups x
            WHERE x.state_group = n.state_group OFFSET 0) AS g ON true
        WHERE g.there IS NULL
    ) OR EXISTS (  -- $4 and $5: missing under another nid
        SELECT
        FROM unnest($4, $5) AS n (event_id, event_nid)
        CROSS JOIN LATERAL (SELECT x.event_nid FROM missing_events x
            WHERE x.event_id = n.event_id OFFSET 0) AS m
        WHERE m.event_nid <> n.event_nid
    ) OR EXISTS (  -- $4: target of another waiting redaction than $6
        SELECT
        FROM unnest($4) AS n (event_id)
        CROSS JOIN LATERAL (SELECT x.redaction_nid FROM waiting_redactions x
            WHERE x.target_event_id = n.event_id OFFSET 0) AS w
        WHERE w.redaction_nid <> ALL ($6)
    );
END
$$;
COMMENT ON FUNCTION dependencies_purged IS
    'Whether a row was deleted that a write depends on (storage/persist/write/dependencies.py). '
    'VOLATILE, so it sees commits made while the write waited for its room, which the calling '
    'statement does not.';

CREATE FUNCTION refuse_old_writer(instance_name text) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the writer % has started a new epoch since this write was planned',
        instance_name USING ERRCODE = 'RS002';
END
$$;
COMMENT ON FUNCTION refuse_old_writer IS
    'Ends a write of an earlier epoch of its writer (stream_positions.epoch).';

CREATE FUNCTION is_session_of(application_name text, instance_name text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT $1 = left('room-storage ' || $2, 63) OR starts_with($1, 'room-storage ' || $2 || ' ')
$$;
COMMENT ON FUNCTION is_session_of IS
    'Whether a session (pg_stat_activity) belongs to the writer of this name, which shows that '
    'the writer is live.';

-- The common parts of reads, as views and functions that the planner inlines into the calling query
-- (tests/queries/test_plans.py checks that it does). None of them is a separate step at run time.

CREATE VIEW stored_events AS
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.stream_ordering,
    e.topological_ordering, claimed_depth(e.depth, e.topological_ordering) AS depth,
    b.event_id AS redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding,
        e.json
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by;
COMMENT ON VIEW stored_events IS
    'An event as every read returns it (StoredRow in storage/queries/events.py): these columns, '
    'in this order.';

CREATE FUNCTION visibility_of(room_nid int, principal_nid int)
RETURNS TABLE (
    own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange,
        shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT own.audiences, shared.audiences, world.audiences,
        CASE WHEN own.joined_count > 0 THEN 9223372036854775807 ELSE own.last_join_topological END,
        CASE WHEN own.invited_audiences IS NULL THEN own.audiences
            ELSE own.audiences - own.invited_audiences END,
        CASE
            WHEN own.invited_audiences IS NULL AND upper_inf(own.audiences)
                AND range_merge(own.audiences)::int8multirange = own.audiences
                THEN lower(own.audiences)
        END,
        CASE WHEN left_room.room_nid IS NULL THEN $2 ELSE 0 END,
        CASE WHEN COALESCE(own.first_audience, shared.first_audience,
            world.first_audience) IS NOT NULL
            THEN int8multirange(int8range(NULL,
                GREATEST(own.first_audience, shared.first_audience, world.first_audience)))
        END
    FROM (VALUES ($1)) AS room (room_nid)
    LEFT JOIN memberships left_room ON left_room.principal_nid = $2
        AND left_room.room_nid = room.room_nid AND left_room.forgotten AND left_room.membership < 3
    LEFT JOIN visibility own ON own.room_nid = room.room_nid AND own.principal_nid = $2
        AND left_room.room_nid IS NULL
    LEFT JOIN visibility shared ON shared.room_nid = room.room_nid AND shared.principal_nid = 2
    LEFT JOIN visibility world ON world.room_nid = room.room_nid AND world.principal_nid = 1
$$;
COMMENT ON FUNCTION visibility_of IS
    'The visibility of a principal in a room, always one row, for user_sees and server_sees. It '
    'has the principal''s own audiences, the "shared" ones and the world-readable ones, and the '
    'topological ordering below which shared ones are visible to a user. It also has the own '
    'audiences with a join, for was_there. joined_since is the first of them, if all later ones '
    'follow: then one comparison of numbers replaces the look into the ranges for nearly every '
    'event. "unread" are the audiences that past_visibility covers, NULL for none: these columns '
    'do not cover them, saw_before does. A user who has forgotten the room has no own audiences.';

CREATE FUNCTION saw_before(room_nid int, principal_nid int, audience bigint,
    shared boolean) RETURNS boolean
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
    'Whether past_visibility has an audience among those of a principal, of everybody, or among '
    'the shared ones if these are visible to the principal. One index probe each. plpgsql, so '
    'that only an event that needs it costs anything.';

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
COMMENT ON FUNCTION joined_before IS
    'Whether past_visibility has an audience among those in which a principal is joined. For '
    'was_there_before.';

CREATE FUNCTION user_sees(
    event events, joined_since bigint, own_audiences int8multirange,
        shared_audiences int8multirange, world_audiences int8multirange,
    shared_before bigint, reader_nid int, unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT $1.outlier AND $1.rejected IS NULL AND NOT $1.soft_failed AND NOT $1.ineffective
        AND CASE
        WHEN $1.audience >= $2 OR $3 @> $1.audience
            OR ($4 @> $1.audience AND $1.topological_ordering < $6) OR $5 @> $1.audience THEN true
        WHEN $8 @> $1.audience THEN saw_before($1.room_nid, $7, $1.audience,
            $1.topological_ordering < $6)
        ELSE false
    END
$$;
COMMENT ON FUNCTION user_sees IS
    'Whether a local user may see an event. This is decided only here, by the audience that was '
    'computed when the event was persisted. All arguments but the event come from visibility_of '
    'or topological_ranges_of. CASE makes the planner expect half of the events to be visible. '
    'Otherwise it would expect one in a hundred, and sort instead of following an index.';

CREATE FUNCTION was_there(event events, joined_since bigint,
    joined_audiences int8multirange) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT COALESCE($1.audience >= $2 OR $3 @> $1.audience, false)
$$;
COMMENT ON FUNCTION was_there IS
    'Whether the reader (a user, or any user of a server) was joined at an event, or at its own '
    'membership event before or after it. Other readers get only the redacted form of events of '
    'erased senders.';

CREATE FUNCTION was_there_before(event events, reader_nid int,
    unread int8multirange) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN $3 @> $1.audience THEN joined_before($1.room_nid, $2, $1.audience)
        ELSE false END
$$;
COMMENT ON FUNCTION was_there_before IS
    'The same for the audiences that were not read. A separate function, so that it runs last, '
    'for events of erased senders.';

CREATE FUNCTION not_ignored(event events, ignored int[]) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF($1.state_key_nid IS NULL AND $1.sender_nid = ANY ($2), true) IS NOT NULL
$$;
COMMENT ON FUNCTION not_ignored IS
    'Whether an event is shown to a reader who ignores these senders: state always is '
    '(client-server API, "Ignoring Users"). The form makes the planner expect true nearly always.';

CREATE FUNCTION types_like(patterns text[]) RETURNS int[]
LANGUAGE sql STABLE STRICT AS $$
    SELECT ARRAY(
        SELECT t.type_nid
        FROM unnest($1) AS p (pattern)
        JOIN event_types t ON t.type = p.pattern
        WHERE strpos(p.pattern, '*') = 0
        UNION
        SELECT t.type_nid
        FROM unnest($1) AS p (pattern)
        CROSS JOIN split_part(p.pattern, '*', 1) AS beginning
        JOIN event_types t ON t.type >= beginning
            AND t.type <= beginning || repeat(chr(1114111), 64)
        WHERE strpos(p.pattern, '*') > 0
            AND t.type LIKE replace(regexp_replace(p.pattern, '([\\%_])', '\\\1', 'g'), '*', '%')
    )
$$;
COMMENT ON FUNCTION types_like IS
    'The event types that match one of the patterns, in which * matches any characters. The part '
    'before the first * is looked up by index. The upper bound appends the last character as '
    'often as a type can have it, so every type with that beginning is below. NULL for NULL.';

CREATE FUNCTION principals_named(names text[]) RETURNS int[]
LANGUAGE sql STABLE STRICT AS $$
    SELECT ARRAY(SELECT principal_nid FROM principals WHERE name = ANY ($1))
$$;
COMMENT ON FUNCTION principals_named IS
    'The numbers of those principals that are stored. NULL for NULL.';

CREATE FUNCTION filter_of(types text[], not_types text[], senders text[], not_senders text[],
    contains_url boolean)
RETURNS TABLE (types int[], not_types int[], senders int[], not_senders int[], contains_url boolean)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT types_like($1), types_like($2), principals_named($3), principals_named($4), $5
$$;
COMMENT ON FUNCTION filter_of IS
    'A filter of events (client-server API, "Filtering") in numbers, always one row, for '
    'is_wanted. NULL for an absent condition.';

CREATE FUNCTION is_wanted(event events, types int[], not_types int[], senders int[],
    not_senders int[], contains_url boolean) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF(
        COALESCE($1.type_nid <> ALL ($2), false) OR COALESCE($1.type_nid = ANY ($3), false)
            OR COALESCE($1.sender_nid <> ALL ($4), false)
                OR COALESCE($1.sender_nid = ANY ($5), false)
            OR COALESCE($6 <> ($1.has_url IS NOT NULL AND $1.redacted_by IS NULL), false),
        true
    ) IS NOT NULL
$$;
COMMENT ON FUNCTION is_wanted IS
    'Whether an event passes a filter from filter_of. Exclusions win. A redacted event has no URL '
    'any more.';

CREATE FUNCTION relation_key(event_id text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ('x' || encode(substring(sha256(convert_to($1, 'UTF8')) FROM 1 FOR 8),
        'hex'))::bit(64)::bigint
$$;
COMMENT ON FUNCTION relation_key IS
    'The number under which relations to an event are indexed (events.relates_to): 64 bits of a '
    'hash of its id. A collision of two ids lets an attacker do no more than naming both ids '
    'would.';

CREATE FUNCTION user_sees_relation(
    event events, joined_since bigint, own_audiences int8multirange,
        shared_audiences int8multirange, world_audiences int8multirange,
    shared_before bigint, reader_nid int, unread int8multirange, ignored int[]
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT $1.redacted_by IS NULL AND user_sees($1, $2, $3, $4, $5, $6, $7, $8)
        AND not_ignored($1, $9)
$$;
COMMENT ON FUNCTION user_sees_relation IS
    'Whether the relation of an event counts for a user: a redacted event has no relation. The '
    'erasure of its sender also removes it for users who were not joined. Queries check that '
    'themselves, because Postgres does not inline a function with a subquery.';

CREATE FUNCTION order_slack() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 100::bigint $$;
COMMENT ON FUNCTION order_slack IS
    'How far an event may be outside of its audience''s topological range before it is out of '
    'range (storage/visibility/multirange.py). Concurrent events of several servers cross '
    'the bound by a little.';

CREATE FUNCTION disjoint_topological_ranges(
    room_nid int, seen int8multirange, shared_audiences int8multirange, shared_before bigint,
        out_of_range int8multirange
) RETURNS int8multirange
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT range_agg(part.orders)
        FROM (
            SELECT int8range((
                SELECT a.opened_topological - order_slack()
                FROM audiences a
                WHERE a.room_nid = $1 AND a.audience <= (lower(runs.run) >> 40) << 40
                    AND a.opened_topological IS NOT NULL
                ORDER BY a.audience DESC
                LIMIT 1
            ), (
                SELECT a.opened_topological + order_slack() + 1
                FROM audiences a
                WHERE a.room_nid = $1
                    AND a.audience >= ((upper(runs.run) + 1099511627775) >> 40) << 40
                        AND a.opened_topological IS NOT NULL
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
    'For topological_ranges_of, for a reader who joined and left, or with out-of-range events: '
    'two probes of audiences for each range. plpgsql, so that it is planned and set up only for '
    'the few readers who need it.';

CREATE FUNCTION visibility_near(room_nid int, principal_nid int, out_of_range int8multirange,
    place bigint, below bigint, above bigint)
RETURNS int8multirange[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    last CONSTANT bigint := 9223372036854775807;
    at_place CONSTANT bigint := LEAST(place, last - 1000000);
    -- the row of visibility: first the reader's, then those of everybody and of "shared"
    seen record;
    past_audiences int8multirange;  -- from the rows of past_visibility near the position
    past_invited int8multirange;
    past_ranges int8multirange;
    lowest bigint;
    highest bigint;
    beginning bigint;
    next bigint;  -- the first audience after those
    known int8multirange;  -- the audiences that were read
    sought int8multirange;  -- those whose topological ranges are looked up
    own int8multirange;
    joined int8multirange;
    shared int8multirange;
    world int8multirange;
    unread int8multirange := '{}';
    shared_before bigint;
    sought_shared int8multirange;
    sought_others int8multirange := '{}';
    topological_ranges int8multirange := out_of_range
        + int8multirange(int8range(at_place, at_place + 1));
BEGIN
    FOR seen IN
        SELECT v.principal_nid, v.audiences, v.invited_audiences, v.first_audience, v.joined_count,
            v.last_join_topological
        FROM visibility v
        WHERE v.room_nid = $1 AND v.principal_nid IN ($2, 1, 2)
        ORDER BY v.principal_nid = $2 DESC
    LOOP
        known := seen.audiences;
        sought := seen.audiences;
        past_audiences := '{}';
        past_invited := '{}';
        past_ranges := '{}';
        IF seen.first_audience IS NOT NULL THEN
            beginning := CASE WHEN above > 0 THEN (
                SELECT max(p.first_audience)
                FROM past_visibility p
                WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid
                    AND p.first_audience <= COALESCE((
                    -- audiences before the block of such a row were closed when it was opened
                    SELECT (o.first_audience >> 40) << 40
                    FROM past_visibility o
                    WHERE o.room_nid = $1 AND o.principal_nid = seen.principal_nid
                        AND o.opened_topological < at_place - order_slack()
                    ORDER BY o.opened_topological DESC, o.first_audience DESC
                    LIMIT 1
                ), 0)
            ) END;
            SELECT COALESCE(range_agg(p.audiences), '{}'),
                COALESCE(range_agg(p.invited_audiences), '{}'),
                    COALESCE(range_agg(p.topological_ranges), '{}'),
                min(p.first_audience), max(p.first_audience)
            INTO past_audiences, past_invited, past_ranges, lowest, highest
            FROM (
                (
                    SELECT p.*
                    FROM past_visibility p
                    WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid
                        AND p.opened_topological <= at_place + order_slack()
                    ORDER BY p.opened_topological DESC, p.first_audience DESC
                    LIMIT CASE WHEN below > 0 THEN below / 16 + 4 ELSE 0 END
                )
                UNION ALL
                (
                    SELECT p.*
                    FROM past_visibility p
                    WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid
                        AND p.first_audience >= beginning
                    ORDER BY p.first_audience
                    LIMIT CASE WHEN above > 0 THEN above / 16 + 4 ELSE 0 END
                )
            ) AS p;
            next := (
                SELECT p.first_audience
                FROM past_visibility p
                WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid
                    AND p.first_audience > highest
                ORDER BY p.first_audience
                LIMIT 1
            );
            known := known + past_audiences;
            IF highest IS NULL THEN  -- nothing was read
                unread := unread + int8multirange(int8range(NULL, seen.first_audience));
                sought := int8multirange(int8range(NULL, NULL));
            END IF;
            IF next IS NOT NULL THEN
                unread := unread + int8multirange(int8range(next, seen.first_audience));
                sought := CASE WHEN above > 0 THEN int8multirange(int8range(next, NULL))
                    ELSE '{}' END;
            END IF;
            IF lowest > 0 THEN
                unread := unread + int8multirange(int8range(NULL, lowest));
                sought := sought + CASE WHEN below > 0 THEN int8multirange(int8range(NULL, lowest))
                    ELSE '{}' END;
            END IF;
        END IF;
        CASE
            WHEN seen.principal_nid = 2 THEN
                shared := known;
                IF shared_before = last THEN
                    sought_others := sought_others + sought;
                    topological_ranges := topological_ranges + past_ranges;
                ELSIF shared_before IS NOT NULL THEN
                    sought_shared := sought;
                    topological_ranges := topological_ranges
                        + past_ranges * int8multirange(int8range(NULL, shared_before));
                END IF;
            WHEN seen.principal_nid = 1 THEN
                world := known;
                sought_others := sought_others + sought;
                topological_ranges := topological_ranges + past_ranges;
            ELSE
                own := known;
                joined := known - COALESCE(seen.invited_audiences, '{}') - past_invited;
                shared_before := CASE WHEN seen.joined_count > 0 THEN last
                    ELSE seen.last_join_topological END;
                sought_others := sought_others + sought;
                topological_ranges := topological_ranges + past_ranges;
        END CASE;
    END LOOP;
    topological_ranges := topological_ranges
        + COALESCE(disjoint_topological_ranges($1, sought_others, sought_shared, shared_before,
            '{}'), '{}');
    RETURN ARRAY[topological_ranges, own, shared, world, joined, unread];
END
$$;
COMMENT ON FUNCTION visibility_near IS
    'For topological_ranges_of, for a reader with rows in past_visibility. It returns the '
    'topological ranges, the own audiences, the "shared" and the world-readable ones, the own '
    'ones with a join, and the unread ones. It reads as many rows of past_visibility as hold the '
    'wanted events on each side of the position, if every range has two events: the reader sees '
    'their own join and leave. It reads a few more, because the nearest ones may be on the other '
    'side of the position, within order_slack(). Unread audiences add one range on each side, so '
    'nothing is missed where that estimate is wrong. The position itself is always scanned, so '
    'that there is a range to return the rest with.';

CREATE FUNCTION topological_ranges_of(room_nid int, principal_nid int, out_of_range int8multirange,
    place bigint, below bigint, above bigint)
RETURNS TABLE (
    lowest bigint, highest bigint, own_audiences int8multirange, shared_audiences int8multirange,
        world_audiences int8multirange, shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT COALESCE(lower(part.orders), 0), COALESCE(upper(part.orders) - 1, 9223372036854775807),
        COALESCE(part.near[2], part.own_audiences), COALESCE(part.near[3], part.shared_audiences),
        COALESCE(part.near[4], part.world_audiences), part.shared_before,
            COALESCE(part.near[5], part.joined_audiences), part.joined_since,
        part.reader_nid, COALESCE(part.near[6], part.unread)
    FROM (
        SELECT s.*, unnest(CASE
            WHEN s.near IS NOT NULL THEN s.near[1]
            WHEN $3 = '{}' AND (s.shared_before IS NULL OR s.shared_before = 9223372036854775807)
                -- a user who joined once and is still joined
                AND upper_inf(s.seen) AND range_merge(s.seen)::int8multirange = s.seen
                THEN int8multirange(int8range((
                    SELECT a.opened_topological - order_slack()
                    FROM audiences a
                    WHERE a.room_nid = $1 AND a.audience <= (lower(s.seen) >> 40) << 40
                        AND a.opened_topological IS NOT NULL
                    ORDER BY a.audience DESC
                    LIMIT 1
                ), NULL))
            ELSE disjoint_topological_ranges($1, s.seen, s.shared_audiences, s.shared_before, $3)
        END) AS orders
        FROM (
            SELECT v.*, COALESCE(v.own_audiences, '{}') + COALESCE(v.world_audiences,
                '{}') + CASE
                WHEN v.shared_before = 9223372036854775807 THEN COALESCE(v.shared_audiences,
                    '{}') ELSE '{}'
            END AS seen,
            -- not where everything is shared
            CASE WHEN v.unread IS NOT NULL AND NOT COALESCE(
                v.shared_before = 9223372036854775807
                    AND v.shared_audiences @> int8range(1099511627776, NULL), false
            ) THEN visibility_near($1, v.reader_nid, $3, $4, $5, $6) END AS near
            FROM visibility_of($1, $2) AS v
            OFFSET 0
        ) AS s
    ) AS part
$$;
COMMENT ON FUNCTION topological_ranges_of IS
    'The topological ranges of a room outside of which user_sees is false, without overlaps, with '
    'the columns of visibility_of. The out-of-range events are those of the room. "below" and '
    '"above" are the numbers of events wanted before and after a position: on a side with 0, '
    'ranges may be missing. The few hidden events within the ranges are left to user_sees. It is '
    'inlined into queries with cached plans: for a user who joined once and is still joined it '
    'costs one probe, and no call.';

CREATE FUNCTION reordered_across(room_nid int, token bigint[], forwards boolean, rows_max bigint)
RETURNS TABLE (event_nid bigint, topological_ordering bigint, stream_ordering bigint, levels bigint)
LANGUAGE plpgsql STABLE ROWS 10 AS $$
DECLARE
    base CONSTANT int := CASE WHEN token[1] = 1 THEN 2 ELSE cardinality(token) - 2 END;
    readable CONSTANT bigint := rows_max / (cardinality(token) / 3);
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM reordered_events m
        WHERE m.room_nid = $1 AND m.moves > token[2] LIMIT readable + 1) AS m) > readable THEN
        RAISE EXCEPTION 'more than % moves of events since the token was made',
            readable USING ERRCODE = 'RS004';
    END IF;
    RETURN QUERY
    WITH level AS MATERIALIZED (
        SELECT i AS number, token[3 * i + 2] AS moves, token[3 * i + 3] AS topological,
            token[3 * i + 4] AS stream
        FROM generate_series(0, cardinality(token) / 3 - 1) AS i
    ),
    moved AS MATERIALIZED (
        SELECT m.moves, m.event_nid, m.topological_before
        FROM reordered_events m
        WHERE m.room_nid = $1 AND m.moves > token[2]
    ),
    was AS (  -- their positions as of each level
        SELECT DISTINCT ON (l.number, m.event_nid) l.number, m.event_nid, m.topological_before
        FROM level l
        JOIN moved m ON m.moves > l.moves
        ORDER BY l.number, m.event_nid, m.moves
    ),
    below AS MATERIALIZED (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
            prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events,
            bit_or(CASE WHEN at.below THEN 1::bigint << l.number ELSE 0 END) AS levels
        FROM (SELECT DISTINCT m.event_nid FROM moved m) AS m
        CROSS JOIN LATERAL (SELECT x.* FROM events x WHERE x.event_nid = m.event_nid OFFSET 0) AS e
        CROSS JOIN level l
        LEFT JOIN was w ON w.number = l.number AND w.event_nid = m.event_nid
        CROSS JOIN LATERAL (
            SELECT (COALESCE(w.topological_before, e.topological_ordering),
                e.stream_ordering) <= (l.topological, l.stream) AS below
        ) AS at
        WHERE (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
        GROUP BY e.event_nid, e.topological_ordering, e.stream_ordering, e.prev_events,
            e.prev_distance
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
        WHERE forwards AND e.room_nid = $1 AND NOT e.outlier
            AND (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
    )
    SELECT f.event_nid, f.topological_ordering, f.stream_ordering, bit_or(f.levels)
    FROM found f
    GROUP BY f.event_nid, f.topological_ordering, f.stream_ordering;
END
$$;
COMMENT ON FUNCTION reordered_across IS
    'The events of a room that are now above the position of a pagination token, and were below '
    'it when it was made. The token is 1 (below all of its levels) or 0 (below any), then for '
    'each level: moves, topological, stream (storage/streams/tokens.py). "levels" has a bit for '
    'each level below which the event belongs. "forwards" adds their parents that are above it. '
    'Those arrived later, or they would have been below, too. A forward reader that has met a '
    'child must not meet its parent after it. It reads all moves since then, for each level, and '
    'refuses more than "rows_max" (RS004). plpgsql, so that it costs nothing where it is not '
    'called.';

CREATE FUNCTION server_sees(
    event events, own_audiences int8multirange, shared_audiences int8multirange,
        world_audiences int8multirange, reader_nid int,
    unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT $1.outlier AND $1.rejected IS NULL AND CASE
        WHEN $2 @> $1.audience OR $3 @> $1.audience OR $4 @> $1.audience THEN true
        WHEN $6 @> $1.audience THEN saw_before($1.room_nid, $5, $1.audience, true)
        ELSE false
    END
$$;
COMMENT ON FUNCTION server_sees IS
    'Whether history visibility allows a server the whole event; otherwise it gets the redacted '
    'form. server_gets is tested as well.';

CREATE FUNCTION got_before(room_nid int, principal_nid int, audience bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 4 AS $$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = $2
            AND p.audiences <> COALESCE(p.invited_audiences, '{}')
    ) OR saw_before($1, 1, $3, false);
END
$$;
COMMENT ON FUNCTION got_before IS
    'Whether past_visibility has any audience in which a server was joined, or has this one among '
    'the world-readable ones. For server_gets.';

CREATE FUNCTION server_gets(
    event events, joined_audiences int8multirange, world_audiences int8multirange, reader_nid int,
        unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN $2 <> '{}' OR $3 @> $1.audience THEN true
        WHEN $5 IS NOT NULL THEN got_before($1.room_nid, $4, $1.audience)
        ELSE false
    END
$$;
COMMENT ON FUNCTION server_gets IS
    'Whether a server gets an event in any form. A server that was never joined to the room gets '
    'world-readable events only. It was joined if it is in any audience otherwise than by an '
    'invitation.';

CREATE FUNCTION in_order_position(room_nid int, earliest_ts bigint, low bigint, high bigint)
RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    first bigint;
    middle bigint;
    at bigint;
    reached bigint;
BEGIN
    WHILE low < high LOOP
        middle := low + (high - low) / 2;
        SELECT e.stream_ordering, COALESCE(e.in_order_ts, e.origin_server_ts) INTO at, reached
        FROM events e
        WHERE e.room_nid = $1 AND NOT e.outlier AND NOT e.backfilled
            AND e.stream_ordering >= middle AND e.stream_ordering < high
        ORDER BY e.stream_ordering
        LIMIT 1;
        IF at IS NOT NULL AND reached < $2 THEN
            low := at + 1;
        ELSE
            first := COALESCE(at, first);
            high := middle;
        END IF;
    END LOOP;
    RETURN first;
END
$$;
COMMENT ON FUNCTION in_order_position IS
    'The position, from "low" to before "high", of the first live event up to which the events in '
    'time order have reached this origin_server_ts. So it is in time order itself, unless the one '
    'that was is purged. NULL: there is none. By bisection, because what each live event says '
    'of the time reached never falls.';

CREATE FUNCTION in_order_positions(room_nid int, earliest_ts bigint, latest_ts bigint)
RETURNS TABLE (first bigint, last bigint)
LANGUAGE plpgsql STABLE ROWS 1 AS $$
DECLARE
    beyond bigint;
    reached bigint;
BEGIN
    SELECT min(e.stream_ordering), max(e.stream_ordering) + 1 INTO first, beyond
    FROM events e
    WHERE e.room_nid = $1 AND NOT e.outlier AND NOT e.backfilled;
    first := in_order_position($1, $2, first, beyond);
    IF $3 < 9223372036854775807 THEN
        beyond := COALESCE(in_order_position($1, $3 + 1, first, beyond), beyond);
    END IF;
    SELECT COALESCE(e.in_order_ts, e.origin_server_ts) INTO reached
    FROM events e
    WHERE e.room_nid = $1 AND NOT e.outlier AND NOT e.backfilled
        AND e.stream_ordering >= first AND e.stream_ordering < beyond
    ORDER BY e.stream_ordering DESC
    LIMIT 1;
    last := in_order_position($1, reached, first, beyond);
    RETURN NEXT;
END
$$;
COMMENT ON FUNCTION in_order_positions IS
    'The first and the last position of the events in time order whose origin_server_ts is within '
    'these times, both included; NULL if there is none. Between them are all of these, and events '
    'out of time order, whose number has no bound.';

CREATE FUNCTION ancestors_of(room_nid int, event_nids bigint[], wanted int,
    rows_max int) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 100 AS $$
DECLARE
    -- the front, latest first: events reached and not returned yet, never more than may still be
    -- returned
    nids bigint[];
    orders bigint[];
    streams bigint[];
    accepted boolean[];
    parents bigint[];
    left_over int := $3;
    looked_up int;
BEGIN
    SELECT array_agg(f.event_nid), array_agg(f.topological_ordering), array_agg(f.stream_ordering),
        array_agg(f.rejected IS NULL)
    INTO nids, orders, streams, accepted
    FROM (
        SELECT *
        -- by the primary key: the sort order would choose another index
        FROM (SELECT * FROM events e WHERE e.event_nid = ANY ($2) OFFSET 0) AS e
        WHERE e.room_nid = $1 AND NOT e.outlier
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $4
    ) AS f;
    looked_up := cardinality(nids);
    WHILE left_over > 0 AND cardinality(nids) > 0 LOOP
        IF accepted[1] THEN
            RETURN NEXT nids[1];
            left_over := left_over - 1;
        END IF;
        EXIT WHEN left_over = 0 OR looked_up >= $4;
        SELECT prev_nids(e.event_nid, e.prev_events, e.prev_distance) INTO parents
        FROM events e
        WHERE e.event_nid = nids[1];
        IF parents <@ nids[2:] THEN  -- reached already, as by siblings of this event
            nids := nids[2:];
            orders := orders[2:];
            streams := streams[2:];
            accepted := accepted[2:];
            CONTINUE;
        END IF;
        looked_up := looked_up + cardinality(parents);
        IF cardinality(parents) = 1 AND cardinality(nids) = 1 THEN  -- nearly always
            SELECT ARRAY[e.event_nid], ARRAY[e.topological_ordering], ARRAY[e.stream_ordering],
                ARRAY[e.rejected IS NULL]
            INTO nids, orders, streams, accepted
            FROM (SELECT * FROM events e WHERE e.event_nid = parents[1] OFFSET 0) AS e
            WHERE e.room_nid = $1 AND NOT e.outlier;
        ELSE
            SELECT array_agg(f.event_nid), array_agg(f.topological_ordering),
                array_agg(f.stream_ordering), array_agg(f.is_accepted)
            INTO nids, orders, streams, accepted
            FROM (
                SELECT f.*, count(*) FILTER (WHERE f.is_accepted)
                    OVER (ORDER BY f.topological_ordering DESC, f.stream_ordering DESC) AS place
                FROM (
                    SELECT * FROM unnest(nids[2:], orders[2:], streams[2:], accepted[2:])
                        AS f (event_nid, topological_ordering, stream_ordering, is_accepted)
                    UNION
                    SELECT e.event_nid, e.topological_ordering, e.stream_ordering,
                        e.rejected IS NULL
                    FROM (SELECT * FROM events e WHERE e.event_nid = ANY (parents) OFFSET 0) AS e
                    WHERE e.room_nid = $1 AND NOT e.outlier
                ) AS f
                ORDER BY f.topological_ordering DESC, f.stream_ordering DESC
            ) AS f
            WHERE f.place <= left_over;
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION ancestors_of IS
    'These events and their ancestors in the room, latest first. It repeatedly takes the latest '
    'event of the front, whose children have all been taken. At most "wanted" accepted ones '
    '(rejected ones are passed through), and at most "rows_max" rows looked up, plus at most the '
    'parents of one event. plpgsql, because it keeps the front in memory: a recursive query would '
    'write it again for each step.';

CREATE FUNCTION events_between(
    room_nid int, earliest bigint[], latest bigint[], wanted int, min_depth bigint, rows_max int
) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 20 AS $$
DECLARE
    -- all reached events, in the order of the walk; from `at` on their parents have not been looked
    -- up
    queue bigint[];
    orders bigint[];
    given boolean[];
    -- the reached events that the walk could reach again: lower in the topological order than an
    -- event that is still in the queue
    seen bigint[];
    seen_orders bigint[];
    seen_max int := 128;
    at int := 1;
    upto int;
    left_over int := $4;
    looked_up int := 0;
BEGIN
    SELECT array_agg(e.event_nid ORDER BY i.place),
        array_agg(e.topological_ordering ORDER BY i.place)
    INTO queue, orders
    FROM unnest($3) WITH ORDINALITY AS i (event_nid, place)
    CROSS JOIN LATERAL (SELECT * FROM events e WHERE e.event_nid = i.event_nid OFFSET 0) AS e
    WHERE i.event_nid <> ALL ($2) AND e.room_nid = $1 AND NOT e.outlier;
    SELECT array_agg(e.event_nid), array_agg(e.topological_ordering)
    INTO seen, seen_orders
    FROM (SELECT * FROM events e WHERE e.event_nid = ANY ($2 || $3) OFFSET 0) AS e
    WHERE e.room_nid = $1 AND NOT e.outlier;
    WHILE left_over > 0 AND looked_up < $6 AND at <= cardinality(queue) LOOP
        upto := LEAST(cardinality(queue), at + left_over - 1, at + ($6 - looked_up - 1) / 20);
        SELECT looked_up + COALESCE(sum(cardinality(
            prev_nids(e.event_nid, e.prev_events, e.prev_distance))), 0)
        INTO looked_up
        FROM events e
        WHERE e.event_nid = ANY (queue[at:upto]);
        SELECT queue || array_agg(f.event_nid), orders || array_agg(f.topological_ordering),
            array_agg(f.is_given),
            seen || array_agg(f.event_nid), seen_orders || array_agg(f.topological_ordering)
        INTO queue, orders, given, seen, seen_orders
        FROM (
            SELECT f.*
            FROM (
                SELECT DISTINCT ON (p.event_nid) p.event_nid, p.topological_ordering, p.is_given,
                    c.place, i.place AS parent
                FROM unnest(queue[at:upto]) WITH ORDINALITY AS c (event_nid, place)
                CROSS JOIN LATERAL (
                    SELECT prev_nids(e.event_nid, e.prev_events, e.prev_distance) AS prev_events
                    FROM events e
                    WHERE e.event_nid = c.event_nid
                    OFFSET 0
                ) AS e
                CROSS JOIN unnest(e.prev_events) WITH ORDINALITY AS i (event_nid, place)
                CROSS JOIN LATERAL (
                    SELECT p.event_nid, p.topological_ordering, p.rejected IS NULL
                        AND claimed_depth(p.depth, p.topological_ordering) >= $5 AS is_given,
                        p.room_nid, p.outlier
                    FROM events p
                    WHERE p.event_nid = i.event_nid
                    OFFSET 0
                ) AS p
                WHERE i.event_nid <> ALL (seen) AND p.room_nid = $1 AND NOT p.outlier
                ORDER BY p.event_nid, c.place, i.place
            ) AS f
            ORDER BY f.place, f.parent
        ) AS f;
        at := upto + 1;
        RETURN QUERY SELECT f.event_nid
            FROM unnest(queue[cardinality(queue) - cardinality(given) + 1:],
                given) WITH ORDINALITY AS f (event_nid, is_given, place)
            WHERE f.is_given
            ORDER BY f.place
            LIMIT left_over;
        left_over := left_over - COALESCE(cardinality(array_positions(given, true)), 0);
        IF cardinality(seen) > seen_max THEN
            SELECT array_agg(s.event_nid), array_agg(s.topological_ordering)
            INTO seen, seen_orders
            FROM unnest(seen, seen_orders) AS s (event_nid, topological_ordering)
            WHERE s.topological_ordering < (SELECT max(q) FROM unnest(orders[at:]) AS q);
            seen := COALESCE(seen, '{}');
            seen_orders := COALESCE(seen_orders, '{}');
            seen_max := GREATEST(128, 2 * cardinality(seen));
        END IF;
    END LOOP;
END
$$;
COMMENT ON FUNCTION events_between IS
    'The ancestors of the latest events in the room, without the earliest ones and, as far as '
    'these stop the walk, their ancestors. Breadth first, the parents of an event in its own '
    'order. At most "wanted" accepted ones of at least this depth (others are passed through), '
    'and at most "rows_max" rows looked up, plus at most the parents of one event.';

CREATE FUNCTION chain_rows(chain_nid bigint, upto int)
RETURNS TABLE (event_nid bigint, sequence_number int, event_id text, link_1 bigint, link_2 bigint)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT a.event_nid, a.sequence_number, a.event_id, a.link_1, a.link_2
    FROM auth_chains a
    WHERE a.chain_nid = $1 AND a.sequence_number <= $2
    UNION ALL
    SELECT a.event_nid, a.sequence_number, a.event_id, a.link_1, a.link_2
    FROM auth_chains a
    WHERE a.event_nid = -$1 AND a.chain_nid IS NULL
$$;
COMMENT ON FUNCTION chain_rows IS
    'The rows of a chain up to a position, which is 1 or more. The first event of a chain that has '
    'its number is found by that.';

CREATE FUNCTION chain_rows_from(chain_nid bigint, place int)
RETURNS TABLE (event_nid bigint, sequence_number int, event_id text)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT a.event_nid, a.sequence_number, a.event_id
    FROM auth_chains a
    WHERE a.chain_nid = $1 AND a.sequence_number >= $2
    UNION ALL
    SELECT a.event_nid, a.sequence_number, a.event_id
    FROM auth_chains a
    WHERE a.event_nid = -$1 AND a.chain_nid IS NULL AND $2 <= 1
$$;
COMMENT ON FUNCTION chain_rows_from IS 'The rows of a chain from a position on.';

CREATE FUNCTION reached_from(chain_nid bigint,
    sequence_number int) RETURNS TABLE (chain_nid_reached bigint, upto int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.chain_nid, max(l.upto)
    FROM (
        SELECT o.target_chain_nid, o.target_sequence_number
        FROM auth_chain_links o
        WHERE o.chain_nid = $1 AND o.sequence_number <= $2
        UNION ALL
        SELECT (i.link >> 32) - a.event_nid, (i.link & 4294967295)::int
        FROM chain_rows($1, $2) AS a
        CROSS JOIN LATERAL (VALUES (a.link_1), (a.link_2)) AS i (link)
        WHERE i.link IS NOT NULL
    ) AS l (chain_nid, upto)
    GROUP BY l.chain_nid
    OFFSET 0
$$;
COMMENT ON FUNCTION reached_from IS
    'The chains that the links of a chain up to this position reach, each with its last position.';

CREATE FUNCTION linking_to(chain_nid bigint,
    sequence_number int) RETURNS TABLE (chain_nid_linking bigint, place int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.chain_nid, l.sequence_number
    FROM auth_chain_links l
    WHERE l.target_chain_nid = $1 AND l.target_sequence_number >= $2
    UNION ALL
    SELECT COALESCE(a.chain_nid, -a.event_nid), a.sequence_number
    FROM auth_chains a
    WHERE a.link_1 IS NOT NULL AND (a.link_1 >> 32) - a.event_nid = $1
        AND (a.link_1 & 4294967295) >= $2
    UNION ALL
    SELECT COALESCE(a.chain_nid, -a.event_nid), a.sequence_number
    FROM auth_chains a
    WHERE a.link_2 IS NOT NULL AND (a.link_2 >> 32) - a.event_nid = $1
        AND (a.link_2 & 4294967295) >= $2
$$;
COMMENT ON FUNCTION linking_to IS
    'The positions with a link to this position of a chain or to a later one.';

CREATE FUNCTION linked_upto(chain_nid bigint) RETURNS TABLE (upto int)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT GREATEST((
        SELECT max(l.target_sequence_number)
        FROM auth_chain_links l
        WHERE l.target_chain_nid = $1
    ), (
        SELECT max(a.link_1 & 4294967295)
        FROM auth_chains a
        WHERE a.link_1 IS NOT NULL AND (a.link_1 >> 32) - a.event_nid = $1
    ), (
        SELECT max(a.link_2 & 4294967295)
        FROM auth_chains a
        WHERE a.link_2 IS NOT NULL AND (a.link_2 >> 32) - a.event_nid = $1
    ))::int
$$;
COMMENT ON FUNCTION linked_upto IS
    'The last position of a chain that a link leads to. NULL: no link leads there.';

CREATE FUNCTION state_entries(state_group bigint) RETURNS TABLE (state_key_nid int,
    event_nid bigint)
LANGUAGE sql STABLE ROWS 100 AS $$
    SELECT folded.state_key_nid, folded.event_nid
    FROM (
        SELECT DISTINCT ON (entry.state_key_nid) entry.state_key_nid, entry.event_nid
        FROM state_path($1) AS step
        JOIN state_groups p ON p.state_group = step.part
        CROSS JOIN LATERAL own_entries(p.key_nids, p.event_nids, p.member_key_nids,
            p.member_event_nids, p.key_nid, p.member_key_nid, p.event_nid) AS entry
        ORDER BY entry.state_key_nid, step.place DESC
    ) AS folded
    WHERE folded.event_nid <> 0
$$;
COMMENT ON FUNCTION state_entries IS
    'A whole state: the rows of the group''s path, folded by position, later ones winning; 0 '
    'removes a key.';

CREATE FUNCTION state_but_members(state_group bigint) RETURNS TABLE (state_key_nid int,
    event_nid bigint)
LANGUAGE sql STABLE ROWS 20 AS $$
    SELECT folded.state_key_nid, folded.event_nid
    FROM (
        SELECT DISTINCT ON (entry.state_key_nid) entry.state_key_nid, entry.event_nid
        FROM state_path($1) AS step
        LEFT JOIN state_groups p ON p.state_group = step.part
        CROSS JOIN LATERAL (
            SELECT * FROM own_others(p.key_nids, p.event_nids, p.key_nid, p.event_nid)
            UNION ALL
            SELECT NULL, NULL WHERE p.state_group IS NULL
        ) AS entry (state_key_nid, event_nid)
        ORDER BY entry.state_key_nid, step.place DESC
    ) AS folded
    WHERE folded.event_nid IS DISTINCT FROM 0
$$;
COMMENT ON FUNCTION state_but_members IS
    'As state_entries, without the members, which are not read. A row of NULLs means that the '
    'group or a row of its path is missing.';

CREATE FUNCTION heroes_of(room_nid int, upto bigint, memberships smallint[],
    besides text) RETURNS text[]
LANGUAGE sql STABLE AS $$
    WITH
    later AS (
        SELECT DISTINCT ON (d.state_key_nid) d.state_key_nid, d.prev_event_nid AS event_nid
        FROM state_deltas d
        WHERE d.room_nid = $1 AND d.stream_ordering > $2
        ORDER BY d.state_key_nid, d.stream_ordering
    ),
    member AS (
        SELECT *
        FROM (
            SELECT c.state_key_nid, c.event_nid
            FROM current_state c
            WHERE c.room_nid = $1 AND c.membership = ANY ($3)
                AND c.state_key_nid NOT IN (SELECT state_key_nid FROM later)
            ORDER BY c.state_key_nid
            LIMIT 100
        ) AS c
        UNION ALL
        SELECT l.state_key_nid, l.event_nid
        FROM later l
        JOIN events e USING (event_nid)
        WHERE e.membership = ANY ($3)
    )
    SELECT ARRAY(
        SELECT k.state_key
        FROM member m
        JOIN state_keys k USING (state_key_nid)
        JOIN events e USING (event_nid)
        WHERE k.state_key <> $4
        ORDER BY e.stream_ordering NULLS FIRST, k.state_key
        LIMIT 5
    )
$$;
COMMENT ON FUNCTION heroes_of IS
    'Five members that name a room without a name, as of a position: the first in stream order of '
    'their membership events. In rooms with more than a hundred such members they are of the '
    'hundred that this server has known longest.';
