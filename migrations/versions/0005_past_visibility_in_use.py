"""Move old visibility ranges to their table.

Code that does not read that table would hide events, or show too many.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Job, Phase, background_job

revision: Final = "0005"
down_revision: Final = "0004"
phase: Final[Phase] = "post"

RANGE = "int8multirange, int8multirange, int8multirange"
OLD: Final = (
    f"user_sees(events, bigint, {RANGE}, bigint)",
    f"user_sees_relation(events, bigint, {RANGE}, bigint, int[])",
    f"server_sees(events, {RANGE})",
    "server_gets(events, int8multirange, int8multirange)",
    "stretches_of(int, int, int8multirange)",
)

# Room by room, because the place of a job is one number. It does what
# storage/visibility/past_visibility.py does at the next write of such a row: of more than 16 ranges
# the oldest go to rows of 8. It skips principals with as many ranges by invitation alone; that code
# handles them.
BATCH: Final = """
WITH
part AS MATERIALIZED (
    SELECT DISTINCT room_nid
    FROM visibility
    WHERE room_nid > $1::bigint
    ORDER BY room_nid
    LIMIT $2::int
),
long AS MATERIALIZED (  -- one range takes 21 bytes, in a row that is not compressed
    SELECT v.room_nid, v.principal_nid
    FROM part
    JOIN visibility v USING (room_nid)
    WHERE v.first_audience IS NULL AND pg_column_size(v.audiences) > 100
        AND (SELECT count(*) FROM unnest(v.audiences)) > 16
),
locked AS MATERIALIZED (
    SELECT room_nid, pg_advisory_xact_lock(1919905645, room_nid)
    FROM (SELECT DISTINCT room_nid FROM long ORDER BY room_nid) AS ordered
),
held AS (  -- plans with cached copies of the rows are refused from here on
    UPDATE rooms r
    SET write_version = r.write_version + 1
    FROM locked
    WHERE r.room_nid = locked.room_nid
    RETURNING r.room_nid
),
piece AS MATERIALIZED (
    SELECT v.room_nid, v.principal_nid, v.audiences, v.invited_audiences, p.place, p.first,
        p.pieces,
        lead(p.first) OVER (PARTITION BY v.room_nid, v.principal_nid ORDER BY p.place) AS next
    FROM long
    JOIN visibility v USING (room_nid, principal_nid)
    CROSS JOIN LATERAL (
        SELECT (r.place - 1) / 8 AS place, min(lower(r.range)) AS first,
          (max(max(r.place)) OVER () - 9) / 8 AS pieces
        FROM unnest(v.audiences) WITH ORDINALITY AS r (range, place)
        GROUP BY 1
    ) AS p
),
cut AS (
    SELECT p.*, int8multirange(int8range(CASE WHEN p.place > 0 THEN p.first END,
      CASE WHEN p.place < p.pieces THEN p.next END)) AS told
    FROM piece p
    WHERE p.place <= p.pieces
),
kept AS (  -- unless another session has written the row meanwhile, and cut it
    UPDATE visibility v
    SET audiences = v.audiences * c.told,
        invited_audiences = NULLIF(v.invited_audiences * c.told, '{}'),
        first_audience = c.first
    FROM cut c
    JOIN held USING (room_nid)
    WHERE v.room_nid = c.room_nid AND v.principal_nid = c.principal_nid AND c.place = c.pieces
      AND v.first_audience IS NULL AND v.audiences = c.audiences
      AND v.invited_audiences IS NOT DISTINCT FROM c.invited_audiences
    RETURNING v.room_nid, v.principal_nid
),
past AS (
    INSERT INTO past_visibility (first_audience, opened_topological, room_nid, principal_nid,
      audiences, invited_audiences, topological_ranges)
    SELECT CASE WHEN c.place > 0 THEN c.first ELSE 0 END,
      CASE WHEN c.place > 0 THEN COALESCE(opened.topological, 0) ELSE 0 END,
        c.room_nid, c.principal_nid, c.audiences * c.told,
        NULLIF(c.invited_audiences * c.told, '{}'),
        disjoint_topological_ranges(c.room_nid, c.audiences * c.told, NULL, NULL, '{}')
    FROM cut c
    JOIN kept USING (room_nid, principal_nid)
    LEFT JOIN LATERAL (
        SELECT a.opened_topological AS topological
        FROM audiences a
        WHERE a.room_nid = c.room_nid AND a.audience <= (c.first >> 40) << 40
          AND a.opened_topological IS NOT NULL
        ORDER BY a.audience DESC
        LIMIT 1
    ) AS opened ON true
    WHERE c.place < c.pieces
)
SELECT count(*)::int AS rows, max(room_nid)::bigint AS place
FROM part
"""

job: Final = Job(
    "move old ranges of visibility", batch=BATCH, expected="SELECT count(*) FROM rooms"
)


def upgrade() -> None:
    for function in OLD:
        op.execute(f"DROP FUNCTION {function}")
    background_job(job, revision, where="EXISTS (SELECT FROM visibility)")
