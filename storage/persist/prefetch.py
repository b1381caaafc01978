"""Loading ahead what a batch is going to need: one statement per kind of thing instead of one per event."""

from collections.abc import Container, Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.event import relation_of
from storage.ids import server_name_of
from storage.persist.columns import columns
from storage.persist.context import Needs
from storage.persist.draft import Draft
from storage.persist.load import fill_blocks, load
from storage.persist.plan import Incoming

TYPE_MEMBER_NAME: Final = "m.room.member"

SQL_NAMES: Final[LiteralString] = """
SELECT name, NULL::int AS type_nid, principal_nid AS nid
FROM principals
WHERE name = ANY($1::text[])
UNION ALL
SELECT k.state_key, k.type_nid, k.state_key_nid
FROM state_keys k
JOIN unnest($2::int[], $3::text[]) AS wanted (type_nid, state_key) USING (type_nid, state_key)
"""


class NameRow(NamedTuple):
    """The nid of a user or server (no type), or of a state key."""

    name: str
    type_nid: int | None
    nid: int


async def prefetch(conn: Connection, draft: Draft, incoming: Sequence[Incoming]) -> None:
    """Have at hand what the events name: rooms, parents, auth events, the states after the parents, names."""
    count = len(incoming)
    await fill_blocks(conn, draft.blocks, {"event_nids": count, "state_group_nids": count + 2, "room_nids": 1})
    await _ensure(conn, draft, "rooms", {one.event.room_id for one in incoming}, draft.rooms, draft.caches.rooms)
    await _ensure(conn, draft, "event_ids", _event_ids(incoming), draft.rows, draft.caches.rows)
    await _auth_events(conn, draft, incoming)
    await _states(conn, draft, incoming)
    await _ensure(conn, draft, "types", _types(incoming), draft.types, draft.caches.names.types)
    await _names(conn, draft, incoming)


async def _ensure(conn: Connection, draft: Draft, kind: str, keys: Iterable[str], *known: Container[str]) -> None:
    lacking = {key for key in keys if not any(key in place for place in known)}
    if lacking:
        await load(conn, draft, Needs(kind, lacking))


def _types(incoming: Sequence[Incoming]) -> set[str]:
    relations = (relation_of(one.event) for one in incoming)
    return {one.event.type for one in incoming} | {relation.rel_type for relation in relations if relation is not None}


def _event_ids(incoming: Sequence[Incoming]) -> set[str]:
    ids: set[str] = set()
    for one in incoming:
        ids.add(one.event.event_id)
        ids.update(one.event.prev_event_ids)
        ids.update(one.event.auth_event_ids)
        ids.update(one.state_before or ())
        if one.event.redacts is not None:
            ids.add(one.event.redacts)
    return ids


async def _auth_events(conn: Connection, draft: Draft, incoming: Sequence[Incoming]) -> None:
    """The contents of the auth events that are held."""
    ids = {auth for one in incoming for auth in one.event.auth_event_ids}
    rows = (draft.rows.get(one) or draft.caches.rows.get(one) for one in ids)
    nids = {row.event_nid for row in rows if row is not None}
    lacking = {nid for nid in nids if nid not in draft.events and nid not in draft.caches.events}
    if lacking:
        await load(conn, draft, Needs("events", lacking))


async def _states(conn: Connection, draft: Draft, incoming: Sequence[Incoming]) -> None:
    """The states after the parents that are held."""
    ids = {parent for one in incoming for parent in one.event.prev_event_ids}
    rows = (draft.rows.get(one) or draft.caches.rows.get(one) for one in ids)
    groups = {row.after for row in rows if row is not None and not row.outlier}
    rooms = (draft.rooms.get(one.event.room_id) or draft.caches.rooms.get(one.event.room_id) for one in incoming)
    groups |= {room.current_state_group for room in rooms if room is not None and room.current_state_group is not None}
    lacking = {group for group in groups if group not in draft.groups and group not in draft.caches.groups}
    if lacking:
        await load(conn, draft, Needs("groups", lacking))


async def _names(conn: Connection, draft: Draft, incoming: Sequence[Incoming]) -> None:
    """The nids of users, of the members' servers, and of state keys (as far as their types have one), in one statement."""
    users: set[str] = set()
    keys: set[tuple[int, str]] = set()
    for one in incoming:
        event = one.event
        users.add(event.sender)
        if event.state_key is not None:
            if event.type == TYPE_MEMBER_NAME:
                users |= {event.state_key, server_name_of(event.state_key)}
            type_nid = draft.caches.names.types.get(event.type) or draft.types.get(event.type)
            if type_nid is not None:
                keys.add((type_nid, event.state_key))
    users = {user for user in users if user not in draft.principals and user not in draft.caches.names.principals}
    keys = {key for key in keys if key not in draft.state_keys and key not in draft.caches.names.state_keys}
    if not (users or keys):
        return
    draft.principals.update(dict.fromkeys(users))
    draft.state_keys.update(dict.fromkeys(keys))
    for name, type_nid, nid in await conn.fetch(SQL_NAMES, list(users), *columns(keys, 2), row=NameRow):
        if type_nid is None:
            draft.principals[name] = nid
        else:
            draft.state_keys[type_nid, name] = nid
            draft.state_key_names[nid] = (type_nid, name)
