-- The schema of today, whole and commented. The migrations arrive at exactly this; a test compares
-- the two catalogues.
--
-- Conventions
--   * Text stands at the border only: rooms, event types, state keys, users and servers are
--     interned, and everything inside refers to their numbers (nids). A nid never changes and is
--     never reused. 0 is never a nid.
--   * nids and state groups are handed out in blocks: a sequence gives the first number of a block
--     as long as its increment. So they have holes and say nothing about order.
--   * Order is told by stream_ordering (when this server learned of it) and topological_ordering
--     (causality).
--   * Times are milliseconds since 1970, UTC, as int8.
--   * Every index names the query it serves. No index without a query.
--   * A write is planned in memory against rooms.write_version and applied by one statement that
--     compares and sets it (storage/persist): what is read while planning is immutable, or guarded
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
    'Which cluster, database and timeline this was when a store was opened last. In another one '
    'it was restored (storage/streams/restore_detection.py).';
COMMENT ON COLUMN deployment.server_name IS
    'The homeserver whose users are local: visibility and memberships are kept for them. Set by '
    'the first store that opens, and no'
    'other is let in. NULL: everything so far was imported without a name.';

CREATE TABLE schema_compatibility (
    singleton boolean NOT NULL DEFAULT true,
    code_revision text COLLATE "C" NOT NULL,
    CONSTRAINT schema_compatibility_pkey PRIMARY KEY (singleton),
    CONSTRAINT schema_compatibility_singleton_check CHECK (singleton)
);
COMMENT ON TABLE schema_compatibility IS
    'One row. Code that was made for an older schema than code_revision cannot serve this one any '
    'more. Set by each step of a migration that is'
    'for after the last old process ("post"); alembic_version says which schema this is.';
INSERT INTO schema_compatibility (code_revision) VALUES ('0010');

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
    'Long data steps of migrations (storage/database/background.py), done in small batches beside '
    'running servers: how far each is. Each batch'
    'commits with its row.';
COMMENT ON COLUMN background_jobs.revision IS
    'The step of the migrations that asks for it, and says what a batch is.';
COMMENT ON COLUMN background_jobs.place IS
    'The next batch begins after this key. 0: at the beginning.';
COMMENT ON COLUMN background_jobs.rows_expected IS
    'As estimated when it began. NULL: it has not, or there is no telling.';
COMMENT ON COLUMN background_jobs.batch_rows IS
    'Rows of the next batch: as many as take a fraction of a second.';
COMMENT ON COLUMN background_jobs.error IS 'Why the last run ended early. NULL: it did not.';

-- ------------------------------------------------------------------------------------------------
-- interned names

CREATE SEQUENCE principal_nids AS int START 1000 INCREMENT 100;
CREATE TABLE principals (
    principal_nid int NOT NULL,
    name text COLLATE "C" NOT NULL,
    CONSTRAINT principals_pkey PRIMARY KEY (principal_nid),
    CONSTRAINT principals_name_key UNIQUE (name)
);
COMMENT ON TABLE principals IS
    'Users (name starts with @) and servers (a bare server name). 1 and 2 are no real principals: '
    '1 stands for'
    'everybody (audiences that are world readable), 2 for whoever has joined at some time '
    '(audiences under "shared").';
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
    'Event types, and types of relations. Those below 1000 are known to the code '
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
    CONSTRAINT state_keys_pkey PRIMARY KEY (state_key_nid),
    CONSTRAINT state_keys_type_nid_state_key_key UNIQUE (type_nid, state_key),
    CONSTRAINT state_keys_type_nid_fkey FOREIGN KEY (type_nid) REFERENCES event_types (type_nid)
);
COMMENT ON TABLE state_keys IS
    'Pairs (type, state key). Those below 1000 are known to the code (storage/ids.py): type n '
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
    CONSTRAINT rooms_pkey PRIMARY KEY (room_nid),
    CONSTRAINT rooms_room_id_key UNIQUE (room_id),
    CONSTRAINT rooms_extremities_check CHECK (forward_extremities = '{}'
        OR current_state_group IS NOT NULL)
) WITH (fillfactor = 70);
COMMENT ON TABLE rooms IS
    'One row a room, rewritten by every append (its free space keeps those updates in the page). '
    'A room known only by'
    'outliers has no forward extremity and no current state.';
COMMENT ON COLUMN rooms.write_version IS
    'Grows by one with each write to the room. A writer that planned on an older number is '
    'refused.';
COMMENT ON COLUMN rooms.next_audience IS 'The next audience of the main line (see visibility).';
COMMENT ON COLUMN rooms.current_state_group IS
    'The resolution of the states after the forward extremities; an empty state where there are '
    'none yet.';
COMMENT ON COLUMN rooms.last_stream_ordering IS
    'Position of the latest live event. Serves: which rooms changed since a token.';
COMMENT ON COLUMN rooms.max_topological_ordering IS
    'Largest topological ordering ever given in the room; 0 for none.';
COMMENT ON COLUMN rooms.current_audience IS
    'The audience of the current state: the number of the main line opened last. 0 for none.';
COMMENT ON COLUMN rooms.moves IS
    'How many writes have moved events of the room in its topological order (reordered_events). 0 '
    'nearly everywhere: where depths are honest none does.';
COMMENT ON COLUMN rooms.removals IS
    'Grows by one with each transaction that throws away events or state groups of the room, or '
    'takes events out of its timeline. A writer that'
    'planned on an older number is refused only if what it builds on has gone '
    '(dependencies_purged).';
COMMENT ON COLUMN rooms.joined_count IS
    'Members of the current state that are joined. Serves: the summary of a room, without '
    'counting.';
COMMENT ON COLUMN rooms.invited_count IS 'The same for invited.';
COMMENT ON COLUMN rooms.out_of_range IS
    'Stretches of the topological order with events that stand where audiences.opened_topological '
    'does not let one look for them:'
    'of long forks, of history. They are looked through by every reader, so that pages miss '
    'nothing. What no local user may ever see, as'
    'history from before the first of them came that was not shared, is not among them.';
COMMENT ON COLUMN rooms.forward_extremities IS
    'Accepted live events that no held, accepted live event names as parent, without '
    'dropped_extremities.';
COMMENT ON CONSTRAINT rooms_room_id_key ON rooms IS 'Serves: intern a room.';

-- ------------------------------------------------------------------------------------------------
-- events

CREATE SEQUENCE event_nids AS bigint START 1 INCREMENT 1000;
CREATE SEQUENCE events_stream AS bigint START 2;
COMMENT ON SEQUENCE events_stream IS
    'Positions of the streams "events" and "backfill": they share one sequence, so that '
    'stream_ordering is unique over all events.';

