"""The room list by reading everything each time: no cache, no facts in SQL."""

from collections.abc import Container
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode
from storage.database.connection import Connection
from storage.queries.sliding.types import SlidingFilter

SQL_MEMBERSHIPS: Final[LiteralString] = """
SELECT m.room_nid, r.room_id, m.membership::int AS membership, e.sender_nid <> m.principal_nid
        AS by_other,
    (SELECT v.last_join_topological IS NOT NULL FROM visibility v
        WHERE v.room_nid = m.room_nid AND v.principal_nid = m.principal_nid) AS was_joined,
    m.forgotten, m.stream_ordering AS position, (SELECT max(l.stream_ordering) FROM events l
        WHERE l.room_nid = m.room_nid AND NOT l.backfilled) AS latest
FROM memberships m
JOIN rooms r USING (room_nid)
JOIN principals p USING (principal_nid)
LEFT JOIN events e USING (event_nid)
WHERE p.name = $1::text
"""
SQL_STATE: Final[LiteralString] = """
SELECT t.type, k.state_key, e.redacted_by IS NOT NULL AS is_redacted, e.event_id, e.json
FROM current_state c
JOIN events e USING (event_nid)
JOIN state_keys k ON k.state_key_nid = c.state_key_nid
JOIN event_types t ON t.type_nid = k.type_nid
JOIN rooms r ON r.room_nid = c.room_nid
WHERE r.room_id = $1::text
"""
SQL_STATE_THEN: Final[LiteralString] = """
SELECT t.type, k.state_key, e.redacted_by IS NOT NULL AS is_redacted, e.event_id, e.json
FROM (
    SELECT DISTINCT ON (d.state_key_nid) d.state_key_nid, d.event_nid
    FROM state_deltas d
    JOIN rooms r USING (room_nid)
    WHERE r.room_id = $1::text AND d.stream_ordering <= $2::bigint
    ORDER BY d.state_key_nid, d.stream_ordering DESC
) AS c
JOIN events e USING (event_nid)
JOIN state_keys k ON k.state_key_nid = c.state_key_nid
JOIN event_types t ON t.type_nid = k.type_nid
"""
SQL_ACCOUNT_DATA: Final[LiteralString] = """
SELECT t.type, COALESCE(r.room_id, '') AS room_id, a.content
FROM account_data a
JOIN principals p USING (principal_nid)
JOIN event_types t USING (type_nid)
LEFT JOIN rooms r USING (room_nid)
WHERE p.name = $1::text
"""
KNOCK, INVITE, JOIN = 3, 4, 5


class DumbRow(NamedTuple):
    room_nid: int
    room_id: str
    membership: int
    by_other: bool | None
    was_joined: bool | None
    forgotten: bool
    position: int
    latest: int | None

    def is_listed(self, sent: Container[int]) -> bool:
        if self.membership >= KNOCK:
            return True
        if self.forgotten:
            return False
        if self.room_nid in sent:
            return True
        return bool(self.was_joined) and (self.membership == 1 or bool(self.by_other))

    @property
    def activity(self) -> int:
        return self.latest or self.position if self.membership == JOIN else self.position


class DumbStateRow(NamedTuple):
    type: str
    state_key: str
    is_redacted: bool
    event_id: str
    json: StoredBytes


class DumbDataRow(NamedTuple):
    type: str
    room_id: str
    content: bytes


State = dict[tuple[str, str], dict[str, Any]]


class DumbList:
    """The rooms of a user in the snapshot of a connection."""

    def __init__(self, conn: Connection, user_id: str) -> None:
        self.conn, self.user_id = conn, user_id

    async def window(self, wanted: SlidingFilter, sent: Container[int]) -> list[tuple[str, int]]:
        rows = await self.conn.fetch(SQL_MEMBERSHIPS, self.user_id, row=DumbRow)
        data = await self.conn.fetch(SQL_ACCOUNT_DATA, self.user_id, row=DumbDataRow)
        joined = {row.room_id for row in rows if row.membership == JOIN}
        children = {
            key
            for space in set(wanted.spaces or ()) & joined
            for (kind, key), content in (await self.state(space)).items()
            if kind == "m.space.child" and content.get("via")
        }
        found = [
            (row.activity, row.room_id)
            for row in rows
            if row.is_listed(sent)
            and passes(wanted, row, await self.seen(row), data)
            and (wanted.spaces is None or row.room_id in children)
        ]
        return [(room_id, activity) for activity, room_id in sorted(found, reverse=True)]

    async def state(self, room_id: str) -> State:
        return _contents(room_id, await self.conn.fetch(SQL_STATE, room_id, row=DumbStateRow))

    async def seen(self, row: DumbRow) -> State:
        """Return the state that the user sees: that of now, or of when they were removed."""
        if row.membership >= KNOCK:
            return await self.state(row.room_id)
        then = row.room_id, row.position
        rows = await self.conn.fetch(SQL_STATE_THEN, *then, row=DumbStateRow)
        return _contents(row.room_id, rows)


def _contents(room_id: str, rows: list[DumbStateRow]) -> State:
    return {
        (row.type, row.state_key): {}
        if row.is_redacted
        else orjson.loads(decode(row.json, row.event_id, room_id))["content"]
        for row in rows
    }


def passes(wanted: SlidingFilter, row: DumbRow, state: State, data: list[DumbDataRow]) -> bool:
    content = {(one.type, one.room_id): orjson.loads(one.content) for one in data}
    direct = {room for rooms in content.get(("m.direct", ""), {}).values() for room in rooms}
    tags = set(content.get(("m.tag", row.room_id), {}).get("tags", ()))
    kind = state.get(("m.room.create", ""), {}).get("type")
    name = state.get(("m.room.name", ""), {}).get("name", "")
    return all(
        (
            wanted.is_dm in (None, row.room_id in direct),
            wanted.is_encrypted in (None, ("m.room.encryption", "") in state),
            wanted.is_invited in (None, row.membership == INVITE),
            wanted.room_types is None or kind in wanted.room_types,
            wanted.not_room_types is None or kind not in wanted.not_room_types,
            wanted.room_name_like is None or wanted.room_name_like.lower() in name.lower(),
            wanted.tags is None or bool(tags & set(wanted.tags)),
            wanted.not_tags is None or not tags & set(wanted.not_tags),
        )
    )
