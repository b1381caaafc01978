"""Names for the ids and positions of this package, so that a type checker keeps them apart.

Text ids are those of the Matrix protocol. Integer ids (nids) are those of the tables.
"""

import sys
from collections.abc import Callable
from typing import Final, NewType

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


def interning(version: tuple[int, int]) -> Callable[[str], str]:
    """Return what makes equal strings one object in a version of Python: `sys.intern`.

    In Python 3.12 it is a function that returns its argument. There, early releases never free an
    interned string (CPython issue 113993), so each event id would stay for ever.
    """
    return _unchanged if version == (3, 12) else sys.intern


def _unchanged(text: str) -> str:
    return text


intern: Final[Callable[[str], str]] = interning(sys.version_info[:2])
"""Make equal strings one object, where that does not keep them for ever."""
