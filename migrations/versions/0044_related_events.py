"""Replace the index of replies in threads: unread counts also need the events that relate to them.

Code of earlier releases uses the new index as it used the old one: it has all replies.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0044"
down_revision: Final = "0040"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently(
        "events_related_stream_idx",
        "ON events (room_nid, stream_ordering)"
        " WHERE rel_type_nid NOT IN (19, 20) AND NOT outlier AND NOT backfilled",
    )
    op.execute(
        "COMMENT ON INDEX events_related_stream_idx IS 'Serves: the unread replies in the threads"
        " of a room, and what relates to them (storage/queries/unread.py). It has neither edits nor"
        " annotations.'"
    )
    op.execute("DROP INDEX events_thread_stream_idx")


def downgrade() -> None:
    index_concurrently(
        "events_thread_stream_idx",
        "ON events (room_nid, stream_ordering)"
        " WHERE rel_type_nid = 22 AND NOT outlier AND NOT backfilled",
    )
    op.execute(
        "COMMENT ON INDEX events_thread_stream_idx IS 'Serves: the unread replies in the threads of"
        " a room (storage/queries/unread.py).'"
    )
    op.execute("DROP INDEX events_related_stream_idx")
