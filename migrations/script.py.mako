"""${message}"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase

revision: Final = "${up_revision}"
down_revision: Final = ${repr(down_revision)}
phase: Final[Phase] = "pre"  # "post": only after the last process of the release before is gone


def upgrade() -> None:
    op.execute("")


def downgrade() -> None:
    op.execute("")
