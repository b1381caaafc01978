"""Example: add a table, and register a job that fills it while servers run."""

from typing import Final

from alembic import op

from storage.database.background import Job
from storage.database.migrate import HEAD_REVISION
from storage.database.migration_steps import Phase, background_job

revision: Final = "9001"
down_revision: Final = HEAD_REVISION
phase: Final[Phase] = "pre"

BATCH: Final = """
WITH
part AS (
    SELECT event_nid, octet_length(json) AS bytes
    FROM events
    WHERE event_nid > $1::bigint
    ORDER BY event_nid
    LIMIT $2::int
),
filled AS (
    INSERT INTO example_sizes (event_nid, bytes)
    SELECT event_nid, bytes
    FROM part
    ON CONFLICT DO NOTHING
)
SELECT count(*)::int AS rows, max(event_nid) AS place
FROM part
"""

job: Final = Job("fill example_sizes", batch=BATCH, expected="SELECT count(*) FROM events")


def upgrade() -> None:
    op.execute("CREATE TABLE example_sizes (event_nid bigint PRIMARY KEY, bytes int)")
    background_job(job, revision, where="EXISTS (SELECT FROM events)")


def downgrade() -> None:
    op.execute("DROP TABLE example_sizes")
