ALTER TABLE memberships ADD COLUMN forgotten boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN memberships.forgotten IS
    'The user has forgotten the room: it is not among the rooms that they left, and its history '
    'is hidden from them as from a user who was never there. It counts only while the membership '
    'is a leave or a ban. Any other membership clears it.';
COMMENT ON INDEX current_state_key_idx IS
    'Serves: the rooms of a user of any server (storage/queries/sharing.py).';
COMMENT ON INDEX visibility_servers_idx IS
    'Serves: the servers in a room (storage/queries/joined_servers.py). It lacks the local users '
    'who have joined, of whom a room may have many thousands.';

CREATE OR REPLACE FUNCTION visibility_of(room_nid int, principal_nid int)
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

CREATE OR REPLACE FUNCTION topological_ranges_of(room_nid int, principal_nid int,
    out_of_range int8multirange, place bigint, below bigint, above bigint)
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

DO $$
DECLARE
    prefix text := COALESCE(NULLIF(current_setting('room_storage.role_prefix', true), ''),
        'room_storage');
    runtime text;
BEGIN
    SELECT r.rolname INTO runtime FROM pg_roles r WHERE r.rolname = prefix || '_runtime';
    IF runtime IS NOT NULL THEN
        EXECUTE format('GRANT UPDATE (forgotten) ON memberships TO %I', runtime);
    END IF;
END
$$;
