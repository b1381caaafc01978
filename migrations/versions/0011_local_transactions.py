"""Add a table for the transaction ids of local events, and its grants.

The statements are in 0011_local_transactions.sql.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, run_script

revision: Final = "0011"
down_revision: Final = "0010"
phase: Final[Phase] = "pre"

BEFORE: Final = """
DROP TABLE local_transactions;
COMMENT ON COLUMN events.ineffective IS
    'An accepted redaction that took no effect: its target is not in the timeline yet, is in '
    'another room, or was sent by another user. Not shown to users; decided again when the target '
    'arrives.';
"""


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    run_script(BEFORE)
