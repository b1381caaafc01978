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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString, NamedTuple, TypeAlias

from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import DatabaseConflict
from storage.ids import UserId
from storage.persistent_map import Map, changed
from storage.queries.sliding.room_state import Required, printed, read
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
        client_rooms = changed(
            NO_ROOMS, {nid: shared.setdefault(room, room) for nid, room in rooms}
        )
        self.states.fill(entry, client_rooms)
        return client_rooms


# --------------------------------------------------------------------------------------------------
# Writes of the states of connections (connection.py), each in a transaction.
#
# A new connection takes two statements. The first one locks, so the second one has a snapshot in
# which no other request is writing.
#
# A new state takes one statement. It writes only if the connection still has the ``last_number``
# that the request has read. Each write of a connection increases that number. So nothing else was
# written to the connection since the request, and the snapshot of the statement has all its rows.
# Without a comparison the statement could wait for another request, and then miss the rows of that
# one. If the number is another one, the write is repeated after a statement that locks and reads
# the connection.

SQL_OF_DEVICE: Final[LiteralString] = """
SELECT c.connection_nid, c.conn_id, c.used_ts
FROM sliding_connections c
WHERE c.principal_nid = (SELECT principal_nid FROM principals WHERE name = $1::text)
    AND c.device_id = $2::text
ORDER BY c.connection_nid
FOR UPDATE OF c
"""

ROOMS_VALUES: Final[dict[str, str]] = {
    "room_nids": "int[]",
    "sent_upto": "bigint[]",
    "receipts_upto": "bigint[]",
    "account_data_upto": "bigint[]",
    "timeline_limits": "int[]",
    "required_indexes": "int[]",
    "is_direct": "boolean[]",
}
"""The columns of `ClientRoomRow`, a list for each."""

SQL_OPEN: Final[LiteralString] = compose(
    """
WITH
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = :user_id
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), :user_id
    WHERE NOT EXISTS (SELECT FROM known_principal)
    RETURNING principal_nid
),
opened AS (  -- in place of the locked one of its key. Of another one: no row
    INSERT INTO sliding_connections AS c (connection_nid, base, last_number, used_ts, principal_nid,
        device_id, conn_id, unconfirmed, required_states)
    SELECT nextval('sliding_connection_nids'), 1, 1, :now_ms, principal_nid, :device_id, :conn_id,
        '{}', :required_states
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    ON CONFLICT (principal_nid, device_id, conn_id) DO UPDATE
        SET connection_nid = EXCLUDED.connection_nid, base = 1, last_number = 1,
            used_ts = EXCLUDED.used_ts, unconfirmed = '{}',
            required_states = EXCLUDED.required_states
        WHERE c.connection_nid = ANY(:replaced)
    RETURNING connection_nid
),
too_many AS (
    DELETE FROM sliding_connections
    WHERE connection_nid = ANY(:too_many)
),
gone AS (
    DELETE FROM sliding_rooms
    WHERE connection_nid = ANY(:replaced || :too_many)
),
sent AS (
    INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
        account_data_upto, timeline_limit, required_state, is_direct)
    SELECT o.connection_nid, 1, r.*
    FROM opened o
    CROSS JOIN unnest(:room_nids, :sent_upto, :receipts_upto, :account_data_upto, :timeline_limits,
        :required_indexes, :is_direct) AS r
)
SELECT connection_nid
FROM opened
""",
    user_id="text",
    device_id="text",
    conn_id="text",
    now_ms="bigint",
    required_states="text[]",
    replaced="bigint[]",
    too_many="bigint[]",
    **ROOMS_VALUES,
).sql

SQL_LOCK: Final[LiteralString] = """
SELECT base, last_number, unconfirmed, required_states
FROM sliding_connections
WHERE connection_nid = $1::bigint AND (base = $2::bigint OR $2::bigint = ANY(unconfirmed))
FOR UPDATE
"""

SQL_WRITE_STATE: Final[LiteralString] = compose(
    """
WITH
connection AS (  -- the other parts depend on its row
    UPDATE sliding_connections
    SET base = :base, last_number = last_number + 1, unconfirmed = :unconfirmed,
        used_ts = :now_ms, required_states = COALESCE(:required_states, required_states)
    WHERE connection_nid = :connection_nid AND last_number = :last_number
    RETURNING last_number
),
room AS MATERIALIZED (
    SELECT *
    FROM unnest(:room_nids, :sent_upto, :receipts_upto, :account_data_upto, :timeline_limits,
            :required_indexes, :is_direct)
        AS r (room_nid, sent_upto, receipts_upto, account_data_upto, timeline_limit, required_state,
            is_direct)
),
dropped AS (  -- states that nobody has: rare, so it may read all rows of the connection
    DELETE FROM sliding_rooms
    WHERE connection_nid = :connection_nid AND number = ANY(:dropped)
        AND cardinality(:dropped) > 0 AND EXISTS (SELECT FROM connection)
),
superseded AS (
    DELETE FROM sliding_rooms s
    USING room
    WHERE s.connection_nid = :connection_nid AND s.room_nid = room.room_nid
        AND s.number <> ALL(:dropped) AND s.number < (
        SELECT max(l.number)
        FROM sliding_rooms l
        WHERE l.connection_nid = :connection_nid AND l.room_nid = room.room_nid
            AND l.number <= :base AND l.number <> ALL(:dropped)
    ) AND EXISTS (SELECT FROM connection)
),
sent AS (
    INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
        account_data_upto, timeline_limit, required_state, is_direct)
    SELECT :connection_nid, connection.last_number, room.*
    FROM connection
    CROSS JOIN room
)
SELECT last_number
FROM connection
""",
    connection_nid="bigint",
    base="bigint",
    last_number="bigint",
    unconfirmed="bigint[]",
    now_ms="bigint",
    required_states="text[]",
    dropped="bigint[]",
    **ROOMS_VALUES,
).sql

