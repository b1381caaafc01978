"""Add the connections of sliding sync, and an index of account data by position.

The other statements are in 0014_sliding_sync.sql.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently, run_script

revision: Final = "0014"
down_revision: Final = "0013"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently("account_data_user_idx", "ON account_data (principal_nid, stream_id)")
    op.execute(
        "COMMENT ON INDEX account_data_user_idx IS "
        "'Serves: the account data of a user that changed since a position.'"
    )
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("DROP TABLE sliding_rooms, sliding_connections")
    op.execute("DROP SEQUENCE sliding_connection_nids")
    op.execute("DROP INDEX account_data_user_idx")
