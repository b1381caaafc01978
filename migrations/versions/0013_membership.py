"""Add what reads of memberships need: two indexes, and the rooms that a user has forgotten.

The other statements are in 0013_membership.sql.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, index_concurrently, run_script

revision: Final = "0013"
down_revision: Final = "0012"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently("current_state_key_idx", "ON current_state (state_key_nid, room_nid)")
    index_concurrently(
        "visibility_servers_idx", "ON visibility (room_nid) WHERE last_join_topological IS NULL"
    )
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    run_script(Path(__file__).with_name("0013_membership_down.sql").read_text(encoding="utf-8"))
