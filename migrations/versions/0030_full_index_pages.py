"""Fill the pages of two indexes that grow at their end; pages that are there stay as they are."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase

revision: Final = "0030"
down_revision: Final = "0029"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    op.execute("ALTER INDEX events_pkey SET (fillfactor = 100)")
    op.execute("ALTER INDEX events_stream_ordering_key SET (fillfactor = 100)")


def downgrade() -> None:
    op.execute("ALTER INDEX events_stream_ordering_key RESET (fillfactor)")
    op.execute("ALTER INDEX events_pkey RESET (fillfactor)")
