"""The first schema: a frozen copy of storage/database/schema.sql, in 0001_initial.sql beside this file.

Once released, the copy never changes; what comes after is a revision of its own. Until then, `python migrations/freeze.py` copies
the schema again.
"""

from pathlib import Path
from typing import Final

from alembic import context, op
from alembic.util import CommandError

revision: Final = "0001"
down_revision: Final = None


def upgrade() -> None:
    script = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    if context.is_offline_mode():
        op.get_context().impl.static_output(script)
    else:
        # One string of many statements goes past SQLAlchemy, which prepares each, to the driver.
        connection = op.get_bind().connection.dbapi_connection
        connection.run_async(lambda driver: driver.execute(script))  # type: ignore[union-attr]  # asyncpg's adapter


def downgrade() -> None:
    message = "there is nothing before the first schema: drop the database instead"
    raise CommandError(message)
