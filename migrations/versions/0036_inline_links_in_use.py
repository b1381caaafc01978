"""Use the links in the positions: code that reads the table of links alone would miss them.

Chains that were begun before keep their numbers, and their links stay in the table.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0036"
down_revision: Final = "0035"
phase: Final[Phase] = "post"


def upgrade() -> None:
    op.execute("ALTER TABLE auth_chains DROP CONSTRAINT auth_chains_chain_nid_sequence_number_key")


def downgrade() -> None:
    """Build what the release before needs; a later step down writes the numbers and links."""
    index_concurrently(
        "auth_chains_chain_nid_sequence_number_key",
        "ON auth_chains (chain_nid, sequence_number) INCLUDE (event_nid)",
        unique=True,
    )
    op.execute(
        "ALTER TABLE auth_chains ADD CONSTRAINT auth_chains_chain_nid_sequence_number_key"
        " UNIQUE USING INDEX auth_chains_chain_nid_sequence_number_key"
    )
    op.execute(
        "COMMENT ON CONSTRAINT auth_chains_chain_nid_sequence_number_key ON auth_chains IS"
        " 'Serves: the events of a range of a chain.'"
    )
