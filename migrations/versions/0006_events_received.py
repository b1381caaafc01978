"""Add an index by time of receipt, so that a read of one day of receipt reads only that day."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0006"
down_revision: Final = "0005"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently("events_received_ts_idx", "ON events (received_ts)")
    op.execute(
        "COMMENT ON INDEX events_received_ts_idx IS 'Serves: the events received within a time"
        " (storage/pipeline/source/filters.py).'"
    )
