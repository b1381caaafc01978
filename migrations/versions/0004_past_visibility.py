"""Add a table for old visibility ranges of principals with many, and functions that read it.

The statements are in 0004_past_visibility.sql.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0004"
down_revision: Final = "0003"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
