"""Events of other servers: transactions, joins, invites, gaps and backfill; and sending to them.

receiver.py     `Receiver`, the calls; the gaps that earlier transactions have left
remote.py       `Remote` and `MembershipRemote`, the requests to other servers; `ReceiverLimits`,
                the bounds on all work
http_remote.py  `HttpRemote`, these requests over the homeserver's HTTP client
requests.py     requests of one task: limited in time and number, with checked answers; signatures
                of requests, and the published keys
keys.py         a lock for each room, and for each server; `KeyRing`, the verify keys of other
                servers
room_task.py    reading, checking and storing events of one room
gap.py          the gap before new events
joining.py      joins, also with the members omitted, and the request for the rest; the state before
                an event whose parents are missing
invites.py      an invite that another server sends
sender.py       `Sender`, the way of local events to other servers
memberships.py  `Memberships`: join, knock, leave and invite through a server of the room
answering.py    `Responder`, the responses to other servers
"""

from storage.federation.answering import IncompatibleRoomVersion, Responder
from storage.federation.gap import BackfillResult
from storage.federation.http_remote import HttpRemote, HttpRequest
from storage.federation.invites import InviteResult, ShownState
from storage.federation.joining import JoinFault, JoinResult
from storage.federation.memberships import Memberships
from storage.federation.receiver import Receiver
from storage.federation.remote import (
    JsonObject,
    MembershipRemote,
    ReceiverLimits,
    Remote,
    RemoteError,
)
from storage.federation.requests import published_keys
from storage.federation.sender import Sender, SenderLimits

__all__ = [
    "BackfillResult",
    "HttpRemote",
    "HttpRequest",
    "IncompatibleRoomVersion",
    "InviteResult",
    "JoinFault",
    "JoinResult",
    "JsonObject",
    "MembershipRemote",
    "Memberships",
    "Receiver",
    "ReceiverLimits",
    "Remote",
    "RemoteError",
    "Responder",
    "Sender",
    "SenderLimits",
    "ShownState",
    "published_keys",
]
