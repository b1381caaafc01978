"""The state of a connection: which rooms it was sent, and as of where.

A `pos` names a connection, a number of its states, and positions. A room of a state is live if the
client has everything up to those positions. So most responses change no state, and write nothing. A
response that does gets a new number, on top of the state of its request:

    request without pos             state 1: the base
    request with 1, answered twice  states 2 and 3, unconfirmed: the client has one of them, or 1
    request with 3                  3 is the base from now on; the rows of 2 are deleted

A state is the rows up to the base, replaced by those of its own number. It never changes once it is
written, and so it is cached by connection and number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, LiteralString, NamedTuple, TypeAlias

from storage.database.connection import Connection
from storage.ids import UserId
from storage.persistent_map import Map, changed
from storage.queries.sliding.required_state import Required, read
from storage.streams.caches import Cache, Ticket

SQL_SENT_ROOMS: Final[LiteralString] = """
SELECT DISTINCT ON (r.room_nid) r.room_nid, r.sent_upto, r.receipts_upto, r.account_data_upto,
    r.timeline_limit, r.required_state, r.is_direct
FROM sliding_rooms r
WHERE r.connection_nid = $1::bigint AND (r.number <= $2::bigint OR r.number = $3::bigint)
ORDER BY r.room_nid, r.number DESC
"""


class ClientRoom(NamedTuple):
    """A room that a connection was sent; the columns of `sliding_rooms`.

    A position is None where the client has everything up to its `pos`.
    """

    sent_upto: int | None
    receipts_upto: int | None
    account_data_upto: int | None
    timeline_limit: int
    required: Required
    is_direct: bool


if TYPE_CHECKING:
    ClientRooms: TypeAlias = Map[int, ClientRoom]
else:
    ClientRooms = Map
"""The state of a connection: rooms by nid."""

NO_ROOMS: Final["ClientRooms"] = Map()


class ClientRoomRow(NamedTuple):
    """A row of `sliding_rooms`; `required_state` is an index of the connection's values."""

    room_nid: int
    sent_upto: int | None
    receipts_upto: int | None
    account_data_upto: int | None
    timeline_limit: int
    required_state: int
    is_direct: bool


class ConnectionKey(NamedTuple):
    """The client's side of a connection."""

    user_id: UserId
    device_id: str
    conn_id: str


class ConnectionColumnsRow(NamedTuple):
    """The columns of `sliding_connections` that a new state changes."""

    base: int
    last_number: int
    unconfirmed: Sequence[int]
    required_states: Sequence[str]


NOT_READ: Final = ConnectionColumnsRow(0, 0, (), ())


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """A state of a connection that the database has confirmed to be valid."""

    nid: int
    number: int
    used_ts: int
    columns: ConnectionColumnsRow = NOT_READ


class Connections:
    """The states of connections that a process has read or written.

    ``limit`` is the number of their rooms. An entry is never stale. A database that was replaced
    may use the same numbers again, so then all are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self.states: Cache[ClientRooms] = Cache("sliding", limit, lambda rooms: 1 + len(rooms))

    def cached(self, nid: int, number: int) -> "ClientRooms | None":
        entry = self.states.get(str(nid), str(number))
        return None if isinstance(entry, Ticket) else entry

    def forget(self) -> None:
        """Forget all states: the database was replaced."""
        self.states.forget(None)

    def keep(self, nid: int, number: int, rooms: "ClientRooms") -> None:
        """Store a state."""
        self.states.fill(self.states.ticket(str(nid), str(number)), rooms)

    async def rooms(self, conn: Connection, state: ConnectionState) -> "ClientRooms":
        """Return the rooms of a state, by a statement where they are not cached."""
        entry = self.states.get(str(state.nid), str(state.number))
        if not isinstance(entry, Ticket):
            return entry
        rows = await conn.fetch(
            SQL_SENT_ROOMS, state.nid, state.columns.base, state.number, row=ClientRoomRow
        )
        sets = [read(text) for text in state.columns.required_states]
        shared: dict[ClientRoom, ClientRoom] = {}
        rooms = (
            (row.room_nid, ClientRoom(*row[1:5], sets[row.required_state - 1], row.is_direct))
            for row in rows
        )
        found = changed(NO_ROOMS, {nid: shared.setdefault(room, room) for nid, room in rooms})
        self.states.fill(entry, found)
        return found
