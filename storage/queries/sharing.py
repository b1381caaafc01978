"""The users who share a room with a user, for device lists and presence.

Two users share a room if both are joined to it. `sharing_changes` compares two sync tokens, by one
statement. It reads the rooms that the user is in now or was in at a token. Of these it reads the
changes since the tokens (`state_deltas`), with the value before each. So a leave, a ban and a
result of state resolution are all alike.

Users of other rooms of the user are looked up one by one: only those for whom something may have
changed. They are the members with a change, and all members of a room that the user joined or left.
"""

from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.errors import ResyncNeeded
from storage.ids import RoomId, UserId
from storage.streams import VectorPosition

SQL_SHARED_ROOMS: Final[LiteralString] = """
SELECT r.room_id
FROM state_keys one
JOIN state_keys other ON other.type_nid = 2 AND other.state_key = $2::text
JOIN current_state c ON c.state_key_nid = one.state_key_nid AND c.membership = 5
JOIN current_state d ON d.state_key_nid = other.state_key_nid AND d.room_nid = c.room_nid
    AND d.membership = 5
JOIN rooms r ON r.room_nid = c.room_nid
WHERE one.type_nid = 2 AND one.state_key = $1::text
"""

SQL_USERS_SHARING: Final[LiteralString] = """
SELECT k.state_key
FROM state_keys k
WHERE k.state_key <> $1::text AND k.state_key_nid = ANY(ARRAY(
    SELECT DISTINCT other.state_key_nid
    FROM state_keys me
    JOIN current_state c ON c.state_key_nid = me.state_key_nid AND c.membership = 5
    -- room by room: otherwise the members of all rooms could be read for a few of them
    CROSS JOIN LATERAL (
        SELECT m.state_key_nid
        FROM current_state m
        WHERE m.room_nid = c.room_nid AND m.membership = 5
        OFFSET 0
    ) AS other
    WHERE me.type_nid = 2 AND me.state_key = $1::text
))
"""

SQL_SHARING_CHANGES: Final[LiteralString] = """
WITH
further AS MATERIALIZED (  -- of each token (0 since, 1 to), the writers that are further
    SELECT * FROM unnest($4::int[], $5::text[], $6::bigint[]) AS f (token, instance_name, stream_id)
),
covered AS MATERIALIZED (  -- the position of each writer in both tokens
    SELECT w.writer_nid, COALESCE(s.stream_id, $2::bigint) AS since,
        COALESCE(t.stream_id, $3::bigint) AS upto
    FROM writers w
    LEFT JOIN further s ON s.token = 0 AND s.instance_name = w.instance_name
    LEFT JOIN further t ON t.token = 1 AND t.instance_name = w.instance_name
),
me AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid
    FROM principals p
    JOIN state_keys k ON k.type_nid = 2 AND k.state_key = p.name
    WHERE p.name = $1::text
),
own AS MATERIALIZED (  -- rooms that the user is in, or may have been in at a token
    SELECT m.room_nid, m.membership = 5 AS joined
    FROM me
    JOIN memberships m USING (principal_nid)
    WHERE m.membership = 5 OR m.stream_ordering > LEAST($2::bigint, $3::bigint)
),
change AS MATERIALIZED (  -- each key that changed after a token, with its value at both
    SELECT d.room_nid, d.state_key_nid,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering)
            FILTER (WHERE d.stream_ordering > c.since))[1] AS since_nid,
        bool_or(d.stream_ordering > c.since) AS differs_since,
        (array_agg(d.prev_event_nid ORDER BY d.stream_ordering)
            FILTER (WHERE d.stream_ordering > c.upto))[1] AS upto_nid,
        bool_or(d.stream_ordering > c.upto) AS differs_upto
    FROM own
    -- here and below one by one: of the user's rooms, not of all
    CROSS JOIN LATERAL (
        SELECT *
        FROM state_deltas x
        WHERE x.room_nid = own.room_nid AND x.stream_ordering > LEAST($2::bigint, $3::bigint)
        OFFSET 0
    ) AS d
    JOIN covered c USING (writer_nid)
    WHERE d.stream_ordering > LEAST(c.since, c.upto)
    GROUP BY d.room_nid, d.state_key_nid
),
moved AS MATERIALIZED (  -- the members among them: whether they were joined at both
    SELECT n.room_nid, n.state_key_nid,
        COALESCE(CASE WHEN n.differs_since THEN s.membership ELSE c.membership END = 5,
            false) AS since,
        COALESCE(CASE WHEN n.differs_upto THEN t.membership ELSE c.membership END = 5,
            false) AS upto
    FROM change n
    CROSS JOIN LATERAL (
        SELECT k.type_nid FROM state_keys k WHERE k.state_key_nid = n.state_key_nid OFFSET 0
    ) AS k
    LEFT JOIN LATERAL (
        SELECT e.membership FROM events e WHERE e.event_nid = n.since_nid OFFSET 0
    ) AS s ON true
    LEFT JOIN LATERAL (
        SELECT e.membership FROM events e WHERE e.event_nid = n.upto_nid OFFSET 0
    ) AS t ON true
    LEFT JOIN LATERAL (
        SELECT x.membership
        FROM current_state x
        WHERE x.room_nid = n.room_nid AND x.state_key_nid = n.state_key_nid
        OFFSET 0
    ) AS c ON true
    WHERE k.type_nid = 2
),
room AS MATERIALIZED (  -- whether the user was joined at both
    SELECT o.room_nid, COALESCE(m.since, o.joined) AS since, COALESCE(m.upto, o.joined) AS upto
    FROM own o
    CROSS JOIN me
    LEFT JOIN moved m ON m.room_nid = o.room_nid AND m.state_key_nid = me.state_key_nid
),
concerned AS MATERIALIZED (  -- users for whom something may have changed
    SELECT m.state_key_nid
    FROM room r
    JOIN moved m USING (room_nid)
    WHERE (r.since AND m.since) <> (r.upto AND m.upto)
    UNION
    SELECT c.state_key_nid
    FROM room r
    CROSS JOIN LATERAL (
        SELECT x.state_key_nid
        FROM current_state x
        WHERE x.room_nid = r.room_nid AND x.membership = 5
        OFFSET 0
    ) AS c
    WHERE r.since <> r.upto
),
shared AS (  -- for each of them and each room, whether it was shared at both
    SELECT m.state_key_nid, r.since AND m.since AS since, r.upto AND m.upto AS upto
    FROM room r
    JOIN moved m USING (room_nid)
    WHERE m.state_key_nid IN (SELECT state_key_nid FROM concerned)
    UNION ALL
    SELECT c.state_key_nid, r.since, r.upto
    FROM concerned v
    CROSS JOIN LATERAL (
        SELECT x.room_nid, x.state_key_nid
        FROM current_state x
        WHERE x.state_key_nid = v.state_key_nid AND x.membership = 5
        OFFSET 0
    ) AS c
    JOIN room r ON r.room_nid = c.room_nid
    WHERE (c.room_nid, c.state_key_nid) NOT IN (SELECT room_nid, state_key_nid FROM moved)
),
changed AS (
    SELECT s.state_key_nid, bool_or(s.upto) AS gained
    FROM shared s
    GROUP BY s.state_key_nid
    HAVING bool_or(s.since) <> bool_or(s.upto)
)
SELECT k.state_key AS user_id, c.gained, NULL::bigint AS purged_upto
FROM changed c
CROSS JOIN LATERAL (
    SELECT x.state_key FROM state_keys x WHERE x.state_key_nid = c.state_key_nid OFFSET 0
) AS k
WHERE k.state_key <> $1::text
UNION ALL
SELECT NULL, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
"""


