"""Validate the checks of verdicts, in a step of its own: others read and write meanwhile."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase

revision: Final = "0019"
down_revision: Final = "0018"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    op.execute("ALTER TABLE events VALIDATE CONSTRAINT events_refused_check")
    op.execute("ALTER TABLE events VALIDATE CONSTRAINT events_superseded_check")


def downgrade() -> None:
    """Change nothing: a check that is valid may stay so."""
