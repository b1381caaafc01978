"""Allocate nids for the names of a load first, in one small transaction per kind.

So no other writer waits for a load because of a shared name.
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.database.names import TYPE_MEMBER, InternedNames
from storage.event import Event, relation_of
from storage.ids import server_name_of
from storage.persist.load.lookups import (
    SQL_PRINCIPALS,
    SQL_STATE_KEYS,
    SQL_TYPES,
    NameRow,
    StateKeyRow,
    fill_blocks,
)
from storage.persist.model.caches import NidBlocks

SQL_NEW_PRINCIPALS: Final[LiteralString] = """
INSERT INTO principals (principal_nid, name)
SELECT * FROM unnest($1::int[], $2::text[])
ON CONFLICT (name) DO NOTHING
"""

SQL_NEW_TYPES: Final[LiteralString] = """
INSERT INTO event_types (type_nid, type)
SELECT * FROM unnest($1::int[], $2::text[])
ON CONFLICT (type) DO NOTHING
"""

SQL_NEW_STATE_KEYS: Final[LiteralString] = """
INSERT INTO state_keys (state_key_nid, type_nid, state_key)
SELECT * FROM unnest($1::int[], $2::int[], $3::text[])
ON CONFLICT (type_nid, state_key) DO NOTHING
"""


async def intern(
    conn: Connection,
    blocks: NidBlocks,
    names: InternedNames,
    events: Iterable[Event],
    server_name: str,
) -> None:
    """Load or allocate the nids of the principals, types and state keys of these events.

    ``conn``: in autocommit.
    """
    principals, types = {server_name}, set[str]()
    keys = set[tuple[str, str]]()
    for event in events:
        principals.add(event.sender)
        types.add(event.type)
        if event.state_key is not None:
            keys.add((event.type, event.state_key))
            if event.type == "m.room.member":
                server = server_name_of(event.state_key)
                principals.update((server, event.state_key) if server == server_name else (server,))
        if event.content and (relation := relation_of(event)) is not None:
            types.add(relation.rel_type)
    await _types(conn, blocks, names, sorted(types - names.types.keys()))
    await _principals(
        conn, blocks, names, sorted(one for one in principals - names.principals.keys() if one)
    )
    wanted = {(names.types[type_name], state_key) for type_name, state_key in keys}
    await _state_keys(conn, blocks, names, sorted(wanted - names.state_keys.keys()))


async def members_known(
    conn: Connection, names: InternedNames, senders: Iterable[str]
) -> list[tuple[int, str]]:
    """Return the member state keys of these senders that have no nid, and cache the others."""
    wanted = [(TYPE_MEMBER, one) for one in senders if (TYPE_MEMBER, one) not in names.state_keys]
    if wanted:
        await _find_state_keys(conn, names, wanted)
    return [key for key in wanted if key not in names.state_keys]


async def _types(
    conn: Connection, blocks: NidBlocks, names: InternedNames, wanted: Sequence[str]
) -> None:
    if not wanted:
        return
    names.learn(types=await conn.fetch(SQL_TYPES, list(wanted), [], row=NameRow))
    new = [one for one in wanted if one not in names.types]
    if new:
        await fill_blocks(conn, blocks, {"type_nids": len(new)})
        await conn.execute(SQL_NEW_TYPES, [blocks.take("type_nids") for _ in new], new)
        names.learn(types=await conn.fetch(SQL_TYPES, new, [], row=NameRow))


async def _principals(
    conn: Connection, blocks: NidBlocks, names: InternedNames, wanted: Sequence[str]
) -> None:
    if not wanted:
        return
    names.learn(principals=await conn.fetch(SQL_PRINCIPALS, list(wanted), row=NameRow))
    new = [one for one in wanted if one not in names.principals]
    if new:
        await fill_blocks(conn, blocks, {"principal_nids": len(new)})
        await conn.execute(SQL_NEW_PRINCIPALS, [blocks.take("principal_nids") for _ in new], new)
        names.learn(principals=await conn.fetch(SQL_PRINCIPALS, new, row=NameRow))


async def _state_keys(
    conn: Connection, blocks: NidBlocks, names: InternedNames, wanted: Sequence[tuple[int, str]]
) -> None:
    if not wanted:
        return
    await _find_state_keys(conn, names, wanted)
    new = [key for key in wanted if key not in names.state_keys]
    if new:
        await fill_blocks(conn, blocks, {"state_key_nids": len(new)})
        nids = [blocks.take("state_key_nids") for _ in new]
        await conn.execute(
            SQL_NEW_STATE_KEYS, nids, [key[0] for key in new], [key[1] for key in new]
        )
        await _find_state_keys(conn, names, new)


async def _find_state_keys(
    conn: Connection, names: InternedNames, wanted: Sequence[tuple[int, str]]
) -> None:
    rows = await conn.fetch(
        SQL_STATE_KEYS, [key[0] for key in wanted], [key[1] for key in wanted], row=StateKeyRow
    )
    names.learn(state_keys=(((row.type_nid, row.state_key), row.state_key_nid) for row in rows))
