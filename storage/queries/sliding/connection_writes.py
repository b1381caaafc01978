"""Writes of the states of connections (connection.py), each in a transaction.

A new connection takes two statements. The first one locks, so the second one has a snapshot in
which no other request is writing.

A new state takes one statement. It writes only if the connection still has the ``last_number`` that
the request has read. Each write of a connection increases that number. So nothing else was written
to the connection since the request, and the snapshot of the statement has all its rows. Without a
comparison the statement could wait for another request, and then miss the rows of that one. If the
number is another one, the write is repeated after a statement that locks and reads the connection.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import DatabaseConflict
from storage.queries.sliding.connection import (
    ClientRoom,
    ClientRoomRow,
    ConnectionColumnsRow,
    ConnectionKey,
    ConnectionState,
)
from storage.queries.sliding.required_state import Required, printed

SQL_OF_DEVICE: Final[LiteralString] = """
SELECT c.connection_nid, c.conn_id, c.used_ts
FROM sliding_connections c
WHERE c.principal_nid = (SELECT principal_nid FROM principals WHERE name = $1::text)
    AND c.device_id = $2::text
ORDER BY c.connection_nid
FOR UPDATE OF c
"""

SQL_OPEN: Final[LiteralString] = """
WITH
known_principal AS (
    SELECT principal_nid FROM principals WHERE name = $1::text
),
new_principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT nextval('principal_nids'), $1::text
    WHERE NOT EXISTS (SELECT FROM known_principal)
    RETURNING principal_nid
),
opened AS (  -- in place of the locked one of its key. Of another one: no row
    INSERT INTO sliding_connections AS c (connection_nid, base, last_number, used_ts, principal_nid,
        device_id, conn_id, unconfirmed, required_states)
    SELECT nextval('sliding_connection_nids'), 1, 1, $4::bigint, principal_nid, $2::text, $3::text,
        '{}', $5::text[]
    FROM (SELECT * FROM known_principal UNION ALL SELECT * FROM new_principal) AS p
    ON CONFLICT (principal_nid, device_id, conn_id) DO UPDATE
        SET connection_nid = EXCLUDED.connection_nid, base = 1, last_number = 1,
            used_ts = EXCLUDED.used_ts, unconfirmed = '{}',
            required_states = EXCLUDED.required_states
        WHERE c.connection_nid = ANY($6::bigint[])
    RETURNING connection_nid
),
too_many AS (
    DELETE FROM sliding_connections
    WHERE connection_nid = ANY($7::bigint[])
),
gone AS (
    DELETE FROM sliding_rooms
    WHERE connection_nid = ANY($6::bigint[] || $7::bigint[])
),
sent AS (
    INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
        account_data_upto, timeline_limit, required_state, is_direct)
    SELECT o.connection_nid, 1, r.*
    FROM opened o
    CROSS JOIN unnest($8::int[], $9::bigint[], $10::bigint[], $11::bigint[], $12::int[],
        $13::int[], $14::boolean[]) AS r
)
SELECT connection_nid
FROM opened
"""

SQL_LOCK: Final[LiteralString] = """
SELECT base, last_number, unconfirmed, required_states
FROM sliding_connections
WHERE connection_nid = $1::bigint AND (base = $2::bigint OR $2::bigint = ANY(unconfirmed))
FOR UPDATE
"""

SQL_WRITE_STATE: Final[LiteralString] = """
WITH
connection AS (  -- the other parts depend on its row
    UPDATE sliding_connections
    SET base = $2::bigint, last_number = last_number + 1, unconfirmed = $4::bigint[],
        used_ts = $5::bigint, required_states = COALESCE($6::text[], required_states)
    WHERE connection_nid = $1::bigint AND last_number = $3::bigint
    RETURNING last_number
),
room AS MATERIALIZED (
    SELECT *
    FROM unnest($8::int[], $9::bigint[], $10::bigint[], $11::bigint[], $12::int[], $13::int[],
            $14::boolean[])
        AS r (room_nid, sent_upto, receipts_upto, account_data_upto, timeline_limit, required_state,
            is_direct)
),
dropped AS (  -- states that nobody has: rare, so it may read all rows of the connection
    DELETE FROM sliding_rooms
    WHERE connection_nid = $1::bigint AND number = ANY($7::bigint[])
        AND cardinality($7::bigint[]) > 0 AND EXISTS (SELECT FROM connection)
),
superseded AS (
    DELETE FROM sliding_rooms s
    USING room
    WHERE s.connection_nid = $1::bigint AND s.room_nid = room.room_nid
        AND s.number <> ALL($7::bigint[]) AND s.number < (
        SELECT max(l.number)
        FROM sliding_rooms l
        WHERE l.connection_nid = $1::bigint AND l.room_nid = room.room_nid
            AND l.number <= $2::bigint AND l.number <> ALL($7::bigint[])
    ) AND EXISTS (SELECT FROM connection)
),
sent AS (
    INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
        account_data_upto, timeline_limit, required_state, is_direct)
    SELECT $1::bigint, connection.last_number, room.*
    FROM connection
    CROSS JOIN room
)
SELECT last_number
FROM connection
"""

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
    known = await conn.fetch(SQL_OF_DEVICE, key.user_id, key.device_id, row=OpenConnectionRow)
    replaced = [row.connection_nid for row in known if row.conn_id == key.conn_id]
    others = sorted(
        (row for row in known if row.conn_id != key.conn_id),
        key=lambda row: (row.used_ts, row.connection_nid),
    )
    too_many = others[: max(0, len(others) - connections_max + 1)]
    sets = list(dict.fromkeys(printed(room.required) for room in rooms.values()))
    given = now_ms, sets, replaced, [row.connection_nid for row in too_many]
    nid = await conn.fetchval(SQL_OPEN, *key, *given, *_columns(rooms, sets))
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
    known: ConnectionColumnsRow,
    rooms: Mapping[int, ClientRoom],
    now_ms: int,
) -> int | None:
    printed_sets = (printed(one.required) for one in rooms.values())
    sets = list(dict.fromkeys((*known.required_states, *printed_sets)))
    if len(sets) > REQUIRED_STATES_MAX:
        return None
    kept = _kept(known, state.number)
    dropped = [one for one in known.unconfirmed if one not in kept and one != state.number]
    unconfirmed = [*kept, known.last_number + 1]
    changed_sets = sets if len(sets) > len(known.required_states) else None
    given = state.number, known.last_number, unconfirmed, now_ms, changed_sets, dropped
    found = await conn.fetchval(SQL_WRITE_STATE, state.nid, *given, *_columns(rooms, sets))
    return None if found is None else int(found)


def _kept(known: ConnectionColumnsRow, number: int) -> Sequence[int]:
    """Return the unconfirmed states that stay valid when there is another one on top of one."""
    return known.unconfirmed[1 - UNCONFIRMED_MAX :] if number == known.base else []


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
