"""/sync: what is new to a user, in at most three statements within one snapshot, whatever the number of rooms.

1. positions.py   how far the streams are: the answer's next_batch; candidates.py: with which rooms can have changed, as remembered
2. rooms.py       which rooms have something to tell, and their timelines
3. state.py       their state at the start and at the end of the timeline, whole or as what changed, if it did; and what stripped.py makes the
                  stripped state of: what invited and knocking users are shown of a room

answer.py puts them together, results.py is what comes out, waiting.py is the long poll. Where nothing is new as far as a process has heard,
it asks for the positions alone first; where only timelines have gone on, for those, with the positions. One statement is a snapshot without a
transaction. If there is more to tell after all, it is asked for in a snapshot of several: so a look takes four statements at most.
"""

from storage.queries.sync.answer import Asked, brief, is_brief, is_quiet, look, quiet, sync
from storage.queries.sync.candidates import Memory
from storage.queries.sync.results import InvitedRoom, JoinedRoom, KnockedRoom, LeftRoom, RoomSummary, Sync, Timeline
from storage.queries.sync.waiting import Look, until_news

__all__ = [
    "Asked",
    "InvitedRoom",
    "JoinedRoom",
    "KnockedRoom",
    "LeftRoom",
    "Look",
    "Memory",
    "RoomSummary",
    "Sync",
    "Timeline",
    "brief",
    "is_brief",
    "is_quiet",
    "look",
    "quiet",
    "sync",
    "until_news",
]
