"""Roles and what they may: a frozen copy of storage/database/grants.sql, in 0002_roles.sql beside this file.

Whoever may not make roles is told what to do instead; the schema serves without them. `room-storage migrate --grants` does this again.
"""

from pathlib import Path
from typing import Final

from storage.database.steps import Phase, run_script

revision: Final = "0002"
down_revision: Final = "0001"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    """The grants go with their roles: DROP OWNED BY …; DROP ROLE …."""
