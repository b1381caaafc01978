"""Add columns for parents and auth events as distances, which take a quarter of the bytes.

The code of this release reads both forms. It writes the distances after the next revision.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0021"
down_revision: Final = "0020"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    script = Path(__file__).with_name("0021_edge_distances_down.sql")
    run_script(script.read_text(encoding="utf-8"))
