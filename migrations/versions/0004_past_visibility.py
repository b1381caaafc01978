"""A table for the old ranges of whoever comes and goes often, and functions that read it: see 0004_past_visibility.sql beside this file."""

from pathlib import Path
from typing import Final

from storage.database.steps import Phase, run_script

revision: Final = "0004"
down_revision: Final = "0003"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