CREATE TABLE events (
    event_nid bigint NOT NULL,
    stream_ordering bigint,
    topological_ordering bigint,
    depth bigint NOT NULL,
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
    prev_events bigint[] NOT NULL,
    auth_events bigint[] NOT NULL,
    json bytea NOT NULL,
    CONSTRAINT events_pkey PRIMARY KEY (event_nid),
    CONSTRAINT events_event_id_key UNIQUE (event_id) INCLUDE (event_nid),
    CONSTRAINT events_stream_ordering_key UNIQUE (stream_ordering),
    CONSTRAINT events_outlier_check CHECK (
        outlier = (stream_ordering IS NULL)
        AND outlier = (topological_ordering IS NULL)
        AND outlier = (state_group_before IS NULL)
        AND outlier = (audience IS NULL)
    ),
    CONSTRAINT events_state_after_check CHECK (state_group_after IS NULL
        OR (state_key_nid IS NOT NULL AND rejected IS NULL AND NOT outlier)),
    CONSTRAINT events_membership_check CHECK ((membership IS NOT NULL) = (type_nid = 2
        AND state_key_nid IS NOT NULL)),
    CONSTRAINT events_relation_check CHECK (
        (relates_to IS NULL) = (rel_type_nid IS NULL)
        AND (replaces IS NULL) = (rel_type_nid IS DISTINCT FROM 19)
    )
);
ALTER TABLE events ALTER COLUMN json SET STORAGE EXTERNAL;
-- so that it is looked up by index even where one event has most of the relations
ALTER TABLE events ALTER COLUMN relates_to SET (n_distinct = -0.5);
COMMENT ON TABLE events IS
    'One row holds everything about an event. Only the flags, and what an outlier lacks, ever '
    'change.';
COMMENT ON COLUMN events.event_nid IS
    'Never changes, also when an outlier arrives in the timeline.';
COMMENT ON COLUMN events.stream_ordering IS
    'When this server learned of the event: its position in the stream "events", or "backfill" if '
    'backfilled. NULL for outliers.';
COMMENT ON COLUMN events.topological_ordering IS
    'Causal order: larger than that of every held parent in the room. Computed here, never the '
    'claimed depth. NULL for outliers.';
COMMENT ON COLUMN events.relates_to IS
    'What it relates to (m.relates_to), by relation_key(event id): so the target need not be '
    'held. NULL, as are the next two: nothing.'
    'Told by the bytes alone, whatever becomes of the event or its target; nothing once it is '
    'censored.';
COMMENT ON COLUMN events.rel_type_nid IS 'The type of the relation, of event_types.';
COMMENT ON COLUMN events.replaces IS
    'Of m.replace: whether it may replace another event, as far as it tells itself '
    '(storage/event/relation.py).';
COMMENT ON COLUMN events.has_url IS
    'Its content has a key "url", whether redacted since or not, but not censored. NULL: it has '
    'none. Serves: filters with contains_url.';
COMMENT ON COLUMN events.after_gap IS
    'A live event some parent of which was not held when it arrived: a timeline does not go on '
    'across it, as history that is filled in later'
    'never comes down /sync. Stays so when the gap is filled. NULL: all parents were there.';
COMMENT ON COLUMN events.depth IS
    'As claimed by the sender (clamped to int8). Never used for order.';
COMMENT ON COLUMN events.origin_server_ts IS 'As claimed by the sender (clamped to int8).';
COMMENT ON COLUMN events.state_group_before IS 'The state before the event. NULL for outliers.';
COMMENT ON COLUMN events.state_group_after IS
    'The state after an accepted state event. NULL: the same as before it.';
COMMENT ON COLUMN events.audience IS
    'Who may see it: the audience that visibility.audiences speaks of. NULL for outliers.';
COMMENT ON COLUMN events.redacted_by IS
    'The redaction that took effect on it: smallest (origin_server_ts, event_id) if there are '
    'several.';
COMMENT ON COLUMN events.encoding IS
    'What json holds: 0 = the bytes as received; 1 = censored, the canonical JSON of the redacted '
    'form (storage/maintenance/censor.py).';
COMMENT ON COLUMN events.writer_nid IS
    'Who gave it its stream ordering. Within a room stream orderings are in the order of commits, '
    'whoever writes.';
COMMENT ON COLUMN events.membership IS
    'Of m.room.member: 0 other or missing, 1 ban, 2 leave, 3 knock, 4 invite, 5 join.';
COMMENT ON COLUMN events.backfilled IS 'History: never goes down /sync.';
COMMENT ON COLUMN events.soft_failed IS
    'Refused by the room''s current state when it arrived: never shown to clients, never an '
    'extremity.';
COMMENT ON COLUMN events.redacted_form IS
    'Its content hash was wrong: only the redacted form is valid and ever shown. json has the '
    'received bytes.';
COMMENT ON COLUMN events.ineffective IS
    'An accepted redaction that took no effect: its target is not held in the timeline yet, is in '
    'another room, or was not the sender''s to'
    'redact. Not shown to users; settled anew when the target arrives.';
COMMENT ON COLUMN events.rejected IS
    'The auth rule that refused it, with the reason. NULL: accepted.';
COMMENT ON COLUMN events.prev_events IS
    'Parents, in the order of the PDU: nids of events or of missing_events. Empty for outliers.';
COMMENT ON COLUMN events.auth_events IS 'Auth events, in the order of the PDU. All held.';
COMMENT ON COLUMN events.json IS 'The received bytes, or what encoding says.';
COMMENT ON CONSTRAINT events_pkey ON events IS 'Serves: events by nid; traversal of edges.';
COMMENT ON CONSTRAINT events_event_id_key ON events IS 'Serves: events by id; duplicates.';
COMMENT ON CONSTRAINT events_stream_ordering_key ON events IS
    'Serves: rows of the streams "events" and "backfill" in order.';

CREATE INDEX events_room_topological_idx ON events (room_nid, topological_ordering, stream_ordering)
    WHERE NOT outlier;
COMMENT ON INDEX events_room_topological_idx IS
    'Serves: pages of history; children within a range of the order (repair).';
CREATE INDEX events_create_idx ON events (room_nid) WHERE type_nid = 1;
COMMENT ON INDEX events_create_idx IS 'Serves: does a room have its create event already.';
CREATE INDEX events_room_outlier_idx ON events (room_nid, event_nid) WHERE outlier;
COMMENT ON INDEX events_room_outlier_idx IS
    'Serves: the outliers of a room, for verification; some at a time, for a purge.';
CREATE INDEX events_room_stream_idx ON events (room_nid, stream_ordering)
    WHERE NOT outlier AND NOT backfilled;
COMMENT ON INDEX events_room_stream_idx IS 'Serves: the timeline of a room for /sync.';
CREATE INDEX events_gap_idx ON events (room_nid, stream_ordering) WHERE after_gap;
COMMENT ON INDEX events_gap_idx IS 'Serves: the last gap that a timeline would cross.';
CREATE INDEX events_room_time_idx ON events (room_nid, origin_server_ts) WHERE NOT outlier;
COMMENT ON INDEX events_room_time_idx IS
    'Serves: the event nearest to a time (storage/queries/timestamp_to_event.py).';
CREATE INDEX events_received_ts_idx ON events (received_ts);
COMMENT ON INDEX events_received_ts_idx IS
    'Serves: the events received within a time (storage/pipeline/source/filters.py).';
CREATE INDEX events_uncensored_idx ON events (event_nid)
    WHERE encoding = 0 AND (redacted_by IS NOT NULL OR redacted_form);
