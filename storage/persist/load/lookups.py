"""Lookups that only the database can do, one statement each: see `Answers.answer`."""

from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, EVENTS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill, transposed
from storage.ids import EventId, RoomId, UserId
from storage.persist.model.caches import BLOCK_LENGTHS, NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.results import (
    AppendResult,
    KnownTransaction,
    Transaction,
    TransactionKey,
)
from storage.persist.model.rows import EventRow

EVENT_ROW: Final = EVENTS.loaded("event", EventRow._fields)

SQL_EVENTS_FROM_ORDER: Final[LiteralString] = compose(
    """
SELECT :event.columns
FROM events
WHERE room_nid = $1::int
    AND topological_ordering >= $2::bigint
    AND NOT outlier
ORDER BY topological_ordering, stream_ordering
LIMIT $3::bigint
""",
    EVENT_ROW,
).sql

SQL_DIGEST: Final[LiteralString] = """
SELECT g.state_group
FROM (  -- by the digest first: the room may have many groups
    SELECT state_group, room_nid FROM state_groups WHERE digest = $2::bigint OFFSET 0
) AS g
WHERE g.room_nid = $1::int
ORDER BY g.state_group
"""

SQL_AUTH_GRAPH: Final[LiteralString] = compose(
    """
WITH RECURSIVE chain AS (
    SELECT event_nid, :auth_nids.call AS auth_events
    FROM events
    WHERE event_nid = ANY($1::bigint[])
    UNION
    SELECT e.event_nid, :auth_nids.call(e)
    FROM chain c
    CROSS JOIN unnest(c.auth_events) AS parent (event_nid)
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = parent.event_nid OFFSET 0) AS e
)
SELECT event_nid, auth_events
FROM chain
""",
    AUTH_NIDS,
).sql

SQL_REACHING: Final[LiteralString] = """
SELECT x.event_nid AS reached_nid, r.event_nid, r.state_key_nid
FROM unnest($1::bigint[]) AS x (event_nid)
CROSS JOIN LATERAL (SELECT * FROM auth_chains WHERE event_nid = x.event_nid OFFSET 0) AS p
CROSS JOIN LATERAL (
    WITH RECURSIVE up AS (  -- the chains that reach it, and from which number on
        SELECT COALESCE(p.chain_nid, -p.event_nid) AS chain_nid, p.sequence_number
        UNION
        SELECT l.chain_nid_linking, l.place
        FROM up
        CROSS JOIN LATERAL linking_to(up.chain_nid, up.sequence_number) AS l
    )
    SELECT a.event_nid, e.state_key_nid
    FROM up
    CROSS JOIN LATERAL chain_rows_from(up.chain_nid, up.sequence_number) AS a
    CROSS JOIN LATERAL (
        SELECT state_key_nid FROM events WHERE event_nid = a.event_nid OFFSET 0
    ) AS e
    WHERE a.event_nid <> x.event_nid
    LIMIT $2::bigint
) AS r
"""

SQL_PARTIAL_JOIN: Final[LiteralString] = """
SELECT join_event_id
FROM partial_rooms
WHERE room_nid = $1::int
"""

SQL_CREATE: Final[LiteralString] = fill("""
SELECT event_id
FROM events
WHERE room_nid = $1::int AND type_nid = {TYPE_CREATE} AND state_key_nid = {KEY_CREATE}
    AND rejected IS NULL
""")

SQL_INVITED: Final[LiteralString] = fill("""
SELECT state_key_nid
FROM events
WHERE event_nid = ANY($1::bigint[]) AND membership = {INVITE}
""")

SQL_MEMBERSHIP: Final[LiteralString] = """
SELECT membership, event_nid
FROM memberships
WHERE room_nid = $1::int AND principal_nid = $2::int
"""

