"""Add dictionaries for the bytes of events, and a column for what statements looked up there.

The code of this release reads every form of the bytes. It writes another one than the bytes
themselves after the next revision.
"""

from pathlib import Path
from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, run_script

revision: Final = "0022"
down_revision: Final = "0021"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    op.execute("ALTER TABLE events DROP COLUMN describes_room")
    op.execute("DROP TABLE dictionaries")
    op.execute(
        "COMMENT ON COLUMN events.json IS 'The received bytes, or another form (see encoding).'"
    )
    op.execute(
        "COMMENT ON COLUMN events.encoding IS 'The contents of json: 0 = the bytes as received; 1 ="
        " censored, the canonical JSON of the redacted form (storage/maintenance/censor.py).'"
    )
    op.execute(
        "COMMENT ON COLUMN events.redacted_form IS 'Its content hash was wrong: only the redacted"
        " form is valid and ever shown. json has the received bytes.'"
    )
    op.execute("COMMENT ON COLUMN import_events.json IS NULL")
