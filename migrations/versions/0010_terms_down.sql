UPDATE purge_jobs SET phase = 'leavings' WHERE phase = 'sweep';
ALTER TABLE rooms RENAME COLUMN out_of_range TO strays;
ALTER TABLE missing_events RENAME COLUMN superseded TO covered;
ALTER TABLE past_visibility RENAME COLUMN topological_ranges TO stretches;
ALTER TABLE purge_retained_events RENAME CONSTRAINT purge_retained_events_pkey TO purge_leavings_pkey;
ALTER TABLE purge_retained_events RENAME TO purge_leavings;
ALTER TABLE reordered_events RENAME CONSTRAINT reordered_events_moves_check TO moved_events_moves_check;
ALTER TABLE reordered_events RENAME CONSTRAINT reordered_events_pkey TO moved_events_pkey;
ALTER TABLE reordered_events RENAME TO moved_events;
DO $$
DECLARE
    one record;
BEGIN
    FOR one IN  -- Postgres 18 has a name for each NOT NULL
        SELECT c.conrelid::regclass AS relation, c.conname AS old, format('%s_%s_not_null', r.relname, a.attname) AS new
        FROM pg_constraint c
        JOIN pg_class r ON r.oid = c.conrelid
        JOIN pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
        WHERE c.contype = 'n' AND c.conrelid = ANY ('{moved_events,purge_leavings,past_visibility,missing_events,rooms}'::regclass[])
    LOOP
        IF one.old <> one.new THEN
            EXECUTE format('ALTER TABLE %s RENAME CONSTRAINT %I TO %I', one.relation, one.old, one.new);
        END IF;
    END LOOP;
END
$$;
DROP FUNCTION reordered_across(int, bigint[], boolean, bigint);
DROP FUNCTION topological_ranges_of(int, int, int8multirange, bigint, bigint, bigint);
DROP FUNCTION visibility_near(int, int, int8multirange, bigint, bigint, bigint);
DROP FUNCTION disjoint_topological_ranges(int, int8multirange, int8multirange, bigint, int8multirange);
DROP FUNCTION visibility_of(int, int);
DROP FUNCTION dependencies_purged(bigint[], bigint[], bigint[], text[], bigint[], bigint[]);
COMMENT ON TABLE deployment IS 'One row. Tokens carry the deployment id, so that a token of another database is refused.';
COMMENT ON COLUMN deployment.incarnation IS
    'Which cluster, database and timeline this was when a store was opened last. In another one it was restored (storage/streams/restored.py).';
COMMENT ON COLUMN deployment.server_name IS
    'The homeserver whose users are local: visibility and memberships are kept for them. Set by the first store that opens, and no '
    'other is let in. NULL: everything so far was imported without a name.';
COMMENT ON TABLE schema_compatibility IS
    'One row. Code that was made for an older schema than code_revision cannot serve this one any more. Set by each step of a migration that is '
    'for after the last old process ("post"); alembic_version says which schema this is.';
COMMENT ON TABLE background_jobs IS
    'Long data steps of migrations (storage/database/background.py), done in small batches beside running servers: how far each is. Each batch '
    'commits with its row.';
COMMENT ON COLUMN background_jobs.revision IS 'The step of the migrations that asks for it, and says what a batch is.';
COMMENT ON COLUMN background_jobs.place IS 'The next batch begins after this key. 0: at the beginning.';
COMMENT ON COLUMN background_jobs.rows_expected IS 'As estimated when it began. NULL: it has not, or there is no telling.';
COMMENT ON COLUMN background_jobs.batch_rows IS 'Rows of the next batch: as many as take a fraction of a second.';
COMMENT ON COLUMN background_jobs.error IS 'Why the last run ended early. NULL: it did not.';
COMMENT ON TABLE principals IS
    'Users (name starts with @) and servers (a bare server name). 1 and 2 are no real principals: 1 stands for '
    'everybody (audiences that are world readable), 2 for whoever has joined at some time (audiences under "shared").';
COMMENT ON CONSTRAINT principals_name_key ON principals IS 'Serves: intern a user or server by name.';
COMMENT ON TABLE event_types IS 'Event types, and types of relations. Those below 1000 are known to the code (storage/database/names.py).';
COMMENT ON CONSTRAINT event_types_type_key ON event_types IS 'Serves: intern an event type, or a type of relations.';
COMMENT ON TABLE state_keys IS
    'Pairs (type, state key). Those below 1000 are known to the code (storage/ids.py): type n with the empty state key is n.';
COMMENT ON CONSTRAINT state_keys_type_nid_state_key_key ON state_keys IS 'Serves: intern a state key; all members of a state.';
COMMENT ON TABLE rooms IS
    'One row a room, rewritten by every append (its free space keeps those updates in the page). A room known only by '
    'outliers has no forward extremity and no current state.';
COMMENT ON COLUMN rooms.write_version IS 'Grows by one with each write to the room. A writer that planned on an older number is refused.';
COMMENT ON COLUMN rooms.current_state_group IS 'The resolution of the states after the forward extremities; an empty state where there are none yet.';
COMMENT ON COLUMN rooms.last_stream_ordering IS 'Position of the latest live event. Serves: which rooms changed since a token.';
COMMENT ON COLUMN rooms.max_topological_ordering IS 'Largest topological ordering ever given in the room; 0 for none.';
COMMENT ON COLUMN rooms.current_audience IS 'The audience of the current state: the number of the main line opened last. 0 for none.';
COMMENT ON COLUMN rooms.moves IS
    'How many writes have moved events of the room in its topological order (moved_events). 0 nearly everywhere: where depths are honest none does.';
COMMENT ON COLUMN rooms.removals IS
    'Grows by one with each transaction that throws away events or state groups of the room, or takes events out of its timeline. A writer that '
    'planned on an older number is refused only if what it builds on has gone (has_lost_footing).';
COMMENT ON COLUMN rooms.joined_count IS 'Members of the current state that are joined. Serves: the summary of a room, without counting.';
COMMENT ON COLUMN rooms.strays IS
    'Stretches of the topological order with events that stand where audiences.opened_topological does not let one look for them: '
    'of long forks, of history. They are looked through by every reader, so that pages miss nothing. What no local user may ever see, as '
    'history from before the first of them came that was not shared, is not among them.';
COMMENT ON COLUMN rooms.forward_extremities IS 'Accepted live events that no held, accepted live event names as parent, without dropped_extremities.';
COMMENT ON SEQUENCE events_stream IS
    'Positions of the streams "events" and "backfill": they share one sequence, so that stream_ordering is unique over all events.';
COMMENT ON TABLE events IS 'One row holds everything about an event. Only the flags, and what an outlier lacks, ever change.';
COMMENT ON COLUMN events.event_nid IS 'Never changes, also when an outlier arrives in the timeline.';
COMMENT ON COLUMN events.stream_ordering IS 'When this server learned of the event: its position in the stream "events", or "backfill" if backfilled. NULL for outliers.';
COMMENT ON COLUMN events.topological_ordering IS 'Causal order: larger than that of every held parent in the room. Computed here, never the claimed depth. NULL for outliers.';
COMMENT ON COLUMN events.relates_to IS
    'What it relates to (m.relates_to), by relation_key(event id): so the target need not be held. NULL, as are the next two: nothing. '
    'Told by the bytes alone, whatever becomes of the event or its target; nothing once it is censored.';
