"""Find the events in time order: those that an index of times can leave out.

The live events of a room have two orders, that of the stream and that of `origin_server_ts`, which
mostly agree. An event is in time order if its time is larger than that of each such event before
it. The search for a time finds these by their stream positions
(storage/queries/timestamp_to_event.py). Only the others are in `events_out_of_order_idx`:

    stream position     11   12   13   14   15
    origin_server_ts    60   70   65   70   90
    in_order_ts          -    -   70   70    -

An event takes part when it takes its stream position, so a later change of the room moves none.
Deletions need no care either. History is never in time order, nor is a refused event: its sender
may not be in the room. Neither is an event from the future (`AHEAD_MS_MAX`).
"""

from storage.persist.model.change_set import ChangeSet
from storage.persist.model.row_changes import RoomChanges
from storage.persist.model.rows import EventRow


def note_time(change_set: ChangeSet, room: RoomChanges, row: EventRow) -> None:
    """Record whether an event that takes the next stream position is in time order."""
    if (
        room.in_order_ts < row.origin_server_ts <= change_set.in_order_ts_max
        and row.accepted
        and not row.backfilled
    ):
        room.in_order_ts = row.origin_server_ts
    else:
        change_set.events.out_of_order[row.event_nid] = room.in_order_ts