COMMENT ON INDEX events_uncensored_idx IS
    'Serves: what is to be censored (storage/maintenance/censor.py). Redacted events only, and '
    'each leaves it when that is done.';
CREATE INDEX events_relation_idx
    ON events (relates_to, rel_type_nid, topological_ordering, stream_ordering)
    WHERE relates_to IS NOT NULL AND NOT outlier;
COMMENT ON INDEX events_relation_idx IS
    'Serves: what relates to an event, in order (storage/queries/relations.py); what is '
    'aggregated of it (storage/queries/aggregations.py).'
    'Nothing for events without a relation.';

CREATE TABLE reordered_events (
    moves bigint NOT NULL,
    event_nid bigint NOT NULL,
    topological_before bigint NOT NULL,
    room_nid int NOT NULL,
    CONSTRAINT reordered_events_pkey PRIMARY KEY (room_nid, moves, event_nid),
    CONSTRAINT reordered_events_moves_check CHECK (moves > 0)
);
COMMENT ON TABLE reordered_events IS
    'Where events stood before they moved up (storage/graph/topological_ordering.py), so that a '
    'pagination token means what it meant when it was made. The place'
    'of an event as of a token is that of its first row with more moves than the token has, else '
    'the one where it stands.';
COMMENT ON COLUMN reordered_events.moves IS 'rooms.moves as this write made it.';
COMMENT ON COLUMN reordered_events.topological_before IS
    'Less than in the next row of the event, or than events.topological_ordering. Its '
    'stream_ordering stays as it is.';
COMMENT ON CONSTRAINT reordered_events_pkey ON reordered_events IS
    'Serves: what has moved in a room since a pagination token was made.';

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
    'Parents that are named by a held event and are not held themselves, or only as outliers: the '
    'backward extremities, or gaps.'
    'When the event arrives it takes over the nid and leaves this table, so that edges never need '
    'rewriting.';
COMMENT ON COLUMN missing_events.superseded IS
    'An accepted live event stands on it, directly or over events that were not accepted: it will '
    'be no forward extremity. Also where those were'
    'purged since, and where it was held and purged itself.';
COMMENT ON COLUMN missing_events.child_nids IS 'The held events that name it.';
COMMENT ON CONSTRAINT missing_events_event_id_key ON missing_events IS
    'Serves: an arriving event finds the nid that waits for it.';
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
    CONSTRAINT gap_failures_event_nid_fkey FOREIGN KEY (event_nid) REFERENCES missing_events (event_nid) ON DELETE CASCADE
);
COMMENT ON TABLE gap_failures IS
    'Missing events that were asked for in vain, and when to ask again (storage/queries/gaps.py). '
    'Nothing of it is derived from events. A row'
    'leaves with the gap: as the event arrives, or the room is purged.';
COMMENT ON COLUMN gap_failures.failures IS
    'How often, since a server that had failed was last said to be up again.';
COMMENT ON COLUMN gap_failures.failed_ts IS 'The last time.';
COMMENT ON COLUMN gap_failures.retry_ts IS 'Not to be asked for before.';
COMMENT ON COLUMN gap_failures.reason IS 'Of the last time, as the homeserver tells it.';
COMMENT ON COLUMN gap_failures.servers IS 'Which servers were asked, as far as it was said.';
COMMENT ON CONSTRAINT gap_failures_pkey ON gap_failures IS
    'Serves: what is known of a gap; the gap goes.';

CREATE TABLE dropped_extremities (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    CONSTRAINT dropped_extremities_pkey PRIMARY KEY (room_nid, event_nid)
);
COMMENT ON TABLE dropped_extremities IS
    'Events that would be forward extremities but for the limit of them, and whose state the '
    'others covered (storage/persist/plan/extremity_limit.py), or'
    'because what named them was purged. An event that was dropped is never one again.';
COMMENT ON CONSTRAINT dropped_extremities_pkey ON dropped_extremities IS
    'Serves: the forward extremities of a room from its events, for verification.';

CREATE TABLE waiting_redactions (
    redaction_nid bigint NOT NULL,
    room_nid int NOT NULL,
    target_event_id text COLLATE "C" NOT NULL,
    CONSTRAINT waiting_redactions_pkey PRIMARY KEY (redaction_nid)
);
COMMENT ON TABLE waiting_redactions IS
    'Accepted redactions whose target is not held yet (or only as an outlier).';
CREATE INDEX waiting_redactions_target_idx ON waiting_redactions (target_event_id);
COMMENT ON INDEX waiting_redactions_target_idx IS
    'Serves: an arriving event finds the redactions that wait for it.';

-- ------------------------------------------------------------------------------------------------
-- state

CREATE SEQUENCE state_group_nids AS bigint START 1 INCREMENT 1000;
CREATE TABLE state_groups (
    state_group bigint NOT NULL,
    digest bigint NOT NULL,
    audience bigint NOT NULL,
    room_nid int NOT NULL,
    entry_count int NOT NULL,
    runs int NOT NULL,
    back int[] NOT NULL,
    key_nids int[],
    event_nids bigint[],
    member_key_nids int[],
    member_event_nids bigint[],
    CONSTRAINT state_groups_pkey PRIMARY KEY (state_group),
    CONSTRAINT state_groups_back_check CHECK (back[cardinality(back)] = 0),
    CONSTRAINT state_groups_keys_check CHECK (cardinality(key_nids) IS NOT DISTINCT FROM cardinality(event_nids)),
    CONSTRAINT state_groups_member_keys_check CHECK (cardinality(member_key_nids) IS NOT DISTINCT FROM cardinality(member_event_nids))
);
ALTER TABLE state_groups
    ALTER COLUMN key_nids SET STORAGE EXTERNAL,
    ALTER COLUMN event_nids SET STORAGE EXTERNAL,
    ALTER COLUMN member_key_nids SET STORAGE EXTERNAL,
    ALTER COLUMN member_event_nids SET STORAGE EXTERNAL;
COMMENT ON TABLE state_groups IS
    'One immutable row per distinct state, holding only what changed against its path. Reading: '
    'fold the rows of the path, root'
    'first, by position in the path. Members stand apart, so that reading the rest of a big root '
    'never touches them. There is a row for'
    'every state change, so the columns are as narrow as they can be.';
COMMENT ON COLUMN state_groups.digest IS
    'Order-independent sum over the entries: equal states have equal digests.';
COMMENT ON COLUMN state_groups.audience IS
    'The audience of events that are sent under this state and do not change it.';
COMMENT ON COLUMN state_groups.entry_count IS 'Size of the whole state.';
COMMENT ON COLUMN state_groups.back IS
    'The path, the groups to fold: by how much each group''s number is below this one''s. Root '
    'first, this group (0) last. See path_of.';
COMMENT ON COLUMN state_groups.runs IS
    'How many rows of the path stand at each level (pack in storage/state/levels.py).';
COMMENT ON COLUMN state_groups.key_nids IS 'NULL: no key but members.';
COMMENT ON COLUMN state_groups.event_nids IS '0 removes the key.';
COMMENT ON COLUMN state_groups.member_key_nids IS 'NULL: no member.';
COMMENT ON COLUMN state_groups.member_event_nids IS '0 removes the key.';
CREATE INDEX state_groups_room_idx ON state_groups (room_nid, state_group);
COMMENT ON INDEX state_groups_room_idx IS
    'Serves: the groups of a room: garbage, purge, verification.';