COMMENT ON COLUMN events.replaces IS
    'Of m.replace: whether it may replace another event, as far as it tells itself (storage/event/relation.py).';
COMMENT ON COLUMN events.has_url IS 'Its content has a key "url", whether redacted since or not, but not censored. NULL: it has none. Serves: filters with contains_url.';
COMMENT ON COLUMN events.after_gap IS
    'A live event some parent of which was not held when it arrived: a timeline does not go on across it, as history that is filled in later '
    'never comes down /sync. Stays so when the gap is filled. NULL: all parents were there.';
COMMENT ON COLUMN events.depth IS 'As claimed by the sender (clamped to int8). Never used for order.';
COMMENT ON COLUMN events.state_group_after IS 'The state after an accepted state event. NULL: the same as before it.';
COMMENT ON COLUMN events.audience IS 'Who may see it: the audience that visibility.audiences speaks of. NULL for outliers.';
COMMENT ON COLUMN events.redacted_by IS 'The redaction that took effect on it: smallest (origin_server_ts, event_id) if there are several.';
COMMENT ON COLUMN events.encoding IS
    'What json holds: 0 = the bytes as received; 1 = censored, the canonical JSON of the redacted form (storage/maintenance/censor.py).';
COMMENT ON COLUMN events.writer_nid IS 'Who gave it its stream ordering. Within a room stream orderings are in the order of commits, whoever writes.';
COMMENT ON COLUMN events.membership IS 'Of m.room.member: 0 other or missing, 1 ban, 2 leave, 3 knock, 4 invite, 5 join.';
COMMENT ON COLUMN events.soft_failed IS 'Refused by the room''s current state when it arrived: never shown to clients, never an extremity.';
COMMENT ON COLUMN events.redacted_form IS 'Its content hash was wrong: only the redacted form is valid and ever shown. json has the received bytes.';
COMMENT ON COLUMN events.ineffective IS
    'An accepted redaction that took no effect: its target is not held in the timeline yet, is in another room, or was not the sender''s to '
    'redact. Not shown to users; settled anew when the target arrives.';
COMMENT ON COLUMN events.rejected IS 'The auth rule that refused it, with the reason. NULL: accepted.';
COMMENT ON COLUMN events.prev_events IS 'Parents, in the order of the PDU: nids of events or of missing_events. Empty for outliers.';
COMMENT ON COLUMN events.auth_events IS 'Auth events, in the order of the PDU. All held.';
COMMENT ON COLUMN events.json IS 'The received bytes, or what encoding says.';
COMMENT ON CONSTRAINT events_stream_ordering_key ON events IS 'Serves: rows of the streams "events" and "backfill" in order.';
COMMENT ON INDEX events_room_topological_idx IS 'Serves: pages of history; children within a range of the order (repair).';
COMMENT ON INDEX events_create_idx IS 'Serves: does a room have its create event already.';
COMMENT ON INDEX events_room_outlier_idx IS 'Serves: the outliers of a room, for verification; some at a time, for a purge.';
COMMENT ON INDEX events_room_time_idx IS 'Serves: the event nearest to a time (storage/queries/near.py).';
COMMENT ON INDEX events_received_ts_idx IS 'Serves: the events received within a time (storage/pipeline/selecting.py).';
COMMENT ON INDEX events_uncensored_idx IS
    'Serves: what is to be censored (storage/maintenance/censor.py). Redacted events only, and each leaves it when that is done.';
COMMENT ON INDEX events_relation_idx IS
    'Serves: what relates to an event, in order (storage/queries/relations.py); what is aggregated of it (storage/queries/aggregations.py). '
    'Nothing for events without a relation.';
COMMENT ON TABLE moved_events IS
    'Where events stood before they moved up (storage/graph/order.py), so that a pagination token means what it meant when it was made. The place '
    'of an event as of a token is that of its first row with more moves than the token has, else the one where it stands.';
COMMENT ON COLUMN moved_events.moves IS 'rooms.moves as this write made it.';
COMMENT ON COLUMN moved_events.topological_before IS 'Less than in the next row of the event, or than events.topological_ordering. Its stream_ordering stays as it is.';
COMMENT ON CONSTRAINT moved_events_pkey ON moved_events IS 'Serves: what has moved in a room since a pagination token was made.';
COMMENT ON TABLE missing_events IS
    'Parents that are named by a held event and are not held themselves, or only as outliers: the backward extremities, or gaps. '
    'When the event arrives it takes over the nid and leaves this table, so that edges never need rewriting.';
COMMENT ON COLUMN missing_events.covered IS
    'An accepted live event stands on it, directly or over events that were not accepted: it will be no forward extremity. Also where those were '
    'purged since, and where it was held and purged itself.';
COMMENT ON COLUMN missing_events.child_nids IS 'The held events that name it.';
COMMENT ON CONSTRAINT missing_events_event_id_key ON missing_events IS 'Serves: an arriving event finds the nid that waits for it.';
COMMENT ON TABLE gap_failures IS
    'Missing events that were asked for in vain, and when to ask again (storage/queries/gaps.py). Nothing of it is derived from events. A row '
    'leaves with the gap: as the event arrives, or the room is purged.';
COMMENT ON COLUMN gap_failures.failures IS 'How often, since a server that had failed was last said to be up again.';
COMMENT ON COLUMN gap_failures.failed_ts IS 'The last time.';
COMMENT ON COLUMN gap_failures.retry_ts IS 'Not to be asked for before.';
COMMENT ON COLUMN gap_failures.reason IS 'Of the last time, as the homeserver tells it.';
COMMENT ON COLUMN gap_failures.servers IS 'Which servers were asked, as far as it was said.';
COMMENT ON CONSTRAINT gap_failures_pkey ON gap_failures IS 'Serves: what is known of a gap; the gap goes.';
COMMENT ON TABLE dropped_extremities IS
    'Events that would be forward extremities but for the limit of them, and whose state the others covered (storage/persist/pruning.py), or '
    'because what named them was purged. An event that was dropped is never one again.';
COMMENT ON CONSTRAINT dropped_extremities_pkey ON dropped_extremities IS 'Serves: the forward extremities of a room from its events, for verification.';
COMMENT ON TABLE waiting_redactions IS 'Accepted redactions whose target is not held yet (or only as an outlier).';
COMMENT ON INDEX waiting_redactions_target_idx IS 'Serves: an arriving event finds the redactions that wait for it.';
COMMENT ON TABLE state_groups IS
    'One immutable row per distinct state, holding only what changed against its path. Reading: fold the rows of the path, root '
    'first, by position in the path. Members stand apart, so that reading the rest of a big root never touches them. There is a row for '
    'every state change, so the columns are as narrow as they can be.';
COMMENT ON COLUMN state_groups.digest IS 'Order-independent sum over the entries: equal states have equal digests.';
COMMENT ON COLUMN state_groups.audience IS 'The audience of events that are sent under this state and do not change it.';
COMMENT ON COLUMN state_groups.back IS
    'The path, the groups to fold: by how much each group''s number is below this one''s. Root first, this group (0) last. See path_of.';
