"""Load interned names, and take new nids."""

from collections.abc import Collection, Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.nid_blocks import BLOCK_LENGTHS, NidBlocks

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


async def fill_blocks(conn: Connection, blocks: NidBlocks, wanted: dict[str, int]) -> None:
    """Take blocks of nids until each sequence has its ``wanted`` number of them."""
    lacking = [max(0, wanted.get(name, 0) - blocks.left(name)) for name in BLOCK_LENGTHS]
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
