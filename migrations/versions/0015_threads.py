"""Add two indexes of the replies in threads: for the threads of a room, and for unread counts."""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0015"
down_revision: Final = "0014"
phase: Final[Phase] = "pre"


def upgrade() -> None:
    index_concurrently(
        "events_thread_idx",
        "ON events (room_nid, topological_ordering, stream_ordering) INCLUDE (relates_to)"
        " WHERE rel_type_nid = 22 AND NOT outlier",
    )
    index_concurrently(
        "events_thread_stream_idx",
        "ON events (room_nid, stream_ordering)"
        " WHERE rel_type_nid = 22 AND NOT outlier AND NOT backfilled",
    )
    op.execute(
        "COMMENT ON INDEX events_thread_idx IS 'Serves: the threads of a room, latest reply first"
        " (storage/queries/threads.py). It has the replies only.'"
    )
    op.execute(
        "COMMENT ON INDEX events_thread_stream_idx IS 'Serves: the unread replies in the threads of"
        " a room (storage/queries/unread.py).'"
    )


def downgrade() -> None:
    op.execute("DROP INDEX events_thread_stream_idx")
    op.execute("DROP INDEX events_thread_idx")