CREATE INDEX state_groups_digest_idx ON state_groups (digest);
COMMENT ON INDEX state_groups_digest_idx IS
    'Serves: a merge finds the group that already holds the resolved state.';

CREATE TABLE current_state (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    state_key_nid int NOT NULL,
    membership smallint,
    CONSTRAINT current_state_pkey PRIMARY KEY (room_nid, state_key_nid)
) WITH (fillfactor = 85);
COMMENT ON TABLE current_state IS
    'The resolved state of each room, the one of rooms.current_state_group, by key.';
COMMENT ON COLUMN current_state.membership IS 'As events.membership; NULL for other types.';
COMMENT ON CONSTRAINT current_state_pkey ON current_state IS
    'Serves: current state of a room, whole or by key.';

CREATE TABLE state_deltas (
    stream_ordering bigint NOT NULL,
    event_nid bigint,
    prev_event_nid bigint,
    room_nid int NOT NULL,
    state_key_nid int NOT NULL,
    writer_nid smallint NOT NULL,
    CONSTRAINT state_deltas_pkey PRIMARY KEY (room_nid, stream_ordering, state_key_nid)
);
COMMENT ON TABLE state_deltas IS
    'What each position of the events stream changed in the current state of its room.';
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
    CONSTRAINT memberships_pkey PRIMARY KEY (principal_nid, room_nid)
) WITH (fillfactor = 85);
COMMENT ON TABLE memberships IS
    'Each local user''s membership in each room: of the current state, or of an outlier (an '
    'invite or knock over federation)'
    'where this server is not in the room.';
COMMENT ON COLUMN memberships.stream_ordering IS 'Position of the last change.';
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
    'Memberships of local users that an outlier gave, where this server is not in the room. The '
    'row goes when the room''s state says what the user is.'
    'It counts only while memberships has the same event: code of before this table leaves rows '
    'behind.';
COMMENT ON COLUMN out_of_band_memberships.stripped_state IS
    'What came with an invite or knock of the room''s state: a JSON list of stripped events.';
COMMENT ON CONSTRAINT out_of_band_memberships_pkey ON out_of_band_memberships IS
    'Serves: what ends when this server joins the room; stripped state.';

CREATE FUNCTION is_out_of_band(event events) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT $1.outlier AND $1.rejected IS NULL AND COALESCE($1.membership <> 5, false)
        AND $1.auth_events = '{}'
$$;
COMMENT ON FUNCTION is_out_of_band IS
    'Whether an event is a membership that came out of band and was not authorised yet. The rules '
    'want auth events for each of these; it has none here.';

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
    'Refuses new auth events for an event that has its own already, except to who may change '
    'anything of it: a rebuild.';
CREATE TRIGGER events_auth_events_once BEFORE UPDATE OF auth_events ON events
    FOR EACH ROW WHEN (OLD.auth_events IS DISTINCT FROM NEW.auth_events AND NOT is_out_of_band(OLD))
    EXECUTE FUNCTION keep_auth_events();

-- ------------------------------------------------------------------------------------------------
-- auth chains

CREATE SEQUENCE auth_chain_nids AS bigint START 1 INCREMENT 1000;
CREATE TABLE auth_chains (
    event_nid bigint NOT NULL,
    chain_nid bigint NOT NULL,
    sequence_number int NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    state_key text COLLATE "C" NOT NULL,
    CONSTRAINT auth_chains_pkey PRIMARY KEY (event_nid),
    CONSTRAINT auth_chains_chain_nid_sequence_number_key UNIQUE (chain_nid,
        sequence_number) INCLUDE (event_nid)
);
COMMENT ON TABLE auth_chains IS
    'Chain cover of the auth graph: each state event has a place in one chain, and reaches every '
    'earlier place of that chain.';
COMMENT ON COLUMN auth_chains.event_id IS
    'As in events. This and the state key stand here once more because those of a state or an '
    'auth chain are asked for by the thousand:'
    'these rows lie densely, those of events hold the bytes.';
COMMENT ON COLUMN auth_chains.state_key IS 'As in state_keys.';
COMMENT ON CONSTRAINT auth_chains_pkey ON auth_chains IS
    'Serves: where an event stands; the ids of a state and of an auth chain.';
COMMENT ON CONSTRAINT auth_chains_chain_nid_sequence_number_key ON auth_chains IS
    'Serves: the events of a stretch of a chain.';

CREATE TABLE auth_chain_links (
    chain_nid bigint NOT NULL,
    target_chain_nid bigint NOT NULL,
    sequence_number int NOT NULL,
    target_sequence_number int NOT NULL,
    CONSTRAINT auth_chain_links_pkey PRIMARY KEY (chain_nid, sequence_number, target_chain_nid)
);
COMMENT ON TABLE auth_chain_links IS
    'From this place on, the chain reaches the target chain up to the target place. Only links '
    'that say more than earlier ones.';
COMMENT ON CONSTRAINT auth_chain_links_pkey ON auth_chain_links IS
    'Serves: which chains a place reaches.';
CREATE INDEX auth_chain_links_target_idx
    ON auth_chain_links (target_chain_nid, target_sequence_number);
COMMENT ON INDEX auth_chain_links_target_idx IS 'Serves: which places reach a given one.';

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
    CONSTRAINT visibility_pkey PRIMARY KEY (room_nid, principal_nid),
    CONSTRAINT visibility_counts_check CHECK (joined_count >= 0 AND invited_count >= 0)
) WITH (fillfactor = 85);
COMMENT ON TABLE visibility IS
    'Who may see what: the audiences of a room that a local user, a server, everybody (principal '
    '1) or whoever joined later'
    '(principal 2) may see. An event is visible to a principal whose audiences contain the '
    'event''s audience.';
COMMENT ON COLUMN visibility.last_join_topological IS
    'Local users: largest topological ordering of their accepted joins; events under "shared" '
    'before it are theirs. NULL: never joined.';
COMMENT ON COLUMN visibility.joined_count IS
    'Users of this principal (itself, or those of the server) that are joined in the current '
    'state.';
COMMENT ON COLUMN visibility.invited_count IS 'The same for invited.';
COMMENT ON COLUMN visibility.audiences IS
    'A range without an upper end: the principal is in the audience of the current state, and so '
    'of what comes next.';
COMMENT ON COLUMN visibility.invited_audiences IS
    'Those of the audiences that the principal is in by an invitation alone, under "invited". '
    'What erased senders sent is for those who were'
    'joined only. NULL for none.';
COMMENT ON COLUMN visibility.first_audience IS
    'The row tells which audiences the principal is in from this one on. Those below are in '
    'past_visibility. NULL: there are none.';
COMMENT ON CONSTRAINT visibility_pkey ON visibility IS
    'Serves: the join of every read that filters.';

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
    'The older ranges of a principal that has come and gone often, a few to a row '
    '(storage/visibility/past.py). A row tells which audiences the'
    'principal is in from first_audience up to the next row''s, the last one up to '
    'visibility.first_audience.';
