"""Names for the ids of the Matrix protocol, so that a type checker keeps them apart."""

import sys
from collections.abc import Callable
from typing import Final, NewType

RoomId = NewType("RoomId", str)  # "!opaque:server", or "!" + hash from room version 12
EventId = NewType("EventId", str)  # "$opaque:server" in versions 1 and 2, "$" + hash from 3
UserId = NewType("UserId", str)  # "@localpart:server"
ServerName = NewType("ServerName", str)  # host, optionally with ":port"

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
