"""/sync: what is new to a user, in at most three statements within one snapshot, whatever the number of rooms.

1. positions.py   how far the streams are: the answer's next_batch; changed_rooms.py: with which rooms can have changed, as remembered
2. rooms.py       which rooms have something to tell, and their timelines
3. state.py       their state at the start and at the end of the timeline, whole or as what changed, if it did; and what stripped_state.py makes the
                  stripped state of: what invited and knocking users are shown of a room

response.py puts them together, types.py is what comes out, long_poll.py is the long poll. Where nothing is new as far as a process has heard,
it asks for the positions alone first; where only timelines have gone on, for those, with the positions. One statement is a snapshot without a
transaction. If there is more to tell after all, it is asked for in a snapshot of several: so a look takes four statements at most.
"""

from storage.queries.sync.changed_rooms import SyncMemory
from storage.queries.sync.long_poll import Look, until_news
from storage.queries.sync.response import SyncRequest, brief, is_brief, is_quiet, look, quiet, sync
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
    "Look",
    "RoomSummary",
    "Sync",
    "SyncMemory",
    "SyncRequest",
    "Timeline",
    "brief",
    "is_brief",
    "is_quiet",
    "look",
    "quiet",
    "sync",
    "until_news",
]
