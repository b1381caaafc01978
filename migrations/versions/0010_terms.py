"""Rename tables, columns and functions to common terms: reordered, superseded, retained, ranges.

It changes only the catalogue, so it takes milliseconds. Processes of the previous release know the
old names, so the step is refused while one of them runs.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0010"
down_revision: Final = "0009"
phase: Final[Phase] = "post"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    run_script(Path(__file__).with_name("0010_terms_down.sql").read_text(encoding="utf-8"))