COMMENT ON COLUMN state_groups.runs IS 'How many rows of the path stand at each level (pack in storage/state/levels.py).';
COMMENT ON COLUMN state_groups.key_nids IS 'NULL: no key but members.';
COMMENT ON INDEX state_groups_room_idx IS 'Serves: the groups of a room: garbage, purge, verification.';
COMMENT ON INDEX state_groups_digest_idx IS 'Serves: a merge finds the group that already holds the resolved state.';
COMMENT ON TABLE current_state IS 'The resolved state of each room, the one of rooms.current_state_group, by key.';
COMMENT ON CONSTRAINT current_state_pkey ON current_state IS 'Serves: current state of a room, whole or by key.';
COMMENT ON TABLE state_deltas IS 'What each position of the events stream changed in the current state of its room.';
COMMENT ON COLUMN state_deltas.event_nid IS 'The new value. NULL: the key was removed (by state resolution).';
COMMENT ON CONSTRAINT state_deltas_pkey ON state_deltas IS 'Serves: the state that changed between two tokens.';
COMMENT ON TABLE memberships IS
    'Each local user''s membership in each room: of the current state, or of an outlier (an invite or knock over federation) '
    'where this server is not in the room.';
COMMENT ON TABLE outlier_memberships IS
    'Facts of the stream "events" that are no timeline events: a local user''s invite or knock over federation, or its end.';
COMMENT ON CONSTRAINT outlier_memberships_pkey ON outlier_memberships IS 'Serves: rows of the stream "events" in order.';
COMMENT ON TABLE out_of_band_memberships IS
    'Memberships of local users that an outlier gave, where this server is not in the room. The row goes when the room''s state says what the user is. '
    'It counts only while memberships has the same event: code of before this table leaves rows behind.';
COMMENT ON COLUMN out_of_band_memberships.stripped_state IS 'What came with an invite or knock of the room''s state: a JSON list of stripped events.';
COMMENT ON CONSTRAINT out_of_band_memberships_pkey ON out_of_band_memberships IS 'Serves: what ends when this server joins the room; stripped state.';
CREATE OR REPLACE FUNCTION is_out_of_band(event events) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT $1.outlier AND $1.rejected IS NULL AND COALESCE($1.membership <> 5, false) AND $1.auth_events = '{}'
$$;
COMMENT ON FUNCTION is_out_of_band IS
    'Whether an event is a membership that came out of band and was not authorised yet. The rules want auth events for each of these; it has none here.';
CREATE OR REPLACE FUNCTION keep_auth_events() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT has_table_privilege(TG_RELID, 'UPDATE') THEN
        RAISE EXCEPTION 'the auth events of an event do not change' USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END
$$;
COMMENT ON FUNCTION keep_auth_events IS 'Refuses new auth events for an event that has its own already, except to who may change anything of it: a rebuild.';
COMMENT ON TABLE auth_chains IS
    'Chain cover of the auth graph: each state event has a place in one chain, and reaches every earlier place of that chain.';
COMMENT ON COLUMN auth_chains.event_id IS
    'As in events. This and the state key stand here once more because those of a state or an auth chain are asked for by the thousand: '
    'these rows lie densely, those of events hold the bytes.';
COMMENT ON CONSTRAINT auth_chains_pkey ON auth_chains IS 'Serves: where an event stands; the ids of a state and of an auth chain.';
COMMENT ON CONSTRAINT auth_chains_chain_nid_sequence_number_key ON auth_chains IS 'Serves: the events of a stretch of a chain.';
COMMENT ON TABLE auth_chain_links IS
    'From this place on, the chain reaches the target chain up to the target place. Only links that say more than earlier ones.';
COMMENT ON CONSTRAINT auth_chain_links_pkey ON auth_chain_links IS 'Serves: which chains a place reaches.';
COMMENT ON INDEX auth_chain_links_target_idx IS 'Serves: which places reach a given one.';
COMMENT ON TABLE visibility IS
    'Who may see what: the audiences of a room that a local user, a server, everybody (principal 1) or whoever joined later '
    '(principal 2) may see. An event is visible to a principal whose audiences contain the event''s audience.';
COMMENT ON COLUMN visibility.last_join_topological IS
    'Local users: largest topological ordering of their accepted joins; events under "shared" before it are theirs. NULL: never joined.';
COMMENT ON COLUMN visibility.joined_count IS 'Users of this principal (itself, or those of the server) that are joined in the current state.';
COMMENT ON COLUMN visibility.audiences IS
    'A range without an upper end: the principal is in the audience of the current state, and so of what comes next.';
COMMENT ON COLUMN visibility.invited_audiences IS
    'Those of the audiences that the principal is in by an invitation alone, under "invited". What erased senders sent is for those who were '
    'joined only. NULL for none.';
COMMENT ON COLUMN visibility.first_audience IS
    'The row tells which audiences the principal is in from this one on. Those below are in past_visibility. NULL: there are none.';
COMMENT ON CONSTRAINT visibility_pkey ON visibility IS 'Serves: the join of every read that filters.';
COMMENT ON TABLE past_visibility IS
    'The older ranges of a principal that has come and gone often, a few to a row (storage/visibility/past.py). A row tells which audiences the '
    'principal is in from first_audience up to the next row''s, the last one up to visibility.first_audience.';
COMMENT ON COLUMN past_visibility.opened_topological IS
    'Where the topological order had come to when first_audience was opened. It grows with first_audience.';
COMMENT ON COLUMN past_visibility.invited_audiences IS 'Likewise.';
COMMENT ON COLUMN past_visibility.stretches IS
    'Where in the topological order the events of these audiences stand, as stretches_apart tells: what audiences.opened_topological says '
    'of old numbers does not change any more.';
COMMENT ON CONSTRAINT past_visibility_pkey ON past_visibility IS 'Serves: whether a principal is in an old audience (saw_before).';
COMMENT ON INDEX past_visibility_order_idx IS 'Serves: the rows near to a place in the order (sight_near).';
CREATE OR REPLACE VIEW whole_visibility AS
SELECT v.room_nid, v.principal_nid, v.last_join_topological, v.joined_count, v.invited_count,
    v.audiences + COALESCE(past.audiences, '{}') AS audiences,
    COALESCE(v.invited_audiences, '{}') + COALESCE(past.invited_audiences, '{}') AS invited_audiences
FROM visibility v
LEFT JOIN LATERAL (
    SELECT range_agg(p.audiences * p.told) AS audiences, range_agg(p.invited_audiences * p.told) AS invited_audiences
    FROM (
        SELECT o.audiences, o.invited_audiences,
            int8multirange(int8range(o.first_audience, lead(o.first_audience, 1, v.first_audience) OVER (ORDER BY o.first_audience))) AS told
        FROM past_visibility o
        WHERE o.room_nid = v.room_nid AND o.principal_nid = v.principal_nid AND o.first_audience < v.first_audience
    ) AS p
) AS past ON v.first_audience IS NOT NULL;
COMMENT ON VIEW whole_visibility IS
    'All audiences of each principal in one value, however many: for maintenance and export. invited_audiences is empty for none.';
