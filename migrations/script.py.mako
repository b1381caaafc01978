"""${message}"""

from typing import Final

from alembic import op

revision: Final = "${up_revision}"
down_revision: Final = ${repr(down_revision)}


def upgrade() -> None:
    op.execute("")


def downgrade() -> None:
    op.execute("")
