"""Create roles and grants: a frozen copy of storage/database/grants.sql, in 0002_roles.sql.

Without the right to create roles, the step warns and says what to do instead; the schema works
without them. `room-storage migrate --grants` runs this again.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0002"
down_revision: Final = "0001"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    """Keep the grants: they go with their roles, by DROP OWNED BY …; DROP ROLE …."""
