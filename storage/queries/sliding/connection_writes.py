"""Writes of the states of connections (connection.py), each in a transaction of two statements.

The first one locks. So the second one has a snapshot in which no other request is writing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import DatabaseConflict
from storage.queries.sliding.connection import ClientRoom, ClientRoomRow, ConnectionKey
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
connection AS (
    UPDATE sliding_connections
    SET base = $2::bigint, last_number = $3::bigint, unconfirmed = $4::bigint[],
        used_ts = $5::bigint, required_states = COALESCE($6::text[], required_states)
    WHERE connection_nid = $1::bigint
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
        AND cardinality($7::bigint[]) > 0
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
    )
)
INSERT INTO sliding_rooms (connection_nid, number, room_nid, sent_upto, receipts_upto,
    account_data_upto, timeline_limit, required_state, is_direct)
SELECT $1::bigint, $3::bigint, room.*
FROM room
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


class LockedConnectionRow(NamedTuple):
    """The columns of `sliding_connections` that a new state changes."""

    base: int
    last_number: int
    unconfirmed: list[int]
    required_states: list[str]

    def unconfirmed_on(self, number: int) -> list[int]:
        """Return the states that stay valid when there is another one on top of this one."""
        return self.unconfirmed[1 - UNCONFIRMED_MAX :] if number == self.base else []


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
    conn: Connection, nid: int, number: int, rooms: Mapping[int, ClientRoom], *, now_ms: int
) -> int | None:
    """Write changed rooms on top of a state, in a transaction; return the number of the new state.

    None: the state is not valid any more.

    The first statement locks the connection, so the second one has a snapshot of its own in which
    no other request is writing.
    """
    known = await conn.fetchrow(SQL_LOCK, nid, number, row=LockedConnectionRow)
    if known is None:
        return None
    sets = dict.fromkeys(
        (*known.required_states, *(printed(one.required) for one in rooms.values()))
    )
    if len(sets) > REQUIRED_STATES_MAX:
        return None
    new = known.last_number + 1
    kept = known.unconfirmed_on(number)
    dropped = [one for one in known.unconfirmed if one not in kept and one != number]
    changed_sets = list(sets) if len(sets) > len(known.required_states) else None
    given = number, new, [*kept, new], now_ms, changed_sets, dropped
    await conn.execute(SQL_WRITE_STATE, nid, *given, *_columns(rooms, list(sets)))
    return new


async def note_use(conn: Connection, nid: int, now_ms: int) -> None:
    """Record that a connection is in use."""
    await conn.execute(SQL_USE, nid, now_ms)


def _columns(rooms: Mapping[int, ClientRoom], sets: Sequence[str]) -> list[list[Any]]:
    """Return the columns of the rows of these rooms."""
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
