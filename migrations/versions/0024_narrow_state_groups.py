"""Add columns for state groups with one entry, and for paths in bytes; indexes with fewer bytes.

The code of this release reads both forms. It writes the narrow one after revision 0035.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, index_concurrently, run_script

revision: Final = "0024"
down_revision: Final = "0023"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently("state_groups_room_nid_idx", "ON state_groups (room_nid)")
    index_concurrently(
        "state_groups_known_digest_idx", "ON state_groups (digest) WHERE digest IS NOT NULL"
    )
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    script = Path(__file__).with_name("0024_narrow_state_groups_down.sql")
    run_script(script.read_text(encoding="utf-8"))