SQL_OUT_OF_BAND: Final[LiteralString] = """
SELECT o.principal_nid, m.membership, o.event_nid
FROM out_of_band_memberships o
CROSS JOIN LATERAL (SELECT membership, event_nid FROM memberships
    WHERE principal_nid = o.principal_nid AND room_nid = o.room_nid OFFSET 0) AS m
WHERE o.room_nid = $1::int AND m.event_nid = o.event_nid
"""

SQL_ROOM_PRINCIPALS: Final[LiteralString] = """
SELECT principal_nid
FROM visibility
WHERE room_nid = $1::int
"""


SQL_JOINED_TO_ANY: Final[LiteralString] = fill("""
SELECT EXISTS (
    SELECT
    FROM unnest($3::text[]) AS wanted (room_id)
    CROSS JOIN (SELECT state_key_nid FROM state_keys
        WHERE type_nid = {TYPE_MEMBER} AND state_key = $1::text OFFSET 0) AS k
    CROSS JOIN (SELECT principal_nid FROM principals WHERE name = $2::text OFFSET 0) AS p
    CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
    CROSS JOIN LATERAL (SELECT membership FROM current_state
        WHERE room_nid = r.room_nid AND state_key_nid = k.state_key_nid OFFSET 0) AS c
    -- the state of a room that this server has left may be out of date
    CROSS JOIN LATERAL (SELECT joined_count FROM visibility
        WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid OFFSET 0) AS v
    WHERE c.membership = {JOIN} AND v.joined_count > 0
)
""")

SQL_INSIDE_ANY: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM unnest($2::text[]) AS wanted (room_id)
    CROSS JOIN (SELECT principal_nid FROM principals WHERE name = $1::text OFFSET 0) AS p
    CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
    CROSS JOIN LATERAL (SELECT joined_count FROM visibility
        WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid OFFSET 0) AS v
    WHERE v.joined_count > 0
)
"""

SQL_LOCAL_MEMBERS: Final[LiteralString] = fill("""
SELECT p.name
FROM visibility v
CROSS JOIN LATERAL (SELECT membership FROM memberships
    WHERE principal_nid = v.principal_nid AND room_nid = v.room_nid OFFSET 0) AS m
CROSS JOIN LATERAL (SELECT name FROM principals
    WHERE principal_nid = v.principal_nid OFFSET 0) AS p
WHERE v.room_nid = $1::int AND m.membership = {JOIN}
ORDER BY v.principal_nid
LIMIT 100
""")


class AuthGraphRow(NamedTuple):
    """An event of the auth graph."""

    event_nid: int
    auth_events: list[int]


class StoredMembershipRow(NamedTuple):
    """A local user's membership in a room, and its event."""

    membership: int
    event_nid: int


class OutOfBandRow(NamedTuple):
    """A membership that came out of band."""

    principal_nid: int
    membership: int
    event_nid: int


class ReachingRow(NamedTuple):
    """An event, an event whose auth chain reaches it, and the state key of that."""

    reached_nid: int
    event_nid: int
    state_key_nid: int


def keep_rows(change_set: ChangeSet, rows: Iterable[EventRow]) -> list[EventRow]:
    """Keep rows from the database, and return them; a row that the change set knows is newer."""
    kept = []
    for row in rows:
        newest = change_set.events.rows.get(row.event_id)
        if newest is None:
            newest = row._replace(
                prev_events=tuple(row.prev_events), auth_events=tuple(row.auth_events)
            )
            change_set.events.rows[row.event_id] = newest
        change_set.events.row_ids[row.event_nid] = row.event_id
        kept.append(newest)
    return kept


async def _digest(conn: Connection, _: ChangeSet, room_nid: int, digest: int) -> list[int]:
    return await conn.fetchvals(SQL_DIGEST, room_nid, digest)


async def _auth_graph(
    conn: Connection, _: ChangeSet, nids: frozenset[int]
) -> dict[int, tuple[int, ...]]:
    return {
        row.event_nid: tuple(row.auth_events)
        for row in await conn.fetch(SQL_AUTH_GRAPH, list(nids), row=AuthGraphRow)
    }


