"""Names for the ids and positions of this package, so that a type checker keeps them apart.

Text ids are those of the Matrix protocol. Integer ids (nids) are those of the tables.
"""

from typing import NewType

RoomId = NewType("RoomId", str)  # "!opaque:server", or "!" + hash from room version 12
EventId = NewType("EventId", str)  # "$opaque:server" in versions 1 and 2, "$" + hash from 3
UserId = NewType("UserId", str)  # "@localpart:server"
ServerName = NewType("ServerName", str)  # host, optionally with ":port"

# of a stored event, or one that is referenced but missing; never changes
EventNid = NewType("EventNid", int)
RoomNid = NewType("RoomNid", int)
StateKeyNid = NewType("StateKeyNid", int)  # of an interned (type, state_key)
PrincipalNid = NewType("PrincipalNid", int)  # of an interned user or server
StateGroup = NewType("StateGroup", int)  # of one immutable state
# of one combination of history visibility and memberships, increasing per room
Audience = NewType("Audience", int)
StreamOrdering = NewType("StreamOrdering", int)  # order of arrival, unique in the deployment
# causal order in a room, 1 for the create event
TopologicalOrdering = NewType("TopologicalOrdering", int)

StateKey = tuple[str, str]  # (type, state_key)


def server_name_of(identifier: str) -> ServerName:
    """Return the server of a user, room or event id: the part after the first ":".

    Return "" where the id has none (event ids from room version 3, room ids from 12).
    """
    return ServerName(identifier.partition(":")[2])
