"""Build the indexes by event id that replace a larger one."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0020"
down_revision: Final = "0019"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently("events_event_id_idx", "ON events USING hash (event_id)")
    index_concurrently(
        "events_chosen_id_key",
        "ON events (event_id) WHERE position(':' IN event_id) > 0",
        unique=True,
    )
    op.execute(
        "COMMENT ON INDEX events_event_id_idx IS 'Serves: events by id. It has 4 bytes of a hash"
        " for each id, so it is not unique. A write looks for its new events, and the writers of a"
        " room take turns (rooms.write_version).'"
    )
    op.execute(
        "COMMENT ON INDEX events_chosen_id_key IS 'Serves: duplicates of ids that servers choose"
        " (room versions 1 and 2), in any two rooms.'"
    )


def downgrade() -> None:
    op.execute("DROP INDEX events_chosen_id_key")
    op.execute("DROP INDEX events_event_id_idx")
