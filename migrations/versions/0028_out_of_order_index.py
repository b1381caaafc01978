"""Build the index of the events out of time order, which replaces an index of all events."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0028"
down_revision: Final = "0027"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently(
        "events_out_of_order_idx",
        "ON events (room_nid, origin_server_ts) WHERE in_order_ts IS NOT NULL AND NOT outlier",
    )
    op.execute(
        "COMMENT ON INDEX events_out_of_order_idx IS 'Serves: the event nearest to a time"
        " (storage/queries/timestamp_to_event.py). It has the events out of time order; those in"
        " time order are found by in_order_position.'"
    )


def downgrade() -> None:
    op.execute("DROP INDEX events_out_of_order_idx")