COMMENT ON COLUMN past_visibility.opened_topological IS
    'Where the topological order had come to when first_audience was opened. It grows with '
    'first_audience.';
COMMENT ON COLUMN past_visibility.audiences IS 'As in visibility, of these audiences only.';
COMMENT ON COLUMN past_visibility.invited_audiences IS 'Likewise.';
COMMENT ON COLUMN past_visibility.topological_ranges IS
    'Where in the topological order the events of these audiences stand, as '
    'disjoint_topological_ranges tells: what audiences.opened_topological says'
    'of old numbers does not change any more.';
COMMENT ON CONSTRAINT past_visibility_pkey ON past_visibility IS
    'Serves: whether a principal is in an old audience (saw_before).';
CREATE INDEX past_visibility_order_idx
    ON past_visibility (room_nid, principal_nid, opened_topological, first_audience);
COMMENT ON INDEX past_visibility_order_idx IS
    'Serves: the rows near to a place in the order (visibility_near).';

CREATE VIEW whole_visibility AS
SELECT v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count,
    v.audiences + COALESCE(past.audiences, '{}') AS audiences,
    COALESCE(v.invited_audiences, '{}') + COALESCE(past.invited_audiences,
        '{}') AS invited_audiences
FROM visibility v
LEFT JOIN LATERAL (
    SELECT range_agg(p.audiences * p.told) AS audiences,
        range_agg(p.invited_audiences * p.told) AS invited_audiences
    FROM (
        SELECT o.audiences, o.invited_audiences,
            int8multirange(int8range(o.first_audience,
                lead(o.first_audience, 1, v.first_audience)
                    OVER (ORDER BY o.first_audience))) AS told
        FROM past_visibility o
        WHERE o.room_nid = v.room_nid AND o.principal_nid = v.principal_nid
            AND o.first_audience < v.first_audience
    ) AS p
) AS past ON v.first_audience IS NOT NULL;
COMMENT ON VIEW whole_visibility IS
    'All audiences of each principal in one value, however many: for maintenance and export. '
    'invited_audiences is empty for none.';

CREATE TABLE audiences (
    audience bigint NOT NULL,
    opened_topological bigint,
    room_nid int NOT NULL,
    branches int NOT NULL,
    continued boolean NOT NULL,
    CONSTRAINT audiences_pkey PRIMARY KEY (room_nid, audience)
);
COMMENT ON TABLE audiences IS
    'The numbers in use. They lie on lines: the main line follows the current state in steps of '
    '2^40, and the numbers between two'
    'steps are for lines that branch off there (storage/visibility/audience_numbering.py).';
COMMENT ON COLUMN audiences.branches IS 'How many lines branch off this number.';
COMMENT ON COLUMN audiences.continued IS 'The line goes on after this number.';
COMMENT ON COLUMN audiences.opened_topological IS
    'On the main line: where the topological order had come to when the number was opened. It '
    'grows with the numbers, so events of'
    'this number, and of what branches off it, lie between this and the next number''s, give or '
    'take order_slack(), or in rooms.out_of_range.'
    'NULL: a number that branches off, or stands for one state alone.';
COMMENT ON CONSTRAINT audiences_pkey ON audiences IS
    'Serves: give a number to a new audience; where in the order the audiences of a reader lie '
    '(topological_ranges_of).';

CREATE TABLE erased_users (
    erased_ts bigint NOT NULL,
    principal_nid int NOT NULL,
    CONSTRAINT erased_users_pkey PRIMARY KEY (principal_nid)
);
COMMENT ON TABLE erased_users IS
    'Senders who asked to be forgotten: who was not there when they sent something gets its '
    'redacted form. Their events stay as they are.';
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
    'How far each writer has got in each stream: all its facts up to here are committed. Written '
    'in the transaction of the facts.';
COMMENT ON COLUMN stream_positions.epoch IS
    'A new number whenever the writer begins anew: when it opens, and when it finds out what '
    'became of a write whose answer was lost. A'
    'write of an earlier epoch that comes late is refused, and one that is under way is waited '
    'for, as each moves this row.';
COMMENT ON COLUMN stream_positions.entered_at IS
    'Where the sequence was when the writer entered first: all its facts are above.';
COMMENT ON CONSTRAINT stream_positions_pkey ON stream_positions IS
    'Serves: positions at start-up and in each sync.';

CREATE TABLE purged_streams (
    stream_name text COLLATE "C" NOT NULL,
    purged_upto bigint NOT NULL,
    CONSTRAINT purged_streams_pkey PRIMARY KEY (stream_name)
);
COMMENT ON TABLE purged_streams IS
    'Streams of which facts were thrown away that a reader may need who goes on from a token. For '
    '"events": what happened (state_deltas'
    'among it) up to there may be gone, so a sync from before begins anew (ResyncNeeded). No row: '
    'nothing was.';
COMMENT ON COLUMN purged_streams.purged_upto IS
    'The largest such position. Whoever throws away sets it, in the same transaction.';
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
    'Gaps that were left in the streams when the database had been restored: positions between '
    'were given, if at all, to facts that are gone, and'
    'are never given again (storage/streams/restore_detection.py).';
COMMENT ON COLUMN lost_positions.instance_names IS
    'The writers that the stream had. Empty: the gap is of code that did not note them.';
COMMENT ON COLUMN lost_positions.kept_upto IS
    'For each of these writers: up to where its facts were kept. Its gap begins there, at or '
    'before lost_after, as writers do not commit in the order of their ids.';
COMMENT ON CONSTRAINT lost_positions_pkey ON lost_positions IS
    'Serves: a store that opens learns which tokens to refuse.';

CREATE SEQUENCE writer_nids AS smallint START 1;
CREATE TABLE writers (
    writer_nid smallint NOT NULL DEFAULT nextval('writer_nids'),
    instance_name text COLLATE "C" NOT NULL,
    schema_revision text COLLATE "C" NOT NULL DEFAULT '',
    CONSTRAINT writers_pkey PRIMARY KEY (writer_nid),
    CONSTRAINT writers_instance_name_key UNIQUE (instance_name)
);
COMMENT ON TABLE writers IS
    'The processes that write facts, by name. A fact names its writer, as positions are kept per '
    'writer.';
COMMENT ON COLUMN writers.schema_revision IS
    'The latest revision that the code of the process knows which entered last. Serves: a step '
    'that is for after the last old process.';
COMMENT ON CONSTRAINT writers_instance_name_key ON writers IS
    'Serves: a store finds its number when it opens.';

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
    'What a local user''s clients keep on the server: the latest content of each type.';
COMMENT ON COLUMN account_data.room_nid IS '0: not of a room.';
COMMENT ON COLUMN account_data.content IS 'The JSON object as it came.';
COMMENT ON CONSTRAINT account_data_pkey ON account_data IS 'Serves: the account data of a user.';
COMMENT ON CONSTRAINT account_data_stream_id_key ON account_data IS
    'Serves: rows of the stream in order.';

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
    'How far each user has read in a room: the latest receipt of each type and thread.';
COMMENT ON COLUMN receipts.thread_id IS 'Empty: not of a thread.';
COMMENT ON COLUMN receipts.data IS 'The JSON object as it came.';
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
    'What other processes have to forget: the facts of the stream "caches".';
