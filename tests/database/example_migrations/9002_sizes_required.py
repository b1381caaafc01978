"""Example: require what the job of the step before has filled; older releases do not write it."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, require_job

revision: Final = "9002"
down_revision: Final = "9001"
phase: Final[Phase] = "post"


def upgrade() -> None:
    require_job("fill example_sizes")
    op.execute("ALTER TABLE example_sizes ALTER COLUMN bytes SET NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE example_sizes ALTER COLUMN bytes DROP NOT NULL")
