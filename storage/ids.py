"""Names for the ids and positions of this package, so that a type checker keeps them apart.

Text at the border (what the Matrix protocol calls them), integers inside (what the tables call
them).
"""

from typing import NewType

RoomId = NewType("RoomId", str)  # "!opaque:server", or "!" + hash from room version 12
EventId = NewType("EventId", str)  # "$opaque:server" in versions 1 and 2, "$" + hash from 3
UserId = NewType("UserId", str)  # "@localpart:server"
ServerName = NewType("ServerName", str)  # host, optionally with ":port"

EventNid = NewType("EventNid", int)  # of an event held, or referenced but missing; never changes
RoomNid = NewType("RoomNid", int)
StateKeyNid = NewType("StateKeyNid", int)  # of an interned (type, state_key)
PrincipalNid = NewType("PrincipalNid", int)  # of an interned user or server
StateGroup = NewType("StateGroup", int)  # of one immutable state
Audience = NewType(
    "Audience", int
)  # of one combination of history visibility and memberships, increasing per room
StreamOrdering = NewType("StreamOrdering", int)  # order of arrival, unique in the deployment
TopologicalOrdering = NewType(
    "TopologicalOrdering", int
)  # causal order in a room, 1 for the create event

StateKey = tuple[str, str]  # (type, state_key)


def server_name_of(identifier: str) -> ServerName:
    """The server of a user, room or event id: what follows the first ":".

    Empty where the id has none (event ids from room version 3, room ids from 12).
    """
    return ServerName(identifier.partition(":")[2])
