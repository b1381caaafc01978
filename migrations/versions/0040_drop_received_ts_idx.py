"""Drop the index with an entry for each time of receipt: the index of block ranges replaces it.

Code of earlier releases reads pages in the order of this index. Without it, each of its pages would
read and sort the whole period.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0040"
down_revision: Final = "0039"
phase: Final[Phase] = "post"


def upgrade() -> None:
    op.execute("DROP INDEX events_received_ts_idx")


def downgrade() -> None:
    index_concurrently("events_received_ts_idx", "ON events (received_ts)")
    op.execute(
        "COMMENT ON INDEX events_received_ts_idx IS 'Serves: the events received in a period"
        " (storage/pipeline/source/filters.py).'"
    )
