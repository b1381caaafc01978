"""Add an index of block ranges by time of receipt: it replaces one with an entry for each event."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0038"
down_revision: Final = "0037"
phase: Final[Phase] = "pre"

COMMENT: Final = """
COMMENT ON INDEX events_received_idx IS
    'Serves: the events received in a period (storage/pipeline/source/filters.py). It has the '
    'first and last time of each 8 pages. VACUUM adds new pages; until then each search reads '
    'them. Postgres can request that page by page (autosummarize), but an import fills the queue '
    'of these requests, and each further one is a line in the log of the server.'
"""


def upgrade() -> None:
    index_concurrently(
        "events_received_idx", "ON events USING brin (received_ts) WITH (pages_per_range = 8)"
    )
    op.execute(COMMENT)


def downgrade() -> None:
    op.execute("DROP INDEX events_received_idx")
