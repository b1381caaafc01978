"""Add a table for out-of-band memberships with their stripped state, and its grants.

The statements are in 0007_out_of_band.sql.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0007"
down_revision: Final = "0006"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("DROP TRIGGER events_auth_events_once ON events")
    op.execute("DROP FUNCTION keep_auth_events()")
    op.execute("DROP FUNCTION is_out_of_band(events)")
    op.execute("DROP TABLE out_of_band_memberships")
