"""Encode the bytes of events: code that reads the bytes alone would take them for damaged.

Older events stay as they are, and are read.
"""

from typing import Final

from storage.database.migration_steps import Phase

revision: Final = "0025"
down_revision: Final = "0024"
phase: Final[Phase] = "post"


def upgrade() -> None:
    """Change nothing: from this revision on, writers encode new events."""


def downgrade() -> None:
    """Decode all events."""
    raise NotImplementedError
