"""The snapshot of a request before rooms are read."""

from dataclasses import dataclass

from storage.queries.sliding.connection import ClientRooms, ConnectionState
from storage.queries.sliding.memory import SlidingMemory
from storage.queries.sliding.room_lists import RoomList
from storage.queries.sliding.selection import PreparedRequest
from storage.queries.sync.changed_rooms import ChangeSnapshot
from storage.streams import VectorPosition


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request in a snapshot.

    ``state`` and ``since`` are None for a new connection. ``sent`` are the rooms that the client
    has. ``direct`` are the ids in the account data m.direct.
    """

    request: PreparedRequest
    memory: SlidingMemory
    snapshot: ChangeSnapshot
    state: ConnectionState | None
    since: VectorPosition | None
    sent: ClientRooms
    room_list: RoomList
    direct: frozenset[str]

    def changed_keys(self, stream: str) -> set[str] | None:
        """Return the keys with facts that the client does not have. None: unknown."""
        upto = self.snapshot.token.position(stream)
        if upto is None:
            return set()
        after = self.request.extension_position(stream)
        return self.memory.followed.changed_since(stream, after, upto)

    def concerns_user(self, stream: str) -> bool:
        """Return whether there may be facts of the user that the client does not have."""
        keys = self.changed_keys(stream)
        return keys is None or self.request.user_id in keys
