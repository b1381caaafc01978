"""Drop the large index by event id: two smaller ones have replaced it."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0031"
down_revision: Final = "0030"
phase: Final[Phase] = "post"


def upgrade() -> None:
    op.execute("ALTER TABLE events DROP CONSTRAINT events_event_id_key")


def downgrade() -> None:
    index_concurrently(
        "events_event_id_key", "ON events (event_id) INCLUDE (event_nid)", unique=True
    )
    op.execute(
        "ALTER TABLE events ADD CONSTRAINT events_event_id_key UNIQUE USING INDEX"
        " events_event_id_key"
    )
    op.execute(
        "COMMENT ON CONSTRAINT events_event_id_key ON events IS 'Serves: events by id; duplicates.'"
    )