async def _reaching(
    conn: Connection, _: ChangeSet, nids: frozenset[int], limit: int
) -> list[ReachingRow]:
    return await conn.fetch(SQL_REACHING, list(nids), limit, row=ReachingRow)


async def _partial_join(conn: Connection, _: ChangeSet, room_nid: int) -> str | None:
    event_id: str | None = await conn.fetchval(SQL_PARTIAL_JOIN, room_nid)
    return event_id


async def _create(conn: Connection, _: ChangeSet, room_nid: int) -> list[str]:
    return await conn.fetchvals(SQL_CREATE, room_nid)


async def _order(
    conn: Connection, change_set: ChangeSet, room_nid: int, lowest: int, limit: int
) -> list[EventRow]:
    return keep_rows(
        change_set, await conn.fetch(SQL_EVENTS_FROM_ORDER, room_nid, lowest, limit, row=EventRow)
    )


async def _invited(conn: Connection, _: ChangeSet, nids: frozenset[int]) -> list[int]:
    return await conn.fetchvals(SQL_INVITED, list(nids))


async def _room_principals(conn: Connection, _: ChangeSet, room_nid: int) -> list[int]:
    return await conn.fetchvals(SQL_ROOM_PRINCIPALS, room_nid)


async def _membership(
    conn: Connection, _: ChangeSet, room_nid: int, principal_nid: int
) -> StoredMembershipRow | None:
    return await conn.fetchrow(SQL_MEMBERSHIP, room_nid, principal_nid, row=StoredMembershipRow)


async def _out_of_band(conn: Connection, _: ChangeSet, room_nid: int) -> list[OutOfBandRow]:
    return await conn.fetch(SQL_OUT_OF_BAND, room_nid, row=OutOfBandRow)


async def _joined_to_any(
    conn: Connection, _: ChangeSet, user_id: str, server_name: str, room_ids: tuple[str, ...]
) -> bool:
    return bool(await conn.fetchval(SQL_JOINED_TO_ANY, user_id, server_name, list(room_ids)))


async def _inside_any(
    conn: Connection, _: ChangeSet, server_name: str, room_ids: tuple[str, ...]
) -> bool:
    return bool(await conn.fetchval(SQL_INSIDE_ANY, server_name, list(room_ids)))


async def _local_members(conn: Connection, _: ChangeSet, room_nid: int) -> list[str]:
    return await conn.fetchvals(SQL_LOCAL_MEMBERS, room_nid)


LOOKUPS: Final[dict[Hashable, Callable[..., Awaitable[Any]]]] = {
    "digest": _digest,
    "auth_graph": _auth_graph,
    "reaching": _reaching,
    "create": _create,
    "partial_join": _partial_join,
    "order": _order,
    "invited": _invited,
    "principals": _room_principals,
    "membership": _membership,
    "out_of_band": _out_of_band,
    "joined_to_any": _joined_to_any,
    "inside_any": _inside_any,
    "local_members": _local_members,
}


# --------------------------------------------------------------------------------------------------
# Load interned names, and take new nids.

SQL_PRINCIPALS: Final[LiteralString] = """
SELECT name, principal_nid AS nid
FROM principals
WHERE name = ANY($1::text[])
"""

SQL_TYPES: Final[LiteralString] = """
SELECT type AS name, type_nid AS nid
FROM event_types
WHERE type = ANY($1::text[])
UNION ALL  -- in place of OR, which finds no single index
SELECT type, type_nid
FROM event_types
WHERE type_nid = ANY($2::int[])
"""

SQL_STATE_KEYS: Final[LiteralString] = """
SELECT k.type_nid, k.state_key, k.state_key_nid
FROM unnest($1::int[], $2::text[]) AS wanted (type_nid, state_key)
CROSS JOIN LATERAL (
    SELECT * FROM state_keys
    WHERE type_nid = wanted.type_nid AND state_key = wanted.state_key
    OFFSET 0
) AS k
"""

