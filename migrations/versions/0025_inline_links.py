"""Add columns for the links of the chain cover, and an index that lacks the first events.

The code of this release reads both forms. It writes the links into the positions after revision
0036.
"""

from pathlib import Path
from typing import Final

from storage.database.migration_steps import Phase, index_concurrently, run_script

revision: Final = "0025"
down_revision: Final = "0024"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently(
        "auth_chains_position_key",
        "ON auth_chains (chain_nid, sequence_number) WHERE chain_nid IS NOT NULL",
        unique=True,
    )
    run_script(Path(__file__).with_suffix(".sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    script = Path(__file__).with_name("0025_inline_links_down.sql")
    run_script(script.read_text(encoding="utf-8"))
