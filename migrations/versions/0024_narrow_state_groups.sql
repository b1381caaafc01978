ALTER TABLE state_groups
    ALTER COLUMN digest DROP NOT NULL,
    ALTER COLUMN back DROP NOT NULL,
    ADD COLUMN key_nid int,
    ADD COLUMN member_key_nid int,
    ADD COLUMN event_nid bigint,
    ADD COLUMN path bytea;
ALTER TABLE state_groups
    ADD CONSTRAINT state_groups_path_check CHECK (
        (path IS NULL) <> (back IS NULL)
        -- the group before the low level has a digest
        AND (digest IS NOT NULL OR get_byte(path, 0) > 4)
    ) NOT VALID,
    ADD CONSTRAINT state_groups_entry_check CHECK (CASE
        WHEN event_nid IS NULL THEN COALESCE(key_nid, member_key_nid) IS NULL
        ELSE (key_nid IS NULL) <> (member_key_nid IS NULL)
            AND COALESCE(key_nids, member_key_nids) IS NULL
    END) NOT VALID;
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
COMMENT ON COLUMN state_groups.back IS
    'The whole path, the groups to fold: the difference of this group''s number to each of theirs. '
    'Root first, this group (0) last. NULL: see path.';
COMMENT ON COLUMN state_groups.key_nids IS 'NULL: member keys only, or a single entry.';
COMMENT ON COLUMN state_groups.member_key_nids IS 'NULL: no member, or a single entry.';
COMMENT ON COLUMN state_groups.key_nid IS
    'The key of a single entry that is no member. Arrays of one key and one event take 54 bytes. '
    'NULL: another entry, none, or several.';
COMMENT ON COLUMN state_groups.member_key_nid IS 'The same of a member.';
COMMENT ON COLUMN state_groups.event_nid IS 'The event of a single entry; 0 removes the key.';
COMMENT ON COLUMN state_groups.path IS
    'The path in bytes (storage/state/paths.py): the differences as in back, without this group. A '
    'row on the low level has those to the rows of its level and to the last row before them, '
    'which has the beginning of the path. NULL: see back.';
COMMENT ON INDEX state_groups_room_nid_idx IS
    'Serves: the groups of a room: garbage, purge, verification. Equal keys share their bytes, so '
    'it has no other column.';
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
COMMENT ON FUNCTION path_of(bigint) IS 'The groups of state_path in one value. NULL for NULL.';

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

CREATE OR REPLACE FUNCTION state_entries(state_group bigint) RETURNS TABLE (state_key_nid int,
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

CREATE OR REPLACE FUNCTION state_but_members(state_group bigint) RETURNS TABLE (state_key_nid int,
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