SQL_STATE_KEY_NAMES: Final[LiteralString] = """
SELECT type_nid, state_key, state_key_nid
FROM state_keys
WHERE state_key_nid = ANY($1::int[])
"""

SQL_NIDS: Final[LiteralString] = """
SELECT 'event_nids' AS name, nextval('event_nids') AS nid FROM generate_series(1, $1::int)
UNION ALL
SELECT 'state_group_nids', nextval('state_group_nids') FROM generate_series(1, $2::int)
UNION ALL
SELECT 'state_key_nids', nextval('state_key_nids') FROM generate_series(1, $3::int)
UNION ALL
SELECT 'type_nids', nextval('type_nids') FROM generate_series(1, $4::int)
UNION ALL
SELECT 'principal_nids', nextval('principal_nids') FROM generate_series(1, $5::int)
UNION ALL
SELECT 'room_nids', nextval('room_nids') FROM generate_series(1, $6::int)
"""


class NameRow(NamedTuple):
    """A name and its nid."""

    name: str
    nid: int


class StateKeyRow(NamedTuple):
    """A state key and its nid."""

    type_nid: int
    state_key: str
    state_key_nid: int


async def fill_blocks(conn: Connection, blocks: NidBlocks, needed: dict[str, int]) -> None:
    """Take blocks of nids until each sequence has its ``needed`` number of them."""
    lacking = [max(0, needed.get(name, 0) - blocks.left(name)) for name in BLOCK_LENGTHS]
    if not any(lacking):
        return
    counts = [
        -(-lack // length) for lack, length in zip(lacking, BLOCK_LENGTHS.values(), strict=True)
    ]
    for name, first in await conn.fetch(SQL_NIDS, *counts, row=NameRow):
        blocks.put(name, first)


async def load_nids(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    await fill_blocks(conn, change_set.blocks, dict.fromkeys(keys, 1))


async def load_types(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    for key in keys:
        change_set.names.types.setdefault(key, None)
    _keep_types(change_set, await conn.fetch(SQL_TYPES, list(keys), [], row=NameRow))


async def load_type_names(conn: Connection, change_set: ChangeSet, keys: Collection[int]) -> None:
    """Load event types by nid."""
    _keep_types(change_set, await conn.fetch(SQL_TYPES, [], list(keys), row=NameRow))


def _keep_types(change_set: ChangeSet, rows: Iterable[NameRow]) -> None:
    for name, nid in rows:
        change_set.names.types[name] = nid
        change_set.names.type_names[nid] = name


async def load_state_keys(
    conn: Connection, change_set: ChangeSet, keys: Collection[tuple[int, str]]
) -> None:
    for key in keys:
        change_set.names.state_keys.setdefault(key, None)
    _keep_state_keys(
        change_set,
        await conn.fetch(
            SQL_STATE_KEYS, [key[0] for key in keys], [key[1] for key in keys], row=StateKeyRow
        ),
    )


async def load_state_key_names(
    conn: Connection, change_set: ChangeSet, keys: Collection[int]
) -> None:
    _keep_state_keys(change_set, await conn.fetch(SQL_STATE_KEY_NAMES, list(keys), row=StateKeyRow))


def _keep_state_keys(change_set: ChangeSet, rows: Iterable[StateKeyRow]) -> None:
    for type_nid, state_key, nid in rows:
        change_set.names.state_keys[type_nid, state_key] = nid
        change_set.names.state_key_names[nid] = (type_nid, state_key)


async def load_principals(conn: Connection, change_set: ChangeSet, keys: Collection[str]) -> None:
    for key in keys:
        change_set.names.principals.setdefault(key, None)
    change_set.names.principals.update(await conn.fetch(SQL_PRINCIPALS, list(keys), row=NameRow))


# --------------------------------------------------------------------------------------------------
# Look up transactions of local users, by the names that a request has.

SQL_TRANSACTIONS: Final[LiteralString] = """
SELECT r.room_id, p.name AS sender, t.device_id, t.transaction_id, t.event_id,
    e.stream_ordering, e.topological_ordering, e.type, e.state_key
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[])
    AS i (room_id, sender, device_id, transaction_id)
CROSS JOIN LATERAL (SELECT x.room_nid, x.room_id FROM rooms x
    WHERE x.room_id = i.room_id OFFSET 0) AS r
CROSS JOIN LATERAL (SELECT x.principal_nid, x.name FROM principals x
    WHERE x.name = i.sender OFFSET 0) AS p
CROSS JOIN LATERAL (
    SELECT x.device_id, x.transaction_id, x.event_nid, x.event_id
    FROM local_transactions x
    WHERE x.room_nid = r.room_nid AND x.sender_nid = p.principal_nid
        AND x.device_id = i.device_id AND x.transaction_id = i.transaction_id
    OFFSET 0
) AS t
-- a purge may have deleted the event
LEFT JOIN LATERAL (
    SELECT x.stream_ordering, x.topological_ordering, y.type, k.state_key
    FROM events x
    JOIN event_types y USING (type_nid)
    LEFT JOIN state_keys k USING (state_key_nid)
    WHERE x.event_nid = t.event_nid
    OFFSET 0
) AS e ON true
"""


class StoredTransactionRow(NamedTuple):
    """A transaction, with the position, type and state key of its event if that is still stored."""

    room_id: str
    sender: str
    device_id: str
    transaction_id: str
    event_id: str
    stream_ordering: int | None
    topological_ordering: int | None
    type: str | None
    state_key: str | None

    @property
    def key(self) -> TransactionKey:
        room_id, sender = RoomId(self.room_id), UserId(self.sender)
        return TransactionKey(room_id, sender, self.device_id, self.transaction_id)

    def is_of(self, transaction: Transaction) -> bool:
        """Return whether the row under one of the keys of a request is of this request.

        If the key is without the path, the type and the state key of the event are compared. Only
        earlier releases stored redactions so: their targets are not compared. The event may be
        purged. Then the row is of any request that is stored so.
        """
        path = transaction.path
        if self.transaction_id != transaction.key.transaction_id:
            return True
        if self.type is None:
            return not transaction.needs_path
        return (self.type, self.state_key) == (path.type, path.state_key)

    @property
    def result(self) -> AppendResult:
        """Return the result of a repeated request."""
        return AppendResult(
            EventId(self.event_id),
            "duplicate",
            None,
            self.stream_ordering,
            self.topological_ordering,
        )


async def first_result(conn: Connection, transaction: Transaction) -> AppendResult | None:
    """Return the result of the first request, or None if none is stored."""
    row = _first(transaction, await _rows(conn, transaction.stored_as()))
    return None if row is None else row.result


async def load_transactions(
    conn: Connection, change_set: ChangeSet, transactions: Collection[Transaction]
) -> None:
    """Add the stored ones to the change set, and the keys that other requests have."""
    rows = await _rows(
        conn, [key for transaction in transactions for key in transaction.stored_as()]
    )
    view = change_set.transactions
    for transaction in transactions:
        row = _first(transaction, rows)
        if row is not None:
            view.events[row.key] = KnownTransaction(EventId(row.event_id), transaction.path)
    view.taken |= rows.keys()


def _first(
    transaction: Transaction, rows: Mapping[TransactionKey, StoredTransactionRow]
) -> StoredTransactionRow | None:
    """Return the row of a request. One with the path is certain, so it comes first."""
    for key in reversed(transaction.stored_as()):
        if key in rows and rows[key].is_of(transaction):
            return rows[key]
    return None


async def _rows(
    conn: Connection, keys: Collection[TransactionKey]
) -> dict[TransactionKey, StoredTransactionRow]:
    rows = await conn.fetch(SQL_TRANSACTIONS, *transposed(keys, 4), row=StoredTransactionRow)
    return {row.key: row for row in rows}
