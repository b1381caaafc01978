"""Add columns for the time order of events, which most of an index by time is left out for.

The code of this release reads both forms. It leaves events out after the last of these revisions.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0027"
down_revision: Final = "0026"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("DROP FUNCTION in_order_positions")
    op.execute("DROP FUNCTION in_order_position")
    op.execute("ALTER TABLE events DROP COLUMN in_order_ts")
    op.execute("ALTER TABLE rooms DROP COLUMN in_order_ts")
