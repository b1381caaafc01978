"""Use the distances: code that reads the arrays alone would find no parents.

A job rewrites older events. The readers know both forms, so it may be run at any time, or never.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Job, Phase, background_job

revision: Final = "0032"
down_revision: Final = "0031"
phase: Final[Phase] = "post"

# A row that a write has locked keeps its arrays: to wait for it could be a deadlock.
BATCH: Final = """
WITH
part AS MATERIALIZED (
    SELECT event_nid
    FROM events
    WHERE event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::int
),
old AS MATERIALIZED (
    SELECT e.event_nid, e.prev_events, e.auth_events
    FROM part
    JOIN events e USING (event_nid)
    WHERE e.prev_events IS NOT NULL OR e.auth_events IS NOT NULL
    FOR NO KEY UPDATE OF e SKIP LOCKED
),
fitting AS (
    SELECT o.*,
        cardinality(o.prev_events) <= 1
            AND 2147483647 >= ALL (SELECT abs(o.event_nid - unnest(o.prev_events))) AS prev_fits,
        cardinality(o.auth_events) <= 4
            AND 2147483647 >= ALL (SELECT abs(o.event_nid - unnest(o.auth_events))) AS auth_fits
    FROM old o
),
changed AS (
    UPDATE events e
    SET prev_events = CASE WHEN f.prev_fits THEN NULL ELSE e.prev_events END,
        prev_distance = CASE WHEN f.prev_fits THEN e.event_nid - f.prev_events[1]
            ELSE e.prev_distance END,
        auth_events = CASE WHEN f.auth_fits THEN NULL ELSE e.auth_events END,
        auth_distance_1 = CASE WHEN f.auth_fits THEN e.event_nid - f.auth_events[1]
            ELSE e.auth_distance_1 END,
        auth_distance_2 = CASE WHEN f.auth_fits THEN e.event_nid - f.auth_events[2]
            ELSE e.auth_distance_2 END,
        auth_distance_3 = CASE WHEN f.auth_fits THEN e.event_nid - f.auth_events[3]
            ELSE e.auth_distance_3 END,
        auth_distance_4 = CASE WHEN f.auth_fits THEN e.event_nid - f.auth_events[4]
            ELSE e.auth_distance_4 END
    FROM fitting f
    WHERE e.event_nid = f.event_nid AND (f.prev_fits OR f.auth_fits)
)
SELECT count(*)::int AS rows, max(event_nid)::bigint AS place
FROM part
"""

job: Final = Job("store edges as distances", batch=BATCH, expected="SELECT count(*) FROM events")


def upgrade() -> None:
    op.execute("ALTER TABLE events VALIDATE CONSTRAINT events_distance_check")
    background_job(job, revision, where="EXISTS (SELECT FROM events)")


def downgrade() -> None:
    """Change nothing: the next step down writes the arrays again."""
