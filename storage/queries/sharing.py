"""The users who share a room with a user, for device lists and presence.

Two users share a room if both are joined to it. `sharing_changes` compares two sync tokens, by one
statement. It reads the rooms that the user is in now or was in since a token. Of these it reads the
changes since the tokens (`state_deltas`), with the value before each. So a leave, a ban and a
result of state resolution are all alike. The changes give the ranges of positions in which each
user was joined, and their union over the rooms has a hole where no room was shared.

Users of other rooms of the user are looked up one by one: only those for whom something may have
changed. They are the members with a change, and all members of a room that the user joined or left.
"""

from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.errors import ResyncNeeded
from storage.ids import RoomId, UserId
from storage.streams import VectorPosition

SQL_SHARED_ROOMS: Final[LiteralString] = fill("""
SELECT r.room_id
FROM state_keys one
JOIN state_keys other ON other.type_nid = {TYPE_MEMBER} AND other.state_key = $2::text
JOIN current_state c ON c.state_key_nid = one.state_key_nid AND c.membership = {JOIN}
JOIN current_state d ON d.state_key_nid = other.state_key_nid AND d.room_nid = c.room_nid
    AND d.membership = {JOIN}
JOIN rooms r ON r.room_nid = c.room_nid
WHERE one.type_nid = {TYPE_MEMBER} AND one.state_key = $1::text
""")

SQL_USERS_SHARING: Final[LiteralString] = fill("""
SELECT k.state_key
FROM state_keys k
WHERE k.state_key <> $1::text AND k.state_key_nid = ANY(ARRAY(
    SELECT DISTINCT other.state_key_nid
    FROM state_keys me
    JOIN current_state c ON c.state_key_nid = me.state_key_nid AND c.membership = {JOIN}
    -- room by room: otherwise the members of all rooms could be read for a few of them
    CROSS JOIN LATERAL (
        SELECT m.state_key_nid
        FROM current_state m
        WHERE m.room_nid = c.room_nid AND m.membership = {JOIN}
        OFFSET 0
    ) AS other
    WHERE me.type_nid = {TYPE_MEMBER} AND me.state_key = $1::text
))
""")

