"""Allow events to be archived: code of earlier releases would take a reference for damage."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase

revision: Final = "0034"
down_revision: Final = "0033"
phase: Final[Phase] = "post"


def upgrade() -> None:
    """Nothing but the step itself: it ends the support of earlier releases."""


def downgrade() -> None:
    """Raise if there are packs: `room-storage archive --back` returns their events first."""
    op.execute(
        "DO $$ BEGIN IF EXISTS (SELECT FROM archive_packs) THEN RAISE EXCEPTION"
        " 'events are archived: run room-storage archive --back first'; END IF; END $$"
    )
