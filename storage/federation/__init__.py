"""Events of other servers: transactions, joins, invites, gaps and backfill; and sending to them.

receiver.py      `Receiver`, the calls
remote.py        `Remote`, the requests that the homeserver implements
limits.py        `ReceiverLimits`, the bounds on all work
requests.py      requests of one task: limited in time and number, with checked answers
in_turns.py      long loops that let other tasks run
keyed_locks.py   a lock for each room, and for each server
keys.py          `KeyRing`, the verify keys of other servers
room_task.py     reading, checking and storing events of one room
gap.py           the gap before new events
state_fetch.py   the state before an event whose parents are missing
joining.py, invites.py, backfilling.py   one call each
sender.py        `Sender`, the way of local events to other servers
"""

from storage.federation.backfilling import BackfillResult
from storage.federation.invites import InviteResult
from storage.federation.joining import JoinFault, JoinResult
from storage.federation.limits import ReceiverLimits
from storage.federation.receiver import Receiver
from storage.federation.remote import JsonObject, Remote, RemoteError
from storage.federation.sender import Sender, SenderLimits

__all__ = [
    "BackfillResult",
    "InviteResult",
    "JoinFault",
    "JoinResult",
    "JsonObject",
    "Receiver",
    "ReceiverLimits",
    "Remote",
    "RemoteError",
    "Sender",
    "SenderLimits",
]