COMMENT ON TABLE audiences IS
    'The numbers in use. They lie on lines: the main line follows the current state in steps of 2^40, and the numbers between two '
    'steps are for lines that branch off there (storage/visibility/numbers.py).';
COMMENT ON COLUMN audiences.branches IS 'How many lines branch off this number.';
COMMENT ON COLUMN audiences.continued IS 'The line goes on after this number.';
COMMENT ON COLUMN audiences.opened_topological IS
    'On the main line: where the topological order had come to when the number was opened. It grows with the numbers, so events of '
    'this number, and of what branches off it, lie between this and the next number''s, give or take order_slack(), or in rooms.strays. '
    'NULL: a number that branches off, or stands for one state alone.';
COMMENT ON CONSTRAINT audiences_pkey ON audiences IS
    'Serves: give a number to a new audience; where in the order the audiences of a reader lie (stretches_of).';
COMMENT ON TABLE erased_users IS
    'Senders who asked to be forgotten: who was not there when they sent something gets its redacted form. Their events stay as they are.';
COMMENT ON CONSTRAINT erased_users_pkey ON erased_users IS 'Serves: every read that shows events to users or servers.';
COMMENT ON TABLE stream_positions IS
    'How far each writer has got in each stream: all its facts up to here are committed. Written in the transaction of the facts.';
COMMENT ON COLUMN stream_positions.epoch IS
    'A new number whenever the writer begins anew: when it opens, and when it finds out what became of a write whose answer was lost. A '
    'write of an earlier epoch that comes late is refused, and one that is under way is waited for, as each moves this row.';
COMMENT ON COLUMN stream_positions.entered_at IS 'Where the sequence was when the writer entered first: all its facts are above.';
COMMENT ON CONSTRAINT stream_positions_pkey ON stream_positions IS 'Serves: positions at start-up and in each sync.';
COMMENT ON TABLE purged_streams IS
    'Streams of which facts were thrown away that a reader may need who goes on from a token. For "events": what happened (state_deltas '
    'among it) up to there may be gone, so a sync from before begins anew (ResyncNeeded). No row: nothing was.';
COMMENT ON COLUMN purged_streams.purged_upto IS 'The largest such position. Whoever throws away sets it, in the same transaction.';
COMMENT ON TABLE lost_positions IS
    'Gaps that were left in the streams when the database had been restored: positions between were given, if at all, to facts that are gone, and '
    'are never given again (storage/streams/restored.py).';
COMMENT ON COLUMN lost_positions.instance_names IS 'The writers that the stream had. Empty: the gap is of code that did not note them.';
COMMENT ON COLUMN lost_positions.kept_upto IS
    'For each of these writers: up to where its facts were kept. Its gap begins there, at or before lost_after, as writers do not commit in the order of their ids.';
COMMENT ON CONSTRAINT lost_positions_pkey ON lost_positions IS 'Serves: a store that opens learns which tokens to refuse.';
COMMENT ON TABLE writers IS 'The processes that write facts, by name. A fact names its writer, as positions are kept per writer.';
COMMENT ON COLUMN writers.schema_revision IS
    'The latest revision that the code of the process knows which entered last. Serves: a step that is for after the last old process.';
COMMENT ON CONSTRAINT writers_instance_name_key ON writers IS 'Serves: a store finds its number when it opens.';
COMMENT ON TABLE account_data IS 'What a local user''s clients keep on the server: the latest content of each type.';
COMMENT ON COLUMN account_data.room_nid IS '0: not of a room.';
COMMENT ON COLUMN account_data.content IS 'The JSON object as it came.';
COMMENT ON CONSTRAINT account_data_stream_id_key ON account_data IS 'Serves: rows of the stream in order.';
COMMENT ON TABLE to_device IS 'Messages that wait for a device of a local user; deleted once the device has them.';
COMMENT ON TABLE receipts IS 'How far each user has read in a room: the latest receipt of each type and thread.';
COMMENT ON COLUMN receipts.data IS 'The JSON object as it came.';
COMMENT ON TABLE cache_invalidations IS 'What other processes have to forget: the facts of the stream "caches".';
COMMENT ON CONSTRAINT cache_invalidations_pkey ON cache_invalidations IS 'Serves: rows of the stream in order.';
COMMENT ON TABLE purge_jobs IS
    'Purges of rooms and how far they are (storage/maintenance/purge). One that is not done was interrupted, or is under way: then somebody holds the '
    'advisory lock (1919905646, room_nid). Rows of finished ones stay: by them verification knows that history is gone on purpose.';
COMMENT ON COLUMN purge_jobs.topological_cut IS 'What stands below it goes. NULL, as the next: the whole room.';
COMMENT ON COLUMN purge_jobs.stream_cut IS 'Of live events only those go that are not above it: purged_streams never passes it.';
COMMENT ON COLUMN purge_jobs.arrived_upto IS 'Where the stream was when the job began. What has arrived since is not touched.';
COMMENT ON COLUMN purge_jobs.deleted_count IS 'Timeline events that are gone for good.';
COMMENT ON COLUMN purge_jobs.swept_count IS 'Those of the outliers that nothing needed in the end, and that are gone, too.';
COMMENT ON COLUMN purge_jobs.state_group_count IS 'State groups that are gone.';
COMMENT ON COLUMN purge_jobs.local IS 'Also what local users sent, which no other server may hold.';
COMMENT ON COLUMN purge_jobs.room_id IS 'For people: of a whole room that was purged nothing else tells it.';
COMMENT ON COLUMN purge_jobs.phase IS 'What it is at: history, deltas, groups, leavings, room; done.';
COMMENT ON COLUMN purge_jobs.error IS 'Why it ended before it was done, the last time.';
COMMENT ON INDEX purge_jobs_room_idx IS 'Serves: the job to be resumed; whether a room was purged, for verification.';
COMMENT ON TABLE purge_leavings IS
    'What a purge has left of the history it took: events that became outliers, or stay in the timeline, because something may need them. Those that '
    'nothing needs go at its end; the others leave this table when they come back in the timeline.';
COMMENT ON COLUMN purge_leavings.local IS 'Sent by a local user: goes only if a purge is to take those, too.';
COMMENT ON CONSTRAINT purge_leavings_pkey ON purge_leavings IS 'Serves: the end of a purge.';
COMMENT ON TABLE import_events IS
    'The received bytes of an import on Spark (storage/pipeline), from when a line was read until its room is stored. Empty at other times. '
    'Unlogged: a crash empties it, and the import is run again.';
