"""Use the narrow form of events, and drop the index by time, which would have all of them.

Code that reads `depth` alone, or needs the index, would not find what is left out now. Events that
are stored already keep their form, and their entries in the index that replaces the dropped one. To
narrow them, their rows would have to be rewritten.
"""

from typing import Final

from alembic import op

from storage.database.migration_steps import Phase, index_concurrently

revision: Final = "0037"
down_revision: Final = "0036"
phase: Final[Phase] = "post"

# those that are in the index already also say which time was reached, which no longer holds
ALL_OUT_OF_ORDER: Final = """
UPDATE events
SET in_order_ts = DEFAULT
WHERE in_order_ts IS DISTINCT FROM -9223372036854775808
"""


def upgrade() -> None:
    op.execute("ALTER TABLE events VALIDATE CONSTRAINT events_depth_check")
    op.execute("DROP INDEX events_room_time_idx")


def downgrade() -> None:
    """Build the index again, and put all events into the other one.

    The code of the release before does not know which events are in time order.
    """
    index_concurrently(
        "events_room_time_idx", "ON events (room_nid, origin_server_ts) WHERE NOT outlier"
    )
    op.execute(
        "COMMENT ON INDEX events_room_time_idx IS 'Serves: the event nearest to a time"
        " (storage/queries/timestamp_to_event.py).'"
    )
    op.execute(ALL_OUT_OF_ORDER)