COMMENT ON COLUMN cache_invalidations.keys IS 'The key of the entry. NULL: the whole cache.';
COMMENT ON CONSTRAINT cache_invalidations_pkey ON cache_invalidations IS
    'Serves: rows of the stream in order.';

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
    'Purges of rooms and how far they are (storage/maintenance/purge). One that is not done was '
    'interrupted, or is under way: then somebody holds the'
    'advisory lock (1919905646, room_nid). Rows of finished ones stay: by them verification knows '
    'that history is gone on purpose.';
COMMENT ON COLUMN purge_jobs.topological_cut IS
    'What stands below it goes. NULL, as the next: the whole room.';
COMMENT ON COLUMN purge_jobs.stream_cut IS
    'Of live events only those go that are not above it: purged_streams never passes it.';
COMMENT ON COLUMN purge_jobs.arrived_upto IS
    'Where the stream was when the job began. What has arrived since is not touched.';
COMMENT ON COLUMN purge_jobs.deleted_count IS 'Timeline events that are gone for good.';
COMMENT ON COLUMN purge_jobs.set_aside_count IS 'Timeline events that became outliers.';
COMMENT ON COLUMN purge_jobs.swept_count IS
    'Those of the outliers that nothing needed in the end, and that are gone, too.';
COMMENT ON COLUMN purge_jobs.state_group_count IS 'State groups that are gone.';
COMMENT ON COLUMN purge_jobs.local IS 'Also what local users sent, which no other server may hold.';
COMMENT ON COLUMN purge_jobs.room_id IS
    'For people: of a whole room that was purged nothing else tells it.';
COMMENT ON COLUMN purge_jobs.phase IS 'What it is at: history, deltas, groups, sweep, room; done.';
COMMENT ON COLUMN purge_jobs.error IS 'Why it ended before it was done, the last time.';
CREATE INDEX purge_jobs_room_idx ON purge_jobs (room_nid);
COMMENT ON INDEX purge_jobs_room_idx IS
    'Serves: the job to be resumed; whether a room was purged, for verification.';

CREATE TABLE purge_retained_events (
    event_nid bigint NOT NULL,
    room_nid int NOT NULL,
    local boolean NOT NULL,
    CONSTRAINT purge_retained_events_pkey PRIMARY KEY (room_nid, event_nid)
);
COMMENT ON TABLE purge_retained_events IS
    'What a purge has left of the history it took: events that became outliers, or stay in the '
    'timeline, because something may need them. Those that'
    'nothing needs go at its end; the others leave this table when they come back in the timeline.';
COMMENT ON COLUMN purge_retained_events.local IS
    'Sent by a local user: goes only if a purge is to take those, too.';
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
    'The received bytes of an import on Spark (storage/pipeline), from when a line was read until '
    'its room is stored. Empty at other times.'
    'Unlogged: a crash empties it, and the import is run again.';
COMMENT ON COLUMN import_events.place IS 'The file and the line, as the import counts them.';
COMMENT ON COLUMN import_events.import_number IS
    'So that a task left over from an import that ended does not meddle with the next.';
COMMENT ON CONSTRAINT import_events_pkey ON import_events IS
    'Serves: the bytes of planned events; what a repeated task wrote before.';

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
    standing bigint[], held bigint[], state_groups bigint[], event_ids text[], event_nids bigint[],
        settled bigint[]
) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (  -- $1: in the timeline still
        SELECT
        FROM unnest($1) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x
            WHERE x.event_nid = n.event_nid AND NOT x.outlier OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $2: held still
        SELECT
        FROM unnest($2) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x
            WHERE x.event_nid = n.event_nid OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $3: there still
        SELECT
        FROM unnest($3) AS n (state_group)
        LEFT JOIN LATERAL (SELECT true AS there FROM state_groups x
            WHERE x.state_group = n.state_group OFFSET 0) AS g ON true
        WHERE g.there IS NULL
    ) OR EXISTS (  -- $4 and $5: not waited for under another number
        SELECT
        FROM unnest($4, $5) AS n (event_id, event_nid)
        CROSS JOIN LATERAL (SELECT x.event_nid FROM missing_events x
            WHERE x.event_id = n.event_id OFFSET 0) AS m
        WHERE m.event_nid <> n.event_nid
    ) OR EXISTS (  -- nor by other redactions than $6
        SELECT
        FROM unnest($4) AS n (event_id)
        CROSS JOIN LATERAL (SELECT x.redaction_nid FROM waiting_redactions x
            WHERE x.target_event_id = n.event_id OFFSET 0) AS w
        WHERE w.redaction_nid <> ALL ($6)
    );
END
$$;
COMMENT ON FUNCTION dependencies_purged IS
    'Whether something has gone that a write builds on (storage/persist/write/dependencies.py). '
    'VOLATILE, so it sees what was committed while the write waited for'
    'its room, which the statement that calls it does not.';

CREATE FUNCTION refuse_old_writer(instance_name text) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the writer % has begun anew since this write was made',
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
    'Whether a session (pg_stat_activity) is of the writer of this name: that tells who is alive.';

-- What reads have in common stands here once, as views and functions that the planner puts into the
-- query that uses them (tests/queries/test_plans.py checks that it does). None of them is a step of
-- its own at run time.

CREATE VIEW stored_events AS
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.stream_ordering,
    e.topological_ordering, e.depth,
    b.event_id AS redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding,
        e.json
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by;
COMMENT ON VIEW stored_events IS
    'An event as every read answers with it (StoredRow in storage/queries/events.py): these '
    'columns, in this order.';

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
        $2,
        CASE WHEN COALESCE(own.first_audience, shared.first_audience,
            world.first_audience) IS NOT NULL
            THEN int8multirange(int8range(NULL,
                GREATEST(own.first_audience, shared.first_audience, world.first_audience)))
        END
    FROM (VALUES ($1)) AS room (room_nid)
    LEFT JOIN visibility own ON own.room_nid = room.room_nid AND own.principal_nid = $2
    LEFT JOIN visibility shared ON shared.room_nid = room.room_nid AND shared.principal_nid = 2
    LEFT JOIN visibility world ON world.room_nid = room.room_nid AND world.principal_nid = 1
$$;
COMMENT ON FUNCTION visibility_of IS
    'What a principal may see in a room, always one row: the audiences of its own, those under '
    '"shared", those readable by the world,'
    'and below which topological ordering the shared ones are a user''s own. For user_sees and '
    'server_sees. Also those of its own in'
    'which it is joined, for was_there; and the first of them, if it is in all that follow, so '
    'that a comparison of two numbers does for'
    'nearly every event what looking into the ranges does. "unread" are the audiences that '
    'past_visibility tells of, NULL for none: these'
    'columns say nothing of them, and saw_before does.';

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
    'Whether past_visibility has an audience among those of a principal, of everybody, or, if the '
    'shared ones are the principal''s, among'
    'these. One probe of an index each. plpgsql, so that only an event that needs it costs '
    'anything.';

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
    'Whether past_visibility has an audience among those that a principal is joined in. For '
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
    'Whether a local user may see an event. The one place where this is decided: by the audience '
    'that was settled when it was persisted.'
    'All but the event is as visibility_of or topological_ranges_of tell. '
    'CASE, as the planner takes half of the events for visible then; it would expect one in a '
    'hundred otherwise, and sort instead of'
    'following an index.';

