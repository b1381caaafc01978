"""Add the verdicts of callers on events, as columns of `events`.

The checks hold for new rows at once. The next revision validates them for the others.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0018"
down_revision: Final = "0017"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute(
        "ALTER TABLE events DROP COLUMN superseded, DROP COLUMN refused, "
        "DROP COLUMN arrival_ordering"
    )
    op.execute(
        "COMMENT ON COLUMN events.soft_failed IS 'Refused by the room''s current state when it "
        "arrived: never shown to clients, never an extremity.'"
    )