SQL_SHARING_CHANGES: Final[LiteralString] = compose(
    """
WITH
further AS MATERIALIZED (  -- of each token (0 since, 1 to), the writers that are further
    SELECT *
    FROM unnest(:tokens, :writers, :writer_positions) AS f (token, instance_name, stream_id)
),
covered AS MATERIALIZED (  -- the position of each writer in both tokens
    SELECT w.writer_nid, COALESCE(s.stream_id, :since) AS since,
        COALESCE(t.stream_id, :upto) AS upto
    FROM writers w
    LEFT JOIN further s ON s.token = 0 AND s.instance_name = w.instance_name
    LEFT JOIN further t ON t.token = 1 AND t.instance_name = w.instance_name
),
me AS MATERIALIZED (
    SELECT p.principal_nid, k.state_key_nid
    FROM principals p
    JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = p.name
    WHERE p.name = :user_id
),
own AS MATERIALIZED (  -- rooms that the user is in, or may have been in since a token
    SELECT m.room_nid, m.membership = {JOIN} AS joined
    FROM me
    JOIN memberships m USING (principal_nid)
    WHERE m.membership = {JOIN} OR m.stream_ordering > LEAST(:since, :upto)
),
change AS MATERIALIZED (  -- of members after a token, with the membership before each
    SELECT d.room_nid, d.state_key_nid, d.stream_ordering, e.membership,
        d.stream_ordering > c.since AS after_since, d.stream_ordering > c.upto AS after_upto
    FROM own
    -- here and below one by one: of the user's rooms, not of all
    CROSS JOIN LATERAL (
        SELECT *
        FROM state_deltas x
        WHERE x.room_nid = own.room_nid AND x.stream_ordering > LEAST(:since, :upto)
        OFFSET 0
    ) AS d
    JOIN covered c USING (writer_nid)
    CROSS JOIN LATERAL (
        SELECT k.type_nid FROM state_keys k WHERE k.state_key_nid = d.state_key_nid OFFSET 0
    ) AS k
    LEFT JOIN LATERAL (
        SELECT x.membership FROM events x WHERE x.event_nid = d.prev_event_nid OFFSET 0
    ) AS e ON true
    WHERE d.stream_ordering > LEAST(c.since, c.upto) AND k.type_nid = {TYPE_MEMBER}
),
value AS (  -- each membership of these, up to its change, or to the end
    SELECT v.*,
        min(v.stream_ordering) FILTER (WHERE v.after_since) OVER member AS since,
        min(v.stream_ordering) FILTER (WHERE v.after_upto) OVER member AS upto
    FROM (
        SELECT * FROM change
        UNION ALL
        SELECT n.room_nid, n.state_key_nid, 9223372036854775807, c.membership, true, true
        FROM (SELECT DISTINCT room_nid, state_key_nid FROM change) AS n
        LEFT JOIN LATERAL (
            SELECT x.membership
            FROM current_state x
            WHERE x.room_nid = n.room_nid AND x.state_key_nid = n.state_key_nid
            OFFSET 0
        ) AS c ON true
    ) AS v
    WINDOW member AS (PARTITION BY v.room_nid, v.state_key_nid)
),
life AS MATERIALIZED (  -- when each was joined: from one token, which has no bound, to the other
    SELECT v.room_nid, v.state_key_nid,
        COALESCE(range_agg(v.during) FILTER (WHERE v.membership = {JOIN}), '{}') AS during
    FROM (
        SELECT *, CASE WHEN v.since <= v.upto
            THEN int8range(lag(v.stream_ordering) OVER member, NULLIF(v.stream_ordering, v.upto))
            -- back in time
            ELSE int8range(-NULLIF(v.stream_ordering, v.since), -lag(v.stream_ordering) OVER member)
            END AS during
        FROM value v
        WHERE v.stream_ordering BETWEEN LEAST(v.since, v.upto) AND GREATEST(v.since, v.upto)
        WINDOW member AS (PARTITION BY v.room_nid, v.state_key_nid ORDER BY v.stream_ordering)
    ) AS v
    GROUP BY v.room_nid, v.state_key_nid
),
room AS MATERIALIZED (  -- when the user was joined
    SELECT o.room_nid,
        COALESCE(l.during, CASE WHEN o.joined THEN '{(,)}' ELSE '{}' END::int8multirange) AS during
    FROM own o
    CROSS JOIN me
    LEFT JOIN life l ON l.room_nid = o.room_nid AND l.state_key_nid = me.state_key_nid
),
concerned AS MATERIALIZED (  -- users who did not share a room of these all the time
    SELECT l.state_key_nid
    FROM room r
    JOIN life l USING (room_nid)
    WHERE r.during * l.during NOT IN ('{}', '{(,)}')
    UNION
    SELECT c.state_key_nid
    FROM room r
    CROSS JOIN LATERAL (
        SELECT x.state_key_nid
        FROM current_state x
        WHERE x.room_nid = r.room_nid AND x.membership = {JOIN}
        OFFSET 0
    ) AS c
    WHERE r.during NOT IN ('{}', '{(,)}')
),
shared AS (  -- for each of them and each room, when it was shared
    SELECT l.state_key_nid, r.during * l.during AS during
    FROM room r
    JOIN life l USING (room_nid)
    WHERE l.state_key_nid IN (SELECT state_key_nid FROM concerned)
    UNION ALL
    SELECT c.state_key_nid, r.during
    FROM concerned v
    CROSS JOIN LATERAL (
        SELECT x.room_nid, x.state_key_nid
        FROM current_state x
        WHERE x.state_key_nid = v.state_key_nid AND x.membership = {JOIN}
        OFFSET 0
    ) AS c
    JOIN room r ON r.room_nid = c.room_nid
    WHERE (c.room_nid, c.state_key_nid) NOT IN (SELECT room_nid, state_key_nid FROM life)
),
changed AS (
    SELECT s.state_key_nid, range_agg(s.during) AS during
    FROM shared s
    GROUP BY s.state_key_nid
)
SELECT k.state_key AS user_id, upper_inf(c.during) AS gained, NULL::bigint AS purged_upto
FROM changed c
CROSS JOIN LATERAL (
    SELECT x.state_key FROM state_keys x WHERE x.state_key_nid = c.state_key_nid OFFSET 0
) AS k
WHERE k.state_key <> :user_id AND c.during <> '{(,)}'
    AND (lower_inf(c.during) OR upper_inf(c.during))
UNION ALL
SELECT NULL, NULL, purged_upto
FROM purged_streams
WHERE stream_name = 'events'
""",
    user_id="text",
    since="bigint",
    upto="bigint",
    tokens="int[]",
    writers="text[]",
    writer_positions="bigint[]",
).sql


class SharingChangeRow(NamedTuple):
    """A user who is gained or lost; or, without a user, up to which the changes are purged."""

    user_id: str | None
    gained: bool | None
    purged_upto: int | None


@dataclass(frozen=True, slots=True)
class SharingChanges:
    """The users who share a room at the later token but did not all the time, and those lost."""

    gained: frozenset[UserId]
    lost: frozenset[UserId]


async def shared_rooms(conn: Connection, user_id: UserId, other: UserId) -> set[RoomId]:
    """Return the rooms that both users are joined to."""
    return set(await conn.fetchvals(SQL_SHARED_ROOMS, user_id, other))


async def users_sharing(conn: Connection, user_id: UserId) -> set[UserId]:
    """Return the other users who are joined to a room that the user is joined to."""
    return set(await conn.fetchvals(SQL_USERS_SHARING, user_id))


async def sharing_changes(
    conn: Connection, user_id: UserId, since: VectorPosition, to: VectorPosition, *, text: str
) -> SharingChanges:
    """Return whom a local user began or ceased to share a room with, between two positions.

    A user who shared none for a while in between is gained.

    `ResyncNeeded` for positions, ``text`` as a token, from before purged state changes.
    """
    further = [
        (token, writer, position)
        for token, vector in enumerate((since, to))
        for writer, position in vector.items
    ]
    rows = await conn.fetch(
        SQL_SHARING_CHANGES,
        user_id,
        since.min,
        to.min,
        *([entry[column] for entry in further] for column in range(3)),
        row=SharingChangeRow,
    )
    purged_upto = max((row.purged_upto or 0 for row in rows), default=0)
    if min(since.min, to.min) < purged_upto:
        raise ResyncNeeded(text, "what happened since then is not kept any more")
    users = {gained: frozenset(_users(rows, gained=gained)) for gained in (True, False)}
    return SharingChanges(users[True], users[False])


def _users(rows: list[SharingChangeRow], *, gained: bool) -> list[UserId]:
    return [UserId(row.user_id) for row in rows if row.user_id and row.gained is gained]
