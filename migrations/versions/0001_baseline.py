"""Create the schema: storage/database/schema.sql, then the roles and grants of grants.sql.

These files are the schema of today. So a new database has the newest revision after this step, and
`migrations/env.py` skips the steps to it. They bring older databases there.

Without the right to create roles, the step warns and says what to do instead; the schema works
without them. `room-storage migrate --grants` runs the grants again.
"""

from typing import Final

from alembic import op

from storage.database.deployment import grants_script
from storage.database.migrate import BASELINE, schema_script
from storage.database.migration_steps import Phase, run_script

revision: Final = "0001"
down_revision: Final = None
phase: Final[Phase] = "pre"


def upgrade() -> None:
    run_script(schema_script())
    run_script(grants_script())
    op.execute(f"COMMENT ON TABLE alembic_version IS '{BASELINE}'")
