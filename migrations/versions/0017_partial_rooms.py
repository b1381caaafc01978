"""Add rooms that were joined with the members omitted, until the rest of their state is stored.

The statements are in 0017_partial_rooms.sql.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0017"
down_revision: Final = "0016"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("DROP TABLE partial_rooms")
    op.execute("ALTER TABLE rooms DROP COLUMN completed_at, DROP COLUMN is_partial")
    op.execute(
        "COMMENT ON COLUMN rooms.last_stream_ordering IS 'Position of the latest live event."
        " Serves: the rooms that changed since a token.'"
    )