COMMENT ON COLUMN import_events.place IS 'The file and the line, as the import counts them.';
COMMENT ON COLUMN import_events.import_number IS 'So that a task left over from an import that ended does not meddle with the next.';
COMMENT ON CONSTRAINT import_events_pkey ON import_events IS 'Serves: the bytes of planned events; what a repeated task wrote before.';
CREATE OR REPLACE FUNCTION refuse_stale_plan(detail text) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the plan of this write is out of date' USING ERRCODE = 'RS001', DETAIL = detail;
END
$$;
COMMENT ON FUNCTION refuse_stale_plan IS 'Ends a write whose plan no longer fits the tables; the writer plans again.';
CREATE FUNCTION has_lost_footing(
    standing bigint[], held bigint[], state_groups bigint[], event_ids text[], event_nids bigint[], settled bigint[]
) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN EXISTS (  -- $1: in the timeline still
        SELECT
        FROM unnest($1) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x WHERE x.event_nid = n.event_nid AND NOT x.outlier OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $2: held still
        SELECT
        FROM unnest($2) AS n (event_nid)
        LEFT JOIN LATERAL (SELECT true AS there FROM events x WHERE x.event_nid = n.event_nid OFFSET 0) AS e ON true
        WHERE e.there IS NULL
    ) OR EXISTS (  -- $3: there still
        SELECT
        FROM unnest($3) AS n (state_group)
        LEFT JOIN LATERAL (SELECT true AS there FROM state_groups x WHERE x.state_group = n.state_group OFFSET 0) AS g ON true
        WHERE g.there IS NULL
    ) OR EXISTS (  -- $4 and $5: not waited for under another number
        SELECT
        FROM unnest($4, $5) AS n (event_id, event_nid)
        CROSS JOIN LATERAL (SELECT x.event_nid FROM missing_events x WHERE x.event_id = n.event_id OFFSET 0) AS m
        WHERE m.event_nid <> n.event_nid
    ) OR EXISTS (  -- nor by other redactions than $6
        SELECT
        FROM unnest($4) AS n (event_id)
        CROSS JOIN LATERAL (SELECT x.redaction_nid FROM waiting_redactions x WHERE x.target_event_id = n.event_id OFFSET 0) AS w
        WHERE w.redaction_nid <> ALL ($6)
    );
END
$$;
COMMENT ON FUNCTION has_lost_footing IS
    'Whether something has gone that a write builds on (storage/persist/footing.py). VOLATILE, so it sees what was committed while the write waited for '
    'its room, which the statement that calls it does not.';
CREATE OR REPLACE FUNCTION refuse_old_writer(instance_name text) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the writer % has begun anew since this write was made', instance_name USING ERRCODE = 'RS002';
END
$$;
COMMENT ON FUNCTION refuse_old_writer IS 'Ends a write of an earlier epoch of its writer (stream_positions.epoch).';
COMMENT ON FUNCTION is_session_of IS 'Whether a session (pg_stat_activity) is of the writer of this name: that tells who is alive.';
CREATE OR REPLACE VIEW stored_events AS
SELECT e.event_nid, e.event_id, r.room_id, r.room_version, e.stream_ordering, e.topological_ordering, e.depth,
    b.event_id AS redacted_by, e.rejected, e.soft_failed, e.outlier, e.redacted_form, e.encoding, e.json
