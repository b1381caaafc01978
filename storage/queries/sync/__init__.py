"""/sync: the changes for a user, by at most three statements in one snapshot.

1. changed_rooms.py: the positions of the streams, for next_batch, and the rooms that can
   have changed, from caches.
2. rooms.py: the rooms that have changed, and their timelines.
3. state.py: the state at the start and at the end of the timelines, whole or as changes. Sliding
   sync has parts of it as well. It also reads the events that become stripped state.

response.py puts them together, included.py adds receipts, account data,
to-device messages and counts, types.py has the results, changed_rooms.py the long poll. Where a
process has followed no change, it requests the positions alone first. Where only timelines have new
events, it requests those with the positions. One statement is a snapshot without a transaction. If
there are more changes after all, they are read in a snapshot of several statements. So a look takes
at most four.
"""

from storage.queries.sync.changed_rooms import PollResult, SyncMemory, poll_until_changed
from storage.queries.sync.response import (
    SyncRequest,
    has_no_changes,
    is_timeline_only,
    no_changes,
    poll,
    sync,
    timeline_only,
)
from storage.queries.sync.types import (
    InvitedRoom,
    JoinedRoom,
    KnockedRoom,
    LeftRoom,
    RoomSummary,
    Sync,
    Timeline,
)

__all__ = [
    "InvitedRoom",
    "JoinedRoom",
    "KnockedRoom",
    "LeftRoom",
    "PollResult",
    "RoomSummary",
    "Sync",
    "SyncMemory",
    "SyncRequest",
    "Timeline",
    "has_no_changes",
    "is_timeline_only",
    "no_changes",
    "poll",
    "poll_until_changed",
    "sync",
    "timeline_only",
]
