CREATE FUNCTION pg_temp.mixed(key_nid int, event_nid bigint) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE AS $$
-- entry_digest of storage/state/groups.py
DECLARE
    whole CONSTANT numeric := 18446744073709551616;
    half CONSTANT numeric := 9223372036854775808;
    x bigint;
    number numeric;
BEGIN
    x := (mod(mod(key_nid * 11400714819323198485, whole) + whole + half, whole) - half)::bigint
        # (mod(mod(event_nid * 14029467366897019727, whole) + whole + half, whole) - half)::bigint;
    x := x # ((x >> 30) & ((1::bigint << 34) - 1));
    number := mod(x::numeric * 13787848793156543929, whole);
    x := (mod(number + whole + half, whole) - half)::bigint;
    x := x # ((x >> 27) & ((1::bigint << 37) - 1));
    number := mod(x::numeric * 10723151780598845931, whole);
    x := (mod(number + whole + half, whole) - half)::bigint;
    RETURN x # ((x >> 31) & ((1::bigint << 33) - 1));
END
$$;

-- the digest of a group follows from that of the group before it, so the first of the low level
-- comes first
DO $$
BEGIN
    FOR place IN 1..7 LOOP
        UPDATE state_groups g
        SET digest = (mod(mod(before.digest + pg_temp.mixed(one.key, g.event_nid)
            * (g.event_nid <> 0)::int - pg_temp.mixed(one.key, last.event_nid)
            * (last.event_nid <> 0)::int, 18446744073709551616) + 27670116110564327424,
            18446744073709551616) - 9223372036854775808)::bigint
        FROM state_groups n
        CROSS JOIN LATERAL (
            SELECT COALESCE(n.key_nid, n.member_key_nid) AS key, path_of(n.state_group) AS path
        ) AS one
        JOIN state_groups before ON before.state_group = one.path[cardinality(one.path) - 1]
        CROSS JOIN LATERAL (
            SELECT COALESCE((
                SELECT own.event_nid
                FROM state_path(before.state_group) AS step
                JOIN state_groups p ON p.state_group = step.part
                CROSS JOIN LATERAL (
                    SELECT own_entry(one.key, n.member_key_nid IS NOT NULL, p.key_nids,
                        p.event_nids, p.member_key_nids, p.member_event_nids, p.key_nid,
                        p.member_key_nid, p.event_nid) AS event_nid
                ) AS own
                WHERE own.event_nid IS NOT NULL
                ORDER BY step.place DESC
                LIMIT 1
            ), 0) AS event_nid
        ) AS last
        WHERE n.digest IS NULL AND (n.runs & 7) = place AND g.state_group = n.state_group;
    END LOOP;
END
$$;

CREATE TEMP TABLE whole_paths ON COMMIT DROP AS
SELECT g.state_group, ARRAY(
    SELECT (g.state_group - step.part)::int
    FROM state_path(g.state_group) AS step
    ORDER BY step.place
) AS back
FROM state_groups g
WHERE g.path IS NOT NULL;

UPDATE state_groups g
SET back = w.back,
    path = NULL
FROM whole_paths w
WHERE g.state_group = w.state_group;

UPDATE state_groups
SET key_nids = CASE WHEN key_nid IS NOT NULL THEN ARRAY[key_nid] END,
    event_nids = CASE WHEN key_nid IS NOT NULL THEN ARRAY[event_nid] END,
    member_key_nids = CASE WHEN member_key_nid IS NOT NULL THEN ARRAY[member_key_nid] END,
    member_event_nids = CASE WHEN member_key_nid IS NOT NULL THEN ARRAY[event_nid] END,
    key_nid = NULL,
    member_key_nid = NULL,
    event_nid = NULL
WHERE event_nid IS NOT NULL;

CREATE OR REPLACE FUNCTION state_entries(state_group bigint) RETURNS TABLE (state_key_nid int,
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

CREATE OR REPLACE FUNCTION state_but_members(state_group bigint) RETURNS TABLE (state_key_nid int,
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

DROP FUNCTION own_entry(int, boolean, int[], bigint[], int[], bigint[], int, int, bigint);
DROP FUNCTION own_others(int[], bigint[], int, bigint);
DROP FUNCTION own_entries(int[], bigint[], int[], bigint[], int, int, bigint);
DROP FUNCTION path_of(bigint);
DROP FUNCTION state_path(bigint);
DROP FUNCTION distances_in_path(int[], bytea);
DROP FUNCTION distance_in_path(bytea, int);
ALTER TABLE state_groups
    DROP CONSTRAINT state_groups_path_check,
    DROP CONSTRAINT state_groups_entry_check,
    DROP COLUMN key_nid,
    DROP COLUMN member_key_nid,
    DROP COLUMN event_nid,
    DROP COLUMN path,
    ALTER COLUMN digest SET NOT NULL,
    ALTER COLUMN back SET NOT NULL;
DROP INDEX state_groups_room_nid_idx;
DROP INDEX state_groups_known_digest_idx;
COMMENT ON TABLE state_groups IS
    'One immutable row per distinct state, with the changes against its path only. To read it, '
    'fold the rows of the path, root first, by position in the path. Members are in columns of '
    'their own, so that a read of the rest of a big root does not read them. There is a row for '
    'every state change, so the columns are as narrow as possible.';
COMMENT ON COLUMN state_groups.digest IS
    'Order-independent sum over the entries: equal states have equal digests.';
COMMENT ON COLUMN state_groups.back IS
    'The path, the groups to fold: the difference of this group''s number to each of theirs. Root '
    'first, this group (0) last. See path_of.';
COMMENT ON COLUMN state_groups.key_nids IS 'NULL: member keys only.';
COMMENT ON COLUMN state_groups.member_key_nids IS 'NULL: no member.';