SQL_USE: Final[LiteralString] = """
UPDATE sliding_connections
SET used_ts = $2::bigint
WHERE connection_nid = $1::bigint AND used_ts < $2::bigint
"""

UNCONFIRMED_MAX: Final = 2
REQUIRED_STATES_MAX: Final = 200
"""Distinct values of required_state in a connection: one with more expires."""
USED_PRECISION_MS: Final = 3_600_000


class OpenConnectionRow(NamedTuple):
    """A connection of a device."""

    connection_nid: int
    conn_id: str
    used_ts: int


async def open_connection(
    conn: Connection,
    key: ConnectionKey,
    rooms: Mapping[int, ClientRoom],
    *,
    now_ms: int,
    connections_max: int,
) -> int:
    """Write a new connection in a transaction, in place of the one of its key; return its nid.

    Its state is number 1. The connections of the device that are too many are deleted, those first
    that were not in use for the longest time. `DatabaseConflict` if another request opens the same
    connection.
    """
    open_rows = await conn.fetch(SQL_OF_DEVICE, key.user_id, key.device_id, row=OpenConnectionRow)
    replaced = [row.connection_nid for row in open_rows if row.conn_id == key.conn_id]
    others = sorted(
        (row for row in open_rows if row.conn_id != key.conn_id),
        key=lambda row: (row.used_ts, row.connection_nid),
    )
    too_many = others[: max(0, len(others) - connections_max + 1)]
    sets = list(dict.fromkeys(printed(room.required) for room in rooms.values()))
    arguments = now_ms, sets, replaced, [row.connection_nid for row in too_many]
    nid = await conn.fetchval(SQL_OPEN, *key, *arguments, *_columns(rooms, sets))
    if nid is None:
        raise DatabaseConflict("another request opened the same connection")
    return int(nid)


async def write_state(
    conn: Connection, state: ConnectionState, rooms: Mapping[int, ClientRoom], *, now_ms: int
) -> int | None:
    """Write changed rooms on top of a state, in a transaction; return the number of the new state.

    None: the state is not valid any more.
    """
    number = await _write_on(conn, state, state.columns, rooms, now_ms)
    if number is None:
        columns = await conn.fetchrow(SQL_LOCK, state.nid, state.number, row=ConnectionColumnsRow)
        if columns is not None:
            number = await _write_on(conn, state, columns, rooms, now_ms)
    return number


async def _write_on(
    conn: Connection,
    state: ConnectionState,
    columns: ConnectionColumnsRow,
    rooms: Mapping[int, ClientRoom],
    now_ms: int,
) -> int | None:
    printed_sets = (printed(room.required) for room in rooms.values())
    sets = list(dict.fromkeys((*columns.required_states, *printed_sets)))
    if len(sets) > REQUIRED_STATES_MAX:
        return None
    kept = _kept(columns, state.number)
    dropped = [
        number for number in columns.unconfirmed if number not in kept and number != state.number
    ]
    unconfirmed = [*kept, columns.last_number + 1]
    changed_sets = sets if len(sets) > len(columns.required_states) else None
    arguments = state.number, columns.last_number, unconfirmed, now_ms, changed_sets, dropped
    written = await conn.fetchval(SQL_WRITE_STATE, state.nid, *arguments, *_columns(rooms, sets))
    return None if written is None else int(written)


def _kept(columns: ConnectionColumnsRow, number: int) -> Sequence[int]:
    """Return the unconfirmed states that stay valid when there is another one on top of one."""
    return columns.unconfirmed[1 - UNCONFIRMED_MAX :] if number == columns.base else []


async def note_use(conn: Connection, nid: int, now_ms: int) -> None:
    await conn.execute(SQL_USE, nid, now_ms)


def _columns(rooms: Mapping[int, ClientRoom], sets: Sequence[str]) -> list[list[Any]]:
    index = {text: at for at, text in enumerate(sets, 1)}
    text_of: dict[Required, str] = {}
    rows = [
        (
            nid,
            *room[:4],
            index[text_of.setdefault(room.required, printed(room.required))],
            room.is_direct,
        )
        for nid, room in rooms.items()
    ]
    return [[row[at] for row in rows] for at in range(len(ClientRoomRow._fields))]
