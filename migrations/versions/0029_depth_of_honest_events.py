"""Let depth be NULL where it equals the topological ordering, as in rooms with honest depths.

The code of this release reads both forms. It writes NULL after the last of these revisions.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0029"
down_revision: Final = "0028"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    script = Path(__file__).with_name("0029_depth_of_honest_events_down.sql")
    run_script(script.read_text(encoding="utf-8"))
