"""Lookups that only the database can do, one statement each: see `Answers.answer`."""

from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS, EVENTS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.persist.model.change_set import ChangeSet
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

SQL_CREATE: Final[LiteralString] = """
SELECT event_id
FROM events
WHERE room_nid = $1::int AND type_nid = 1 AND state_key_nid = 1 AND rejected IS NULL
"""

SQL_INVITED: Final[LiteralString] = """
SELECT state_key_nid
FROM events
WHERE event_nid = ANY($1::bigint[]) AND membership = 4
"""

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


SQL_JOINED_TO_ANY: Final[LiteralString] = """
SELECT EXISTS (
    SELECT
    FROM unnest($3::text[]) AS wanted (room_id)
    CROSS JOIN (SELECT state_key_nid FROM state_keys
        WHERE type_nid = 2 AND state_key = $1::text OFFSET 0) AS k
    CROSS JOIN (SELECT principal_nid FROM principals WHERE name = $2::text OFFSET 0) AS p
    CROSS JOIN LATERAL (SELECT room_nid FROM rooms WHERE room_id = wanted.room_id OFFSET 0) AS r
    CROSS JOIN LATERAL (SELECT membership FROM current_state
        WHERE room_nid = r.room_nid AND state_key_nid = k.state_key_nid OFFSET 0) AS c
    -- the state of a room that this server has left may be out of date
    CROSS JOIN LATERAL (SELECT joined_count FROM visibility
        WHERE room_nid = r.room_nid AND principal_nid = p.principal_nid OFFSET 0) AS v
    WHERE c.membership = 5 AND v.joined_count > 0
)
"""

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

SQL_LOCAL_MEMBERS: Final[LiteralString] = """
SELECT p.name
FROM visibility v
CROSS JOIN LATERAL (SELECT membership FROM memberships
    WHERE principal_nid = v.principal_nid AND room_nid = v.room_nid OFFSET 0) AS m
CROSS JOIN LATERAL (SELECT name FROM principals
    WHERE principal_nid = v.principal_nid OFFSET 0) AS p
WHERE v.room_nid = $1::int AND m.membership = 5
ORDER BY v.principal_nid
LIMIT 100
"""


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
        known = change_set.events.rows.get(row.event_id)
        if known is None:
            known = row._replace(
                prev_events=tuple(row.prev_events), auth_events=tuple(row.auth_events)
            )
            change_set.events.rows[row.event_id] = known
        change_set.events.row_ids[row.event_nid] = row.event_id
        kept.append(known)
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
    found: str | None = await conn.fetchval(SQL_PARTIAL_JOIN, room_nid)
    return found


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