FROM events e
JOIN rooms r USING (room_nid)
LEFT JOIN events b ON b.event_nid = e.redacted_by;
COMMENT ON VIEW stored_events IS 'An event as every read answers with it (StoredRow in storage/queries/events.py): these columns, in this order.';
CREATE FUNCTION sight_of(room_nid int, principal_nid int)
RETURNS TABLE (
    own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange, shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT own.audiences, shared.audiences, world.audiences,
        CASE WHEN own.joined_count > 0 THEN 9223372036854775807 ELSE own.last_join_topological END,
        CASE WHEN own.invited_audiences IS NULL THEN own.audiences ELSE own.audiences - own.invited_audiences END,
        CASE
            WHEN own.invited_audiences IS NULL AND upper_inf(own.audiences) AND range_merge(own.audiences)::int8multirange = own.audiences
                THEN lower(own.audiences)
        END,
        $2,
        CASE WHEN COALESCE(own.first_audience, shared.first_audience, world.first_audience) IS NOT NULL
            THEN int8multirange(int8range(NULL, GREATEST(own.first_audience, shared.first_audience, world.first_audience)))
        END
    FROM (VALUES ($1)) AS room (room_nid)
    LEFT JOIN visibility own ON own.room_nid = room.room_nid AND own.principal_nid = $2
    LEFT JOIN visibility shared ON shared.room_nid = room.room_nid AND shared.principal_nid = 2
    LEFT JOIN visibility world ON world.room_nid = room.room_nid AND world.principal_nid = 1
$$;
COMMENT ON FUNCTION sight_of IS
    'What a principal may see in a room, always one row: the audiences of its own, those under "shared", those readable by the world, '
    'and below which topological ordering the shared ones are a user''s own. For user_sees and server_sees. Also those of its own in '
    'which it is joined, for was_there; and the first of them, if it is in all that follow, so that a comparison of two numbers does for '
    'nearly every event what looking into the ranges does. "unread" are the audiences that past_visibility tells of, NULL for none: these '
    'columns say nothing of them, and saw_before does.';
CREATE OR REPLACE FUNCTION saw_before(room_nid int, principal_nid int, audience bigint, shared boolean) RETURNS boolean
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
    'Whether past_visibility has an audience among those of a principal, of everybody, or, if the shared ones are the principal''s, among '
    'these. One probe of an index each. plpgsql, so that only an event that needs it costs anything.';
COMMENT ON FUNCTION joined_before IS 'Whether past_visibility has an audience among those that a principal is joined in. For was_there_before.';
CREATE OR REPLACE FUNCTION user_sees(
    event events, joined_since bigint, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange,
    shared_before bigint, reader_nid int, unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT NOT $1.outlier AND $1.rejected IS NULL AND NOT $1.soft_failed AND NOT $1.ineffective AND CASE
        WHEN $1.audience >= $2 OR $3 @> $1.audience OR ($4 @> $1.audience AND $1.topological_ordering < $6) OR $5 @> $1.audience THEN true
        WHEN $8 @> $1.audience THEN saw_before($1.room_nid, $7, $1.audience, $1.topological_ordering < $6)
        ELSE false
    END
$$;
COMMENT ON FUNCTION user_sees IS
    'Whether a local user may see an event. The one place where this is decided: by the audience that was settled when it was persisted. '
    'All but the event is as sight_of or stretches_of tell. '
    'CASE, as the planner takes half of the events for visible then; it would expect one in a hundred otherwise, and sort instead of '
    'following an index.';
CREATE OR REPLACE FUNCTION was_there(event events, joined_since bigint, joined_audiences int8multirange) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT COALESCE($1.audience >= $2 OR $3 @> $1.audience, false)
$$;
COMMENT ON FUNCTION was_there IS
    'Whether the reader (a user, or any user of a server) was joined at an event, or at its own membership event before or after it. Of '
    'erased senders others get the redacted form only.';
CREATE OR REPLACE FUNCTION was_there_before(event events, reader_nid int, unread int8multirange) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN $3 @> $1.audience THEN joined_before($1.room_nid, $2, $1.audience) ELSE false END
$$;
COMMENT ON FUNCTION was_there_before IS
    'The same for the audiences that were not read. Apart, so that it is asked last: of events whose sender was erased.';
COMMENT ON FUNCTION not_ignored IS
    'Whether a reader who ignores these senders is shown an event: state always (client-server API, "Ignoring Users"). Put so '
    'that the planner takes it for true nearly always.';
CREATE OR REPLACE FUNCTION types_like(patterns text[]) RETURNS int[]
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
        JOIN event_types t ON t.type >= beginning AND t.type <= beginning || repeat(chr(1114111), 64)
        WHERE strpos(p.pattern, '*') > 0 AND t.type LIKE replace(regexp_replace(p.pattern, '([\\%_])', '\\\1', 'g'), '*', '%')
    )
$$;
COMMENT ON FUNCTION types_like IS
    'The event types that match one of the patterns, in which * stands for any characters. What comes before the first * is looked up by index: '
    'no type that begins so lies above it with as many of the last character as a type can have. NULL for NULL.';
COMMENT ON FUNCTION principals_named IS 'The numbers of those principals that are known. NULL for NULL.';
CREATE OR REPLACE FUNCTION filter_of(types text[], not_types text[], senders text[], not_senders text[], contains_url boolean)
RETURNS TABLE (types int[], not_types int[], senders int[], not_senders int[], contains_url boolean)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT types_like($1), types_like($2), principals_named($3), principals_named($4), $5
$$;
COMMENT ON FUNCTION filter_of IS
    'A filter of events (client-server API, "Filtering") in numbers, always one row, for is_wanted. NULL for what it does not ask.';
CREATE OR REPLACE FUNCTION is_wanted(event events, types int[], not_types int[], senders int[], not_senders int[], contains_url boolean) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF(
        COALESCE($1.type_nid <> ALL ($2), false) OR COALESCE($1.type_nid = ANY ($3), false)
            OR COALESCE($1.sender_nid <> ALL ($4), false) OR COALESCE($1.sender_nid = ANY ($5), false)
            OR COALESCE($6 <> ($1.has_url IS NOT NULL AND $1.redacted_by IS NULL), false),
        true
    ) IS NOT NULL
$$;
COMMENT ON FUNCTION is_wanted IS
    'Whether an event passes a filter, given as filter_of tells it. What it leaves out wins. A redacted event has no URL any more.';
CREATE OR REPLACE FUNCTION relation_key(event_id text) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ('x' || encode(substring(sha256(convert_to($1, 'UTF8')) FROM 1 FOR 8), 'hex'))::bit(64)::bigint
$$;
COMMENT ON FUNCTION relation_key IS
    'The number under which relations to an event are found (events.relates_to): 64 bits of a hash of its id. Who finds two ids with the same '
    'one can do no more with it than by naming both.';
CREATE OR REPLACE FUNCTION user_sees_relation(
    event events, joined_since bigint, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange,
    shared_before bigint, reader_nid int, unread int8multirange, ignored int[]
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT $1.redacted_by IS NULL AND user_sees($1, $2, $3, $4, $5, $6, $7, $8) AND not_ignored($1, $9)
$$;
COMMENT ON FUNCTION user_sees_relation IS
    'Whether an event relates to anything in the eyes of a user: a redaction takes that away. So does the erasure of its sender for whoever '
    'was not there; the queries look at that themselves, as a function with a subquery is not put into them.';
COMMENT ON FUNCTION order_slack IS
    'How far an event may stand outside of its audience''s place in the order before it counts as a stray (storage/visibility/places.py): '
    'what servers send at the same time crosses by a little.';
CREATE FUNCTION stretches_apart(
    room_nid int, seen int8multirange, shared_audiences int8multirange, shared_before bigint, strays int8multirange
) RETURNS int8multirange
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (
        SELECT range_agg(part.orders)
        FROM (
            SELECT int8range((
                SELECT a.opened_topological - order_slack()
                FROM audiences a
                WHERE a.room_nid = $1 AND a.audience <= (lower(runs.run) >> 40) << 40 AND a.opened_topological IS NOT NULL
                ORDER BY a.audience DESC
                LIMIT 1
            ), (
                SELECT a.opened_topological + order_slack() + 1
                FROM audiences a
                WHERE a.room_nid = $1 AND a.audience >= ((upper(runs.run) + 1099511627775) >> 40) << 40 AND a.opened_topological IS NOT NULL
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
COMMENT ON FUNCTION stretches_apart IS
    'For stretches_of, of a reader who came and went, or where events stray: two probes of audiences for each range. plpgsql, so that what '
    'few readers need is planned and set up only when it is.';
CREATE FUNCTION sight_near(room_nid int, principal_nid int, strays int8multirange, place bigint, below bigint, above bigint)
RETURNS int8multirange[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    last CONSTANT bigint := 9223372036854775807;
    at_place CONSTANT bigint := LEAST(place, last - 1000000);
    seen record;  -- the row of visibility: first of the reader, then of everybody and of what is shared
    past_audiences int8multirange;  -- what the rows of past_visibility near to the place tell
    past_invited int8multirange;
    past_stretches int8multirange;
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
    stretches int8multirange := strays + int8multirange(int8range(at_place, at_place + 1));
BEGIN
    FOR seen IN
        SELECT v.principal_nid, v.audiences, v.invited_audiences, v.first_audience, v.joined_count, v.last_join_topological
        FROM visibility v
        WHERE v.room_nid = $1 AND v.principal_nid IN ($2, 1, 2)
        ORDER BY v.principal_nid = $2 DESC
    LOOP
        told := seen.audiences;
        sought := seen.audiences;
        past_audiences := '{}';
        past_invited := '{}';
        past_stretches := '{}';
        IF seen.first_audience IS NOT NULL THEN
            beginning := CASE WHEN above > 0 THEN (
                SELECT max(p.first_audience)
                FROM past_visibility p
                WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.first_audience <= COALESCE((
                    SELECT (o.first_audience >> 40) << 40  -- what is before the block of such a row was over when the block was opened
                    FROM past_visibility o
                    WHERE o.room_nid = $1 AND o.principal_nid = seen.principal_nid AND o.opened_topological < at_place - order_slack()
                    ORDER BY o.opened_topological DESC, o.first_audience DESC
                    LIMIT 1
                ), 0)
            ) END;
            SELECT COALESCE(range_agg(p.audiences), '{}'), COALESCE(range_agg(p.invited_audiences), '{}'), COALESCE(range_agg(p.stretches), '{}'),
                min(p.first_audience), max(p.first_audience)
            INTO past_audiences, past_invited, past_stretches, lowest, highest
            FROM (
                (
                    SELECT p.*
                    FROM past_visibility p
                    WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.opened_topological <= at_place + order_slack()
                    ORDER BY p.opened_topological DESC, p.first_audience DESC
                    LIMIT CASE WHEN below > 0 THEN below / 16 + 4 ELSE 0 END
                )
                UNION ALL
                (
                    SELECT p.*
                    FROM past_visibility p
                    WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.first_audience >= beginning
                    ORDER BY p.first_audience
                    LIMIT CASE WHEN above > 0 THEN above / 16 + 4 ELSE 0 END
                )
            ) AS p;
            next := (
                SELECT p.first_audience
                FROM past_visibility p
                WHERE p.room_nid = $1 AND p.principal_nid = seen.principal_nid AND p.first_audience > highest
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
                sought := CASE WHEN above > 0 THEN int8multirange(int8range(next, NULL)) ELSE '{}' END;
            END IF;
            IF lowest > 0 THEN
                unread := unread + int8multirange(int8range(NULL, lowest));
                sought := sought + CASE WHEN below > 0 THEN int8multirange(int8range(NULL, lowest)) ELSE '{}' END;
            END IF;
        END IF;
        CASE
            WHEN seen.principal_nid = 2 THEN
                shared := told;
                IF shared_before = last THEN
                    sought_others := sought_others + sought;
                    stretches := stretches + past_stretches;
                ELSIF shared_before IS NOT NULL THEN
                    sought_shared := sought;
                    stretches := stretches + past_stretches * int8multirange(int8range(NULL, shared_before));
                END IF;
            WHEN seen.principal_nid = 1 THEN
                world := told;
                sought_others := sought_others + sought;
                stretches := stretches + past_stretches;
            ELSE
                own := told;
                joined := told - COALESCE(seen.invited_audiences, '{}') - past_invited;
                shared_before := CASE WHEN seen.joined_count > 0 THEN last ELSE seen.last_join_topological END;
                sought_others := sought_others + sought;
                stretches := stretches + past_stretches;
        END CASE;
    END LOOP;
    stretches := stretches + COALESCE(stretches_apart($1, sought_others, sought_shared, shared_before, '{}'), '{}');
    RETURN ARRAY[stretches, own, shared, world, joined, unread];
END
$$;
COMMENT ON FUNCTION sight_near IS
    'For stretches_of, of a reader with rows in past_visibility: the stretches; the audiences of its own, those under "shared" and those '
    'readable by the world; those that it is joined in; and those that were not read. Of past_visibility as many rows are read as hold what is '
    'wanted on each side of the place, if every range has two events: who joins sees that, and the leaving. Some more are read, as those '
    'nearest to the place may lie on its other side, within order_slack(). Where the audiences that were not '
    'read may lie is one stretch on each side, so nothing is missed where that is not so. The place itself is always looked at, so that '
    'there is a stretch to tell the rest with.';
CREATE FUNCTION stretches_of(room_nid int, principal_nid int, strays int8multirange, place bigint, below bigint, above bigint)
RETURNS TABLE (
    lowest bigint, highest bigint, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange, shared_before bigint,
    joined_audiences int8multirange, joined_since bigint, reader_nid int, unread int8multirange
)
LANGUAGE sql STABLE ROWS 4 AS $$
    SELECT COALESCE(lower(part.stretch), 0), COALESCE(upper(part.stretch) - 1, 9223372036854775807),
        COALESCE(part.near[2], part.own_audiences), COALESCE(part.near[3], part.shared_audiences),
        COALESCE(part.near[4], part.world_audiences), part.shared_before, COALESCE(part.near[5], part.joined_audiences), part.joined_since,
        part.reader_nid, COALESCE(part.near[6], part.unread)
    FROM (
        SELECT s.*, unnest(CASE
            WHEN s.near IS NOT NULL THEN s.near[1]
            WHEN $3 = '{}' AND (s.shared_before IS NULL OR s.shared_before = 9223372036854775807)
                AND upper_inf(s.seen) AND range_merge(s.seen)::int8multirange = s.seen  -- who came once and is there
                THEN int8multirange(int8range((
                    SELECT a.opened_topological - order_slack()
                    FROM audiences a
                    WHERE a.room_nid = $1 AND a.audience <= (lower(s.seen) >> 40) << 40 AND a.opened_topological IS NOT NULL
                    ORDER BY a.audience DESC
                    LIMIT 1
                ), NULL))
            ELSE stretches_apart($1, s.seen, s.shared_audiences, s.shared_before, $3)
        END) AS stretch
        FROM (
            SELECT sight.*, COALESCE(sight.own_audiences, '{}') + COALESCE(sight.world_audiences, '{}') + CASE
                WHEN sight.shared_before = 9223372036854775807 THEN COALESCE(sight.shared_audiences, '{}') ELSE '{}'
            END AS seen,
            CASE WHEN sight.unread IS NOT NULL AND NOT COALESCE(  -- not where what is shared is all there is
                sight.shared_before = 9223372036854775807 AND sight.shared_audiences @> int8range(1099511627776, NULL), false
            ) THEN sight_near($1, $2, $3, $4, $5, $6) END AS near
            FROM sight_of($1, $2) AS sight
            OFFSET 0
        ) AS s
    ) AS part
$$;
COMMENT ON FUNCTION stretches_of IS
    'The stretches of a room''s topological order outside of which there is nothing that user_sees, apart from each other, with what '
    'sight_of tells. The strays are those of the room. "below" and "above" are how many events are wanted before a place and after it: on a side '
    'where none are, stretches may be missing. What is hidden within the stretches (little) is for user_sees to leave out. It is put '
    'into the queries, whose plans are kept: for who came once and is there it costs them one probe, and calls nothing.';
CREATE FUNCTION moved_across(room_nid int, token bigint[], forwards boolean, rows_max bigint)
RETURNS TABLE (event_nid bigint, topological_ordering bigint, stream_ordering bigint, levels bigint)
LANGUAGE plpgsql STABLE ROWS 10 AS $$
DECLARE
    base CONSTANT int := CASE WHEN token[1] = 1 THEN 2 ELSE cardinality(token) - 2 END;
    readable CONSTANT bigint := rows_max / (cardinality(token) / 3);
BEGIN
    IF (SELECT count(*) FROM (SELECT FROM moved_events m WHERE m.room_nid = $1 AND m.moves > token[2] LIMIT readable + 1) AS m) > readable THEN
        RAISE EXCEPTION 'more than % moves of events since the token was made', readable USING ERRCODE = 'RS004';
    END IF;
    RETURN QUERY
    WITH level AS MATERIALIZED (
        SELECT i AS number, token[3 * i + 2] AS moves, token[3 * i + 3] AS topological, token[3 * i + 4] AS stream
        FROM generate_series(0, cardinality(token) / 3 - 1) AS i
    ),
    moved AS MATERIALIZED (
        SELECT m.moves, m.event_nid, m.topological_before
        FROM moved_events m
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
            SELECT (COALESCE(w.topological_before, e.topological_ordering), e.stream_ordering) <= (l.topological, l.stream) AS below
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
        WHERE forwards AND e.room_nid = $1 AND NOT e.outlier AND (e.topological_ordering, e.stream_ordering) > (token[base + 1], token[base + 2])
    )
    SELECT f.event_nid, f.topological_ordering, f.stream_ordering, bit_or(f.levels)
    FROM found f
    GROUP BY f.event_nid, f.topological_ordering, f.stream_ordering;
END
$$;
COMMENT ON FUNCTION moved_across IS
    'The events of a room that stand above the place of a pagination token, and belong below it, as they stood there when it was made. The token '
    'is 1 (below is what lies below all of its levels) or 0 (below any), then of each level: moves, topological, stream (storage/streams/tokens.py). '
    '"levels" has a bit for each level below which the event belongs. "forwards": with their parents that stand above it. Those have arrived since '
    '(else they would have stood below, too), and whoever walks forwards and has met a child is not to meet its parent after it. '
    'Reads what has moved since then, for each level; refuses (RS004) where that is more than "rows_max". plpgsql, so that it costs nothing where it '
    'is not called.';
CREATE OR REPLACE FUNCTION server_sees(
    event events, own_audiences int8multirange, shared_audiences int8multirange, world_audiences int8multirange, reader_nid int,
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
    'Whether history visibility allows a server the whole event; otherwise it gets the redacted form. server_gets is tested as well.';
CREATE OR REPLACE FUNCTION got_before(room_nid int, principal_nid int, audience bigint) RETURNS boolean
LANGUAGE plpgsql STABLE PARALLEL SAFE COST 4 AS $$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM past_visibility p
        WHERE p.room_nid = $1 AND p.principal_nid = $2 AND p.audiences <> COALESCE(p.invited_audiences, '{}')
    ) OR saw_before($1, 1, $3, false);
END
$$;
COMMENT ON FUNCTION got_before IS
    'Whether past_visibility has any audience that a server was joined in, or this one among those readable by the world. For server_gets.';
CREATE OR REPLACE FUNCTION server_gets(
    event events, joined_audiences int8multirange, world_audiences int8multirange, reader_nid int, unread int8multirange
) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN $2 <> '{}' OR $3 @> $1.audience THEN true
        WHEN $5 IS NOT NULL THEN got_before($1.room_nid, $4, $1.audience)
        ELSE false
    END
$$;
COMMENT ON FUNCTION server_gets IS
    'Whether a server gets an event in any form. A server that was never joined to the room gets world-readable events only. It was joined '
    'if it is in any audience otherwise than by an invitation.';
CREATE OR REPLACE FUNCTION ancestors_of(room_nid int, event_nids bigint[], wanted int, rows_max int) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 100 AS $$
DECLARE
    -- the front, latest first: events reached and not given yet. Never longer than what can still be given
    nids bigint[];
    orders bigint[];
    streams bigint[];
    accepted boolean[];
    parents bigint[];
    left_over int := $3;
    looked_up int;
BEGIN
    SELECT array_agg(f.event_nid), array_agg(f.topological_ordering), array_agg(f.stream_ordering), array_agg(f.rejected IS NULL)
    INTO nids, orders, streams, accepted
    FROM (
        SELECT *
        FROM (SELECT * FROM events e WHERE e.event_nid = ANY ($2) OFFSET 0) AS e  -- by the key: the order is another index's
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
            SELECT ARRAY[e.event_nid], ARRAY[e.topological_ordering], ARRAY[e.stream_ordering], ARRAY[e.rejected IS NULL]
            INTO nids, orders, streams, accepted
            FROM (SELECT * FROM events e WHERE e.event_nid = parents[1] OFFSET 0) AS e
            WHERE e.room_nid = $1 AND NOT e.outlier;
        ELSE
            SELECT array_agg(f.event_nid), array_agg(f.topological_ordering), array_agg(f.stream_ordering), array_agg(f.is_accepted)
            INTO nids, orders, streams, accepted
            FROM (
                SELECT f.*, count(*) FILTER (WHERE f.is_accepted) OVER (ORDER BY f.topological_ordering DESC, f.stream_ordering DESC) AS place
                FROM (
                    SELECT * FROM unnest(nids[2:], orders[2:], streams[2:], accepted[2:])
                        AS f (event_nid, topological_ordering, stream_ordering, is_accepted)
                    UNION
                    SELECT e.event_nid, e.topological_ordering, e.stream_ordering, e.rejected IS NULL
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
    'These events and what lies before them in the room, latest first: again and again the latest of the front, whose children have all had '
    'their turn. At most so many accepted ones (rejected ones are passed through), and at most so many rows looked up, give or take the '
    'parents of one event. plpgsql, as the front is kept in memory then: a recursive query would write it down anew for each step.';
CREATE OR REPLACE FUNCTION events_between(
    room_nid int, earliest bigint[], latest bigint[], wanted int, min_depth bigint, rows_max int
) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE ROWS 20 AS $$
DECLARE
    queue bigint[];  -- everything reached, in the order in which it was; from `at` on its parents have not been looked up
    orders bigint[];
    given boolean[];
    seen bigint[];  -- what is not to be reached again, as far as it can be: lower in the order than what is still in the queue
    seen_orders bigint[];
    seen_max int := 128;
    at int := 1;
    upto int;
    left_over int := $4;
    looked_up int := 0;
BEGIN
    SELECT array_agg(e.event_nid ORDER BY i.place), array_agg(e.topological_ordering ORDER BY i.place)
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
        SELECT queue || array_agg(f.event_nid), orders || array_agg(f.topological_ordering), array_agg(f.is_given),
            seen || array_agg(f.event_nid), seen_orders || array_agg(f.topological_ordering)
        INTO queue, orders, given, seen, seen_orders
        FROM (
            SELECT f.*
            FROM (
                SELECT DISTINCT ON (p.event_nid) p.event_nid, p.topological_ordering, p.is_given, c.place, i.place AS parent
                FROM unnest(queue[at:upto]) WITH ORDINALITY AS c (event_nid, place)
                CROSS JOIN LATERAL (SELECT e.prev_events FROM events e WHERE e.event_nid = c.event_nid OFFSET 0) AS e
                CROSS JOIN unnest(e.prev_events) WITH ORDINALITY AS i (event_nid, place)
                CROSS JOIN LATERAL (
                    SELECT p.event_nid, p.topological_ordering, p.rejected IS NULL AND p.depth >= $5 AS is_given, p.room_nid, p.outlier
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
            FROM unnest(queue[cardinality(queue) - cardinality(given) + 1:], given) WITH ORDINALITY AS f (event_nid, is_given, place)
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
    'What lies before the latest events in the room, neither at nor before the earliest ones as far as these stop the walk: breadth first, the '
    'parents of an event in the order in which it names them. At most so many accepted ones of at least this depth (others are '
    'passed through), and at most so many rows looked up, give or take the parents of one event.';
CREATE OR REPLACE FUNCTION path_of(state_group bigint, back int[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ARRAY(SELECT $1 - step.back FROM unnest($2) WITH ORDINALITY AS step (back, place) ORDER BY step.place)
$$;
CREATE OR REPLACE FUNCTION reached_from(chain_nid bigint, sequence_number int) RETURNS TABLE (chain_nid_reached bigint, upto int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.target_chain_nid, max(l.target_sequence_number)
    FROM auth_chain_links l
    WHERE l.chain_nid = $1 AND l.sequence_number <= $2
    GROUP BY l.target_chain_nid
    OFFSET 0
$$;
COMMENT ON FUNCTION reached_from IS 'What the links of a chain up to this place lead to: the chains, and of each the last place.';
CREATE OR REPLACE FUNCTION state_entries(state_group bigint) RETURNS TABLE (state_key_nid int, event_nid bigint)
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
COMMENT ON FUNCTION state_entries IS 'A whole state: the rows of the group''s path, folded by position, later ones winning; 0 removes a key.';
CREATE OR REPLACE FUNCTION state_but_members(state_group bigint) RETURNS TABLE (state_key_nid int, event_nid bigint)
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
    'As state_entries, without the members, which are not looked at. A row of NULLs says that the group or a row of its path is lost.';
CREATE OR REPLACE FUNCTION heroes_of(room_nid int, upto bigint, memberships smallint[], besides text) RETURNS text[]
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
            WHERE c.room_nid = $1 AND c.membership = ANY ($3) AND c.state_key_nid NOT IN (SELECT state_key_nid FROM later)
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
    'Five members by whom a room without a name is called, as of a position: the first in stream order of their membership events. Of rooms '
    'with more than a hundred such members they are of the hundred that this server has known longest.';
