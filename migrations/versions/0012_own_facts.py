"""Add tables for the homeserver's own facts: defined streams, their facts, and cursors.

The statements are in 0012_own_facts.sql.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0012"
down_revision: Final = "0011"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("DELETE FROM stream_positions WHERE stream_name IN (TABLE defined_streams)")
    op.execute("DROP TABLE cursors, published_facts, defined_streams")
    op.execute("DROP SEQUENCE published_facts_stream")