CREATE FUNCTION was_there(event events, joined_since bigint,
    joined_audiences int8multirange) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT COALESCE($1.audience >= $2 OR $3 @> $1.audience, false)
$$;
COMMENT ON FUNCTION was_there IS
    'Whether the reader (a user, or any user of a server) was joined at an event, or at its own '
    'membership event before or after it. Of'
    'erased senders others get the redacted form only.';

CREATE FUNCTION was_there_before(event events, reader_nid int,
    unread int8multirange) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN $3 @> $1.audience THEN joined_before($1.room_nid, $2, $1.audience)
        ELSE false END
$$;
COMMENT ON FUNCTION was_there_before IS
    'The same for the audiences that were not read. Apart, so that it is asked last: of events '
    'whose sender was erased.';

CREATE FUNCTION not_ignored(event events, ignored int[]) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF($1.state_key_nid IS NULL AND $1.sender_nid = ANY ($2), true) IS NOT NULL
$$;
COMMENT ON FUNCTION not_ignored IS
    'Whether a reader who ignores these senders is shown an event: state always (client-server '
    'API, "Ignoring Users"). Put so'
    'that the planner takes it for true nearly always.';

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
    'The event types that match one of the patterns, in which * stands for any characters. What '
    'comes before the first * is looked up by index:'
    'no type that begins so lies above it with as many of the last character as a type can have. '
    'NULL for NULL.';

CREATE FUNCTION principals_named(names text[]) RETURNS int[]
LANGUAGE sql STABLE STRICT AS $$
    SELECT ARRAY(SELECT principal_nid FROM principals WHERE name = ANY ($1))
$$;
COMMENT ON FUNCTION principals_named IS
    'The numbers of those principals that are known. NULL for NULL.';

CREATE FUNCTION filter_of(types text[], not_types text[], senders text[], not_senders text[],
    contains_url boolean)
RETURNS TABLE (types int[], not_types int[], senders int[], not_senders int[], contains_url boolean)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT types_like($1), types_like($2), principals_named($3), principals_named($4), $5
$$;
COMMENT ON FUNCTION filter_of IS
    'A filter of events (client-server API, "Filtering") in numbers, always one row, for '
    'is_wanted. NULL for what it does not ask.';

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
    'Whether an event passes a filter, given as filter_of tells it. What it leaves out wins. A '
    'redacted event has no URL any more.';

