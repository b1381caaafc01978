"""Use the narrow form of state groups: code that reads the arrays alone would find no path.

A job rewrites older groups. The readers know both forms, so it may be run at any time, or never.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Job, Phase, background_job, index_concurrently

revision: Final = "0035"
down_revision: Final = "0034"
phase: Final[Phase] = "post"

# As row_of in storage/state/rows.py. A state after one event needs no digest. A row that a write
# has locked keeps its form: to wait for it could be a deadlock.
BATCH: Final = """
WITH
part AS MATERIALIZED (
    SELECT state_group
    FROM state_groups
    WHERE state_group > $1::bigint
    ORDER BY state_group
    LIMIT $2::int
),
old AS MATERIALIZED (
    SELECT g.state_group, g.back, g.runs & 7 AS low_run,
        CASE WHEN g.event_nid IS NULL AND COALESCE(cardinality(g.key_nids), 0)
            + COALESCE(cardinality(g.member_key_nids), 0) = 1
            THEN COALESCE(g.event_nids[1], g.member_event_nids[1]) END AS event_nid,
        g.key_nids[1] AS key_nid, g.member_key_nids[1] AS member_key_nid
    FROM part
    JOIN state_groups g USING (state_group)
    WHERE g.back IS NOT NULL
    FOR NO KEY UPDATE OF g SKIP LOCKED
),
own AS (  -- the distances that are stored, and whether all fit
    SELECT o.*, d.distances, d.fits, (CASE
        WHEN d.highest < 256 THEN 1
        WHEN d.highest < 65536 THEN 2
        WHEN d.highest < 16777216 THEN 3
        ELSE 4
    END) AS width
    FROM old o
    CROSS JOIN LATERAL (
        SELECT COALESCE(array_agg(s.distance ORDER BY s.place), '{}') AS distances,
            COALESCE(min(s.distance), 1) > 0 AS fits, COALESCE(max(s.distance), 0) AS highest
        FROM unnest(o.back[CASE WHEN o.low_run > 0 THEN cardinality(o.back) - o.low_run ELSE 1 END
            : cardinality(o.back) - 1]) WITH ORDINALITY AS s (distance, place)
    ) AS d
),
changed AS (
    UPDATE state_groups g
    SET back = CASE WHEN o.fits THEN NULL ELSE g.back END,
        path = CASE WHEN o.fits THEN decode(
            lpad(to_hex(o.width | CASE WHEN o.low_run > 0 THEN 8 ELSE 0 END), 2, '0') || (
                SELECT COALESCE(string_agg(lpad(to_hex(s.distance), 2 * o.width, '0'), ''
                    ORDER BY s.place), '')
                FROM unnest(o.distances) WITH ORDINALITY AS s (distance, place)
            ), 'hex') END,
        digest = CASE
            WHEN o.fits AND o.low_run > 0 AND EXISTS (
                SELECT FROM events e
                WHERE e.event_nid = o.event_nid AND e.state_group_after = o.state_group
            ) THEN NULL
            ELSE g.digest
        END,
        key_nid = CASE WHEN o.event_nid IS NOT NULL THEN o.key_nid END,
        member_key_nid = CASE WHEN o.event_nid IS NOT NULL THEN o.member_key_nid END,
        event_nid = o.event_nid,
        key_nids = CASE WHEN o.event_nid IS NULL THEN g.key_nids END,
        event_nids = CASE WHEN o.event_nid IS NULL THEN g.event_nids END,
        member_key_nids = CASE WHEN o.event_nid IS NULL THEN g.member_key_nids END,
        member_event_nids = CASE WHEN o.event_nid IS NULL THEN g.member_event_nids END
    FROM own o
    WHERE g.state_group = o.state_group AND (o.fits OR o.event_nid IS NOT NULL)
)
SELECT count(*)::int AS rows, max(state_group)::bigint AS place
FROM part
"""

job: Final = Job(
    "store state groups in the narrow form",
    batch=BATCH,
    expected="SELECT count(*) FROM state_groups",
)

PATH_OF: Final = """
CREATE FUNCTION path_of(state_group bigint, back int[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT ARRAY(SELECT $1 - step.back FROM unnest($2) WITH ORDINALITY AS step (back, place)
        ORDER BY step.place)
$$
"""


def upgrade() -> None:
    op.execute("ALTER TABLE state_groups VALIDATE CONSTRAINT state_groups_path_check")
    op.execute("ALTER TABLE state_groups VALIDATE CONSTRAINT state_groups_entry_check")
    op.execute("DROP INDEX state_groups_room_idx")
    op.execute("DROP INDEX state_groups_digest_idx")
    op.execute("DROP FUNCTION path_of(bigint, int[])")
    background_job(job, revision, where="EXISTS (SELECT FROM state_groups)")


def downgrade() -> None:
    """Build what the release before needs; a later step down writes the arrays again."""
    index_concurrently("state_groups_room_idx", "ON state_groups (room_nid, state_group)")
    index_concurrently("state_groups_digest_idx", "ON state_groups (digest)")
    op.execute(
        "COMMENT ON INDEX state_groups_room_idx IS 'Serves: the groups of a room: garbage, purge,"
        " verification.'"
    )
    op.execute(
        "COMMENT ON INDEX state_groups_digest_idx IS 'Serves: the group that already has the"
        " resolved state of a merge.'"
    )
    op.execute(PATH_OF)
    op.execute(
        "COMMENT ON FUNCTION path_of(bigint, int[]) IS 'The groups to fold for a state: root first,"
        " the group itself last.'"
    )
