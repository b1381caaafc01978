"""Correct the comment of the server's name."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase

revision: Final = "0016"
down_revision: Final = "0015"
phase: Final[Phase] = "pre"

SERVER_NAME: Final = (
    "The homeserver whose users are local: visibility and memberships are stored for them. The "
    "first store that opens sets it. Another name is refused once there are rooms or data of "
    "users; until then a store of another name sets that, if no other process uses the database. "
    "NULL: all rooms so far were imported without a name."
)
BEFORE: Final = (
    "The homeserver whose users are local: visibility and memberships are stored for them. The "
    "first store that opens sets it, and stores of other names are refused. NULL: all rooms so "
    "far were imported without a name."
)


def upgrade() -> None:
    op.execute(f"COMMENT ON COLUMN deployment.server_name IS '{SERVER_NAME}'")


def downgrade() -> None:
    op.execute(f"COMMENT ON COLUMN deployment.server_name IS '{BEFORE}'")