CREATE FUNCTION relation_key(event_id text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ('x' || encode(substring(sha256(convert_to($1, 'UTF8')) FROM 1 FOR 8),
        'hex'))::bit(64)::bigint
$$;
COMMENT ON FUNCTION relation_key IS
    'The number under which relations to an event are found (events.relates_to): 64 bits of a '
    'hash of its id. Who finds two ids with the same'
    'one can do no more with it than by naming both.';

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
    'Whether an event relates to anything in the eyes of a user: a redaction takes that away. So '
    'does the erasure of its sender for whoever'
    'was not there; the queries look at that themselves, as a function with a subquery is not put '
    'into them.';

CREATE FUNCTION order_slack() RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$ SELECT 100::bigint $$;
COMMENT ON FUNCTION order_slack IS
    'How far an event may stand outside of its audience''s place in the order before it counts as '
    'a stray (storage/visibility/audience_ranges.py):'
    'what servers send at the same time crosses by a little.';

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
    'For topological_ranges_of, of a reader who came and went, or where events stray: two probes '
    'of audiences for each range. plpgsql, so that what'
    'few readers need is planned and set up only when it is.';

CREATE FUNCTION visibility_near(room_nid int, principal_nid int, out_of_range int8multirange,
    place bigint, below bigint, above bigint)
RETURNS int8multirange[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    last CONSTANT bigint := 9223372036854775807;
    at_place CONSTANT bigint := LEAST(place, last - 1000000);
    -- the row of visibility: first of the reader, then of everybody and of what is shared
    seen record;
    past_audiences int8multirange;  -- what the rows of past_visibility near to the place tell
    past_invited int8multirange;
    past_ranges int8multirange;
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
        told := seen.audiences;
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
                    -- what is before the block of such a row was over when the block was opened
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
            told := told + past_audiences;
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
                shared := told;
                IF shared_before = last THEN
                    sought_others := sought_others + sought;
                    topological_ranges := topological_ranges + past_ranges;
                ELSIF shared_before IS NOT NULL THEN
                    sought_shared := sought;
                    topological_ranges := topological_ranges
                        + past_ranges * int8multirange(int8range(NULL, shared_before));
                END IF;
            WHEN seen.principal_nid = 1 THEN
                world := told;
                sought_others := sought_others + sought;
                topological_ranges := topological_ranges + past_ranges;
            ELSE
                own := told;
                joined := told - COALESCE(seen.invited_audiences, '{}') - past_invited;
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
    'For topological_ranges_of, of a reader with rows in past_visibility: the stretches; the '
    'audiences of its own, those under "shared" and those'
    'readable by the world; those that it is joined in; and those that were not read. Of '
    'past_visibility as many rows are read as hold what is'
    'wanted on each side of the place, if every range has two events: who joins sees that, and '
    'the leaving. Some more are read, as those'
    'nearest to the place may lie on its other side, within order_slack(). Where the audiences '
    'that were not'
    'read may lie is one stretch on each side, so nothing is missed where that is not so. The '
    'place itself is always looked at, so that'
    'there is a stretch to tell the rest with.';

CREATE FUNCTION topological_ranges_of(room_nid int, principal_nid int, out_of_range int8multirange,
    place bigint, below bigint, above bigint)
RETURNS TABLE (
    lowest bigint, highest bigint, own_audiences int8multirange, shared_audiences int8multirange,
        world_audiences int8multirange, shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT COALESCE(lower(part.stretch), 0), COALESCE(upper(part.stretch) - 1, 9223372036854775807),
        COALESCE(part.near[2], part.own_audiences), COALESCE(part.near[3], part.shared_audiences),
        COALESCE(part.near[4], part.world_audiences), part.shared_before,
            COALESCE(part.near[5], part.joined_audiences), part.joined_since,
        part.reader_nid, COALESCE(part.near[6], part.unread)
    FROM (
        SELECT s.*, unnest(CASE
            WHEN s.near IS NOT NULL THEN s.near[1]
            WHEN $3 = '{}' AND (s.shared_before IS NULL OR s.shared_before = 9223372036854775807)
                -- who came once and is there
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
        END) AS stretch
        FROM (
            SELECT sight.*, COALESCE(sight.own_audiences, '{}') + COALESCE(sight.world_audiences,
                '{}') + CASE
                WHEN sight.shared_before = 9223372036854775807 THEN COALESCE(sight.shared_audiences,
                    '{}') ELSE '{}'
            END AS seen,
            -- not where what is shared is all there is
            CASE WHEN sight.unread IS NOT NULL AND NOT COALESCE(
                sight.shared_before = 9223372036854775807
                    AND sight.shared_audiences @> int8range(1099511627776, NULL), false
            ) THEN visibility_near($1, $2, $3, $4, $5, $6) END AS near
            FROM visibility_of($1, $2) AS sight
            OFFSET 0
        ) AS s
    ) AS part
$$;
COMMENT ON FUNCTION topological_ranges_of IS
    'The stretches of a room''s topological order outside of which there is nothing that '
    'user_sees, apart from each other, with what'
    'visibility_of tells. The strays are those of the room. "below" and "above" are how many '
    'events are wanted before a place and after it: on a side'
    'where none are, stretches may be missing. What is hidden within the stretches (little) is '
    'for user_sees to leave out. It is put'
    'into the queries, whose plans are kept: for who came once and is there it costs them one '
    'probe, and calls nothing.';

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
    was AS (  -- where they stood as of each level
        SELECT DISTINCT ON (l.number, m.event_nid) l.number, m.event_nid, m.topological_before
        FROM level l
        JOIN moved m ON m.moves > l.moves
        ORDER BY l.number, m.event_nid, m.moves
    ),
    below AS MATERIALIZED (
        SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.prev_events,
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
        GROUP BY e.event_nid, e.topological_ordering, e.stream_ordering, e.prev_events
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
    'The events of a room that stand above the place of a pagination token, and belong below it, '
    'as they stood there when it was made. The token'
    'is 1 (below is what lies below all of its levels) or 0 (below any), then of each level: '
    'moves, topological, stream (storage/streams/tokens.py).'
    '"levels" has a bit for each level below which the event belongs. "forwards": with their '
    'parents that stand above it. Those have arrived since'
    '(else they would have stood below, too), and whoever walks forwards and has met a child is '
    'not to meet its parent after it.'
    'Reads what has moved since then, for each level; refuses (RS004) where that is more than '
    '"rows_max". plpgsql, so that it costs nothing where it'
    'is not called.';

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
    'Whether past_visibility has any audience that a server was joined in, or this one among '
    'those readable by the world. For server_gets.';

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
    'world-readable events only. It was joined'
    'if it is in any audience otherwise than by an invitation.';

CREATE FUNCTION ancestors_of(room_nid int, event_nids bigint[], wanted int,
    rows_max int) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 100 AS $$
DECLARE
    -- the front, latest first: events reached and not given yet. Never longer than what can still
    -- be given
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
        -- by the key: the order is another index's
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
        SELECT e.prev_events INTO parents FROM events e WHERE e.event_nid = nids[1];
        IF parents <@ nids[2:] THEN  -- reached already: so are those of events side by side
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
    'These events and what lies before them in the room, latest first: again and again the latest '
    'of the front, whose children have all had'
    'their turn. At most so many accepted ones (rejected ones are passed through), and at most so '
    'many rows looked up, give or take the'
    'parents of one event. plpgsql, as the front is kept in memory then: a recursive query would '
    'write it down anew for each step.';

CREATE FUNCTION events_between(
    room_nid int, earliest bigint[], latest bigint[], wanted int, min_depth bigint, rows_max int
) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 20 AS $$
DECLARE
    -- everything reached, in the order in which it was; from `at` on its parents have not been
    -- looked up
    queue bigint[];
    orders bigint[];
    given boolean[];
    -- what is not to be reached again, as far as it can be: lower in the order than what is still
    -- in the queue
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
        SELECT looked_up + COALESCE(sum(cardinality(e.prev_events)), 0) INTO looked_up
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
                CROSS JOIN LATERAL (SELECT e.prev_events FROM events e
                    WHERE e.event_nid = c.event_nid OFFSET 0) AS e
                CROSS JOIN unnest(e.prev_events) WITH ORDINALITY AS i (event_nid, place)
                CROSS JOIN LATERAL (
                    SELECT p.event_nid, p.topological_ordering, p.rejected IS NULL
                        AND p.depth >= $5 AS is_given, p.room_nid, p.outlier
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
    'What lies before the latest events in the room, neither at nor before the earliest ones as '
    'far as these stop the walk: breadth first, the'
    'parents of an event in the order in which it names them. At most so many accepted ones of at '
    'least this depth (others are'
    'passed through), and at most so many rows looked up, give or take the parents of one event.';

CREATE FUNCTION path_of(state_group bigint, back int[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ARRAY(SELECT $1 - step.back FROM unnest($2) WITH ORDINALITY AS step (back, place)
        ORDER BY step.place)
$$;
COMMENT ON FUNCTION path_of IS 'The groups to fold for a state: root first, the group itself last.';

CREATE FUNCTION reached_from(chain_nid bigint,
    sequence_number int) RETURNS TABLE (chain_nid_reached bigint, upto int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.target_chain_nid, max(l.target_sequence_number)
    FROM auth_chain_links l
    WHERE l.chain_nid = $1 AND l.sequence_number <= $2
    GROUP BY l.target_chain_nid
    OFFSET 0
$$;
COMMENT ON FUNCTION reached_from IS
    'What the links of a chain up to this place lead to: the chains, and of each the last place.';

CREATE FUNCTION state_entries(state_group bigint) RETURNS TABLE (state_key_nid int,
    event_nid bigint)
LANGUAGE sql STABLE ROWS 100 AS $$
    SELECT folded.state_key_nid, folded.event_nid
    FROM (
        SELECT DISTINCT ON (entry.state_key_nid) entry.state_key_nid, entry.event_nid
        FROM state_groups wanted
        CROSS JOIN unnest(wanted.back) WITH ORDINALITY AS step (back, place)
        JOIN state_groups part ON part.state_group = wanted.state_group - step.back
        CROSS JOIN LATERAL (
            SELECT * FROM unnest(part.key_nids, part.event_nids)
            UNION ALL
            SELECT * FROM unnest(part.member_key_nids, part.member_event_nids)
        ) AS entry (state_key_nid, event_nid)
        WHERE wanted.state_group = $1
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
        FROM (SELECT $1 AS state_group WHERE $1 IS NOT NULL) AS one
        LEFT JOIN state_groups wanted USING (state_group)
        LEFT JOIN LATERAL unnest(wanted.back) WITH ORDINALITY AS step (back, place) ON true
        LEFT JOIN state_groups part ON part.state_group = wanted.state_group - step.back
        CROSS JOIN LATERAL unnest(
            CASE WHEN part.state_group IS NULL THEN '{NULL}' ELSE part.key_nids END,
            CASE WHEN part.state_group IS NULL THEN '{NULL}' ELSE part.event_nids END
        ) AS entry (state_key_nid, event_nid)
        ORDER BY entry.state_key_nid, step.place DESC
    ) AS folded
    WHERE folded.event_nid IS DISTINCT FROM 0
$$;
COMMENT ON FUNCTION state_but_members IS
    'As state_entries, without the members, which are not looked at. A row of NULLs says that the '
    'group or a row of its path is lost.';

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
    'Five members by whom a room without a name is called, as of a position: the first in stream '
    'order of their membership events. Of rooms'
    'with more than a hundred such members they are of the hundred that this server has known '
    'longest.';
