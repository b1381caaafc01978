"""Create the first schema: a frozen copy of storage/database/schema.sql, in 0001_initial.sql.

Once released, the copy never changes, and later changes are separate revisions. Until then, `python
migrations/freeze.py` copies the schema again. A comment records which form of the schema created a
database; `storage.database.migrate.check_schema` compares it.
"""

from pathlib import Path
from typing import Final

from alembic import op
from alembic.util import CommandError

from storage.database.migrate import first_schema
from storage.database.migration_steps import Phase, run_script

revision: Final = "0001"
down_revision: Final = None
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))
    op.execute(f"COMMENT ON TABLE alembic_version IS '{first_schema(Path(__file__).parents[1])}'")


def downgrade() -> None:
    message = "there is nothing before the first schema: drop the database instead"
    raise CommandError(message)