class SharingChangeRow(NamedTuple):
    """A user who is gained or lost; or, without a user, up to which the changes are purged."""

    user_id: str | None
    gained: bool | None
    purged_upto: int | None


@dataclass(frozen=True, slots=True)
class SharingChanges:
    """The users who share a room at the later token only (gained), or the earlier only (lost)."""

    gained: frozenset[UserId]
    lost: frozenset[UserId]


async def shared_rooms(conn: Connection, one: UserId, other: UserId) -> set[RoomId]:
    """Return the rooms that both users are joined to."""
    return set(await conn.fetchvals(SQL_SHARED_ROOMS, one, other))


async def users_sharing(conn: Connection, user_id: UserId) -> set[UserId]:
    """Return the other users who are joined to a room that the user is joined to."""
    return set(await conn.fetchvals(SQL_USERS_SHARING, user_id))


async def sharing_changes(
    conn: Connection, user_id: UserId, since: VectorPosition, to: VectorPosition, *, text: str
) -> SharingChanges:
    """Return whom a local user began or ceased to share a room with, between two positions.

    `ResyncNeeded` for positions, ``text`` as a token, from before purged state changes.
    """
    further = [
        (token, writer, position)
        for token, one in enumerate((since, to))
        for writer, position in one.items
    ]
    rows = await conn.fetch(
        SQL_SHARING_CHANGES,
        user_id,
        since.min,
        to.min,
        *([one[column] for one in further] for column in range(3)),
        row=SharingChangeRow,
    )
    purged_upto = max((row.purged_upto or 0 for row in rows), default=0)
    if min(since.min, to.min) < purged_upto:
        raise ResyncNeeded(text, "what happened since then is not kept any more")
    found = {gained: frozenset(_users(rows, gained=gained)) for gained in (True, False)}
    return SharingChanges(found[True], found[False])


def _users(rows: list[SharingChangeRow], *, gained: bool) -> list[UserId]:
    return [UserId(row.user_id) for row in rows if row.user_id and row.gained is gained]
