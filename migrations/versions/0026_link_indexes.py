"""Build the indexes of the links that positions have."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0026"
down_revision: Final = "0025"
phase: Final[Phase] = "pre"

COMMENT: Final = (
    "Serves: the positions that reach a given one (linking_to). Most links lead to few targets, "
    "and equal keys share their bytes."
)


def upgrade() -> None:
    index_concurrently(
        "auth_chains_link_1_idx",
        "ON auth_chains (((link_1 >> 32) - event_nid), ((link_1 & 4294967295)))"
        " WHERE link_1 IS NOT NULL",
    )
    index_concurrently(
        "auth_chains_link_2_idx",
        "ON auth_chains (((link_2 >> 32) - event_nid), ((link_2 & 4294967295)))"
        " WHERE link_2 IS NOT NULL",
    )
    op.execute(f"COMMENT ON INDEX auth_chains_link_1_idx IS '{COMMENT}'")
    op.execute("COMMENT ON INDEX auth_chains_link_2_idx IS 'Serves: the same.'")


def downgrade() -> None:
    op.execute("DROP INDEX auth_chains_link_2_idx")
    op.execute("DROP INDEX auth_chains_link_1_idx")
