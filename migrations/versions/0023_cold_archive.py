"""Add the tables of the archive of old event bytes, and triggers for bytes that leave it.

The code of this release reads archived events. Nothing is archived before the next revision.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0023"
down_revision: Final = "0022"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("DROP TRIGGER events_archive_update ON events")
    op.execute("DROP TRIGGER events_archive_delete ON events")
    op.execute("DROP FUNCTION note_archive_garbage")
    op.execute("DROP TABLE archive_garbage")
    op.execute("DROP TABLE archive_packs")
    op.execute("DROP SEQUENCE archive_pack_numbers")
