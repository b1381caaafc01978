"""The members of a room, now and at a token, and the rooms of a user by membership.

Each read is one statement. None parses a member event: `current_state` and `events` have the
membership as a number. At an earlier position of the stream a key has the value before its first
later change (`state_deltas`), or today's if there is none. Below a position of the topological
order the state is that of a state group.
"""

from collections.abc import Collection, Sequence
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIP_NAMES, MEMBERSHIPS
from storage.database.placeholders import compose, fill
from storage.database.row_types import span
from storage.errors import InputError, StateUnknown, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId, ServerName, UserId
from storage.queries.events import PART_ROOM_EVENT, RoomEventRow, StoredEvent, event_of_room
from storage.queries.room_info import RoomPosition
from storage.streams import VectorPosition
from storage.streams.caches import MemberIds
from storage.turns import parts

PART_COVERED: Final[LiteralString] = """
covered AS MATERIALIZED (  -- the position in the stream, of each writer
    SELECT w.writer_nid, COALESCE(p.stream_id, :upto) AS upto
    FROM writers w
    LEFT JOIN unnest(:writers, :writer_positions) AS p (instance_name, stream_id)
        USING (instance_name)
)
"""

PART_LAST_EVENT: Final[LiteralString] = """
last AS MATERIALIZED (  -- the state after the last event at or below the position
    SELECT COALESCE(e.state_group_after, e.state_group_before) AS state_group
    FROM room r
    JOIN events e USING (room_nid)
    WHERE NOT e.outlier AND e.rejected IS NULL AND NOT e.soft_failed
        AND (e.topological_ordering, e.stream_ordering) <= (:topological, :stream)
        AND (e.backfilled OR e.stream_ordering <= :live)
    ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
    LIMIT 1
)
"""

PART_PURGED: Final[LiteralString] = """
(SELECT purged_upto FROM purged_streams WHERE stream_name = 'events') AS purged_upto
"""

TEMPLATE_MEMBERSHIP: Final[LiteralString] = """
WITH
{covered}
SELECT CASE
        WHEN later.room_nid IS NOT NULL THEN COALESCE(e.membership, 0)
        ELSE COALESCE(m.membership, c.membership, 0)
    END AS membership, {purged}
FROM rooms r
LEFT JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = :user_id
LEFT JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid
LEFT JOIN LATERAL (  -- its first change after the position
    SELECT d.room_nid, d.prev_event_nid
    FROM state_deltas d
    JOIN covered USING (writer_nid)
    WHERE d.room_nid = r.room_nid AND d.stream_ordering > :upto
        AND d.state_key_nid = k.state_key_nid AND d.stream_ordering > covered.upto
    ORDER BY d.stream_ordering
    LIMIT 1
) AS later ON true
LEFT JOIN events e ON e.event_nid = later.prev_event_nid
LEFT JOIN LATERAL (  -- out of band: a membership that is not in the room's state
    SELECT o.membership
    FROM principals p
    JOIN memberships o USING (principal_nid)
    JOIN covered USING (writer_nid)
    WHERE p.name = :user_id AND o.room_nid = r.room_nid AND o.stream_ordering <= covered.upto
        AND (c.room_nid IS NULL OR EXISTS (  -- an invite after all local users have left
            SELECT
            FROM out_of_band_memberships b
            WHERE b.room_nid = o.room_nid AND b.principal_nid = o.principal_nid
                AND b.event_nid = o.event_nid
        ))
) AS m ON true
WHERE r.room_id = :room_id
"""
SQL_MEMBERSHIP: Final[LiteralString] = compose(
    fill(TEMPLATE_MEMBERSHIP, covered=PART_COVERED, purged=PART_PURGED),
    room_id="text",
    upto="bigint",
    writers="text[]",
    writer_positions="bigint[]",
    user_id="text",
).sql

TEMPLATE_MEMBERSHIP_BELOW: Final[LiteralString] = """
WITH
room AS MATERIALIZED (SELECT room_nid FROM rooms WHERE room_id = :room_id),
{last},
key AS MATERIALIZED (
    SELECT state_key_nid FROM state_keys WHERE type_nid = {TYPE_MEMBER} AND state_key = :user_id
)
SELECT COALESCE((
        SELECT e.membership
        FROM (  -- the last row of the path that has the key
            SELECT own.event_nid
            FROM last
            CROSS JOIN key
            CROSS JOIN LATERAL state_path(last.state_group) AS step
            JOIN state_groups g ON g.state_group = step.part
            CROSS JOIN LATERAL (
                SELECT own_entry(key.state_key_nid, true, :own_entries.of(g)) AS event_nid
            ) AS own
            WHERE own.event_nid IS NOT NULL
            ORDER BY step.place DESC
            LIMIT 1
        ) AS member
        JOIN events e USING (event_nid)
    ), 0) AS membership, NULL::bigint AS purged_upto
FROM room
"""
SQL_MEMBERSHIP_BELOW: Final[LiteralString] = compose(
    fill(TEMPLATE_MEMBERSHIP_BELOW, last=PART_LAST_EVENT),
    OWN_ENTRIES,
    room_id="text",
    topological="bigint",
    stream="bigint",
    live="bigint",
    user_id="text",
).sql

TEMPLATE_MEMBERS: Final[LiteralString] = """
WITH
room AS MATERIALIZED (SELECT room_nid, room_version FROM rooms WHERE room_id = :room_id),
{member}
SELECT r.room_version, {purged},
    {event}
FROM room r
LEFT JOIN (
    member m
    JOIN events e ON e.event_nid = m.event_nid {which}
) ON true
"""

PART_FILTERED: Final[LiteralString] = """
    AND e.membership IS NOT NULL
    AND (:wanted IS NULL OR e.membership = :wanted)
    AND (:unwanted IS NULL OR e.membership <> :unwanted)
"""

PART_FILTERED_NOW: Final[LiteralString] = """
    AND c.membership IS NOT NULL
    AND (:wanted IS NULL OR c.membership = :wanted)
    AND (:unwanted IS NULL OR c.membership <> :unwanted)
"""

TEMPLATE_MEMBER_THEN: Final[LiteralString] = """
{covered},
later AS MATERIALIZED (  -- the keys that changed after the position, with the value before
    SELECT DISTINCT ON (d.state_key_nid) d.state_key_nid, d.prev_event_nid AS event_nid
    FROM room r
    JOIN state_deltas d ON d.room_nid = r.room_nid AND d.stream_ordering > :upto
    JOIN covered USING (writer_nid)
    {keys}
    WHERE d.stream_ordering > covered.upto
    ORDER BY d.state_key_nid, d.stream_ordering
),
member AS (
    SELECT c.event_nid
    FROM room r
    JOIN current_state c USING (room_nid)
    WHERE c.state_key_nid NOT IN (SELECT state_key_nid FROM later) {current}
    UNION ALL
    SELECT event_nid
    FROM later
)
"""

TEMPLATE_MEMBER_BELOW: Final[LiteralString] = """
{last},
member AS (
    SELECT s.event_nid
    FROM last
    CROSS JOIN state_entries(last.state_group) AS s
)
"""

SQL_MEMBERS: Final[LiteralString] = compose(
    fill(
        TEMPLATE_MEMBERS,
        member=fill(
            TEMPLATE_MEMBER_THEN,
            covered=PART_COVERED,
            keys="JOIN state_keys k"
            " ON k.state_key_nid = d.state_key_nid AND k.type_nid = {TYPE_MEMBER}",
            # the condition of the result once more, so that fewer events are read
            current=PART_FILTERED_NOW,
        ),
        purged=PART_PURGED,
        event=PART_ROOM_EVENT,
        which=PART_FILTERED,
    ),
    room_id="text",
    upto="bigint",
    writers="text[]",
    writer_positions="bigint[]",
    wanted="smallint",
    unwanted="smallint",
).sql

SQL_STATE_THEN: Final[LiteralString] = compose(
    fill(
        TEMPLATE_MEMBERS,
        member=fill(TEMPLATE_MEMBER_THEN, covered=PART_COVERED, keys="", current=""),
        purged=PART_PURGED,
        event=PART_ROOM_EVENT,
        which="",
    ),
    room_id="text",
    upto="bigint",
    writers="text[]",
    writer_positions="bigint[]",
).sql

SQL_MEMBERS_BELOW: Final[LiteralString] = compose(
    fill(
        TEMPLATE_MEMBERS,
        member=fill(TEMPLATE_MEMBER_BELOW, last=PART_LAST_EVENT),
        purged="NULL::bigint AS purged_upto",
        event=PART_ROOM_EVENT,
        which=PART_FILTERED,
    ),
    room_id="text",
    topological="bigint",
    stream="bigint",
    live="bigint",
    wanted="smallint",
    unwanted="smallint",
).sql

SQL_LAST_STAY: Final[LiteralString] = fill("""
SELECT COALESCE(c.membership = {JOIN}, false) AS is_joined,
    COALESCE(m.forgotten AND m.membership < {KNOCK}, false) AS is_forgotten,
    v.last_join_topological IS NOT NULL OR stay.ended IS NOT NULL AS was_joined, stay.ended,
    (SELECT purged_upto FROM purged_streams WHERE stream_name = 'events') AS purged_upto
FROM rooms r
LEFT JOIN principals p ON p.name = $2::text
LEFT JOIN memberships m ON m.room_nid = r.room_nid AND m.principal_nid = p.principal_nid
LEFT JOIN visibility v ON v.room_nid = r.room_nid AND v.principal_nid = p.principal_nid
LEFT JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = $2::text
LEFT JOIN current_state c ON c.room_nid = r.room_nid AND c.state_key_nid = k.state_key_nid
LEFT JOIN LATERAL (  -- of one who is not joined: the last change that took them out
    SELECT d.stream_ordering AS ended
    FROM state_deltas d
    WHERE d.room_nid = r.room_nid AND d.state_key_nid = k.state_key_nid
        AND (SELECT e.membership = {JOIN} FROM events e WHERE e.event_nid = d.prev_event_nid)
    ORDER BY d.stream_ordering DESC
    LIMIT 1
) AS stay ON true
WHERE r.room_id = $1::text
""")

SQL_MEMBERSHIPS_OF: Final[LiteralString] = fill("""
SELECT r.room_id, m.membership
FROM principals p
JOIN memberships m USING (principal_nid)
JOIN rooms r USING (room_nid)
WHERE p.name = $1::text AND m.membership = ANY($2::smallint[])
    AND NOT (m.forgotten AND m.membership < {KNOCK})
UNION ALL  -- of another server: as far as the current state of a room has it
SELECT r.room_id, c.membership
FROM state_keys k
JOIN current_state c USING (state_key_nid)
JOIN rooms r USING (room_nid)
WHERE NOT $3::boolean AND k.type_nid = {TYPE_MEMBER} AND k.state_key = $1::text
    AND c.membership = ANY($2::smallint[])
""")

SQL_FORGET: Final[LiteralString] = fill("""
WITH
own AS MATERIALIZED (
    SELECT r.room_nid, p.principal_nid
    FROM rooms r
    LEFT JOIN principals p ON p.name = $2::text
    WHERE r.room_id = $1::text
),
gone AS (
    UPDATE memberships m
    SET forgotten = true
    FROM own
    WHERE m.principal_nid = own.principal_nid AND m.room_nid = own.room_nid
        AND m.membership < {KNOCK}
    RETURNING m.membership
)
SELECT COALESCE(m.membership, 0) AS membership, EXISTS (SELECT FROM gone) AS is_forgotten
FROM own
LEFT JOIN memberships m ON m.principal_nid = own.principal_nid AND m.room_nid = own.room_nid
""")


class MembershipRow(NamedTuple):
    """A membership as a number (0: none), and up to which the state changes are purged."""

    membership: int
    purged_upto: int | None


class MemberEventRow(NamedTuple):
    """A state event of the room, often a member event. None: there is none."""

    room_version: str
    purged_upto: int | None
    event: RoomEventRow | None


class StayRow(NamedTuple):
    """The last stay of a user in a room, and the position in the stream where it ended."""

    is_joined: bool
    is_forgotten: bool
    was_joined: bool
    ended: int | None
    purged_upto: int | None

    @property
    def has_left(self) -> bool:
        """Return whether the user was in the room, and is not any more."""
        return self.was_joined and not self.is_joined

    @property
    def end(self) -> RoomPosition | None:
        """Return where the stay ended. None: the state changes of that time are purged."""
        if self.ended is None or self.ended < (self.purged_upto or 0):
            return None
        return RoomPosition(VectorPosition(self.ended))


class UserRoomRow(NamedTuple):
    """A room of a user."""

    room_id: str
    membership: int


class ForgetRow(NamedTuple):
    """The membership of the user (0: none), and whether they have forgotten the room now."""

    membership: int
    is_forgotten: bool


EVENT: Final = span(MemberEventRow, "event")


async def membership(
    conn: Connection, room_id: RoomId, user_id: UserId, position: RoomPosition
) -> str | None:
    """Return the membership of a user at a position. None: there is none.

    It is that of the room's state, or of a local user out of band. `UnknownRoom`, `ResyncNeeded`.
    """
    if position.below is None:
        rows = await conn.fetch(
            SQL_MEMBERSHIP, room_id, *position.vector, user_id, row=MembershipRow
        )
    else:
        live = position.covered.min
        rows = await conn.fetch(
            SQL_MEMBERSHIP_BELOW, room_id, *position.below, live, user_id, row=MembershipRow
        )
    if not rows:
        raise UnknownRoom(room_id)
    position.refuse_purged(rows[0].purged_upto)
    return MEMBERSHIP_NAMES.get(rows[0].membership)


async def members(
    conn: Connection,
    room_id: RoomId,
    position: RoomPosition,
    *,
    membership: int | None,
    unwanted: int | None,
    reader: UserId | None = None,
) -> list[StoredEvent]:
    """Return the member events of the state at a position, in no order.

    ``membership``: only this membership; ``unwanted``: all others. ``reader``: of one who
    has left, not after that. `UnknownRoom`, `ResyncNeeded`.
    """
    if reader is not None and (stay := await _last_stay(conn, room_id, reader)).has_left:
        if (end := stay.end) is None:
            return []
        position = position._replace(covered=position.covered.meet(end.covered))
    if position.below is None:
        rows = await conn.records(
            SQL_MEMBERS, room_id, *position.vector, membership, unwanted, row=MemberEventRow
        )
    else:
        bounds = *position.below, position.covered.min
        rows = await conn.records(
            SQL_MEMBERS_BELOW, room_id, *bounds, membership, unwanted, row=MemberEventRow
        )
    if not rows:
        raise UnknownRoom(room_id)
    position.refuse_purged(rows[0][1])
    return await _events(room_id, rows)


async def state_at_leave(conn: Connection, user_id: UserId, room_id: RoomId) -> list[StoredEvent]:
    """Return the state at the end of a user's last stay, in no order. `UnknownRoom`.

    There is none of one who is joined, was never in the room, or has forgotten it.
    """
    stay = await _last_stay(conn, room_id, user_id)
    if not stay.has_left or stay.is_forgotten or (end := stay.end) is None:
        return []
    rows = await conn.records(SQL_STATE_THEN, room_id, *end.vector, row=MemberEventRow)
    return await _events(room_id, rows)


async def _last_stay(conn: Connection, room_id: RoomId, user_id: UserId) -> StayRow:
    row = await conn.fetchrow(SQL_LAST_STAY, room_id, user_id, row=StayRow)
    if row is None:
        raise UnknownRoom(room_id)
    return row


async def _events(room_id: RoomId, rows: Sequence[Sequence[Any]]) -> list[StoredEvent]:
    events: list[StoredEvent] = []
    async for part in parts(rows):
        events += (event_of_room(room_id, row[0], row[EVENT]) for row in part if row[EVENT.start])
    return events


async def memberships_of(
    conn: Connection, user_id: UserId, memberships: Collection[int], *, is_local: bool
) -> dict[RoomId, str]:
    """Return the rooms in which a user has one of these memberships, with it.

    Of a local user also memberships out of band, and not the rooms that they have forgotten.
    """
    rows = await conn.fetch(
        SQL_MEMBERSHIPS_OF, user_id, list(memberships), is_local, row=UserRoomRow
    )
    return {RoomId(row.room_id): MEMBERSHIP_NAMES[row.membership] for row in rows}


async def forget(conn: Connection, user_id: UserId, room_id: RoomId) -> None:
    """Mark a room as forgotten by a local user; without a membership there is nothing to mark.

    `UnknownRoom`, `InputError` for a user who is joined, invited or knocking.
    """
    row = await conn.fetchrow(SQL_FORGET, room_id, user_id, row=ForgetRow)
    if row is None:
        raise UnknownRoom(room_id)
    if row.membership > MEMBERSHIPS["leave"] and not row.is_forgotten:
        name = MEMBERSHIP_NAMES[row.membership]
        raise InputError(f"the membership of {user_id} in {room_id} is {name}: leave it first")


# --------------------------------------------------------------------------------------------------
# The servers that are joined to a room: now, and in the state before an event.
#
# `visibility` has a row for each server with users in the room. Its `joined_count` is of the
# current state. For another state the ranges of its audiences say whether a user of it was joined:
# an audience is a set of principals, and that of a state group is the set at this state.
#
# Of a room with a partial state these servers are too few. So the servers that were in the room
# before the join are added: an event must reach all of them.

SQL_JOINED_SERVERS: Final[LiteralString] = """
SELECT ARRAY(
    SELECT p.name
    FROM visibility v
    JOIN principals p USING (principal_nid)
    -- no local user: theirs is the topological ordering of a join, and a name with @
    WHERE v.room_nid = r.room_nid AND v.last_join_topological IS NULL AND v.joined_count > 0
        AND left(p.name, 1) <> '@'
    UNION
    SELECT unnest(p.servers)
    FROM partial_rooms p
    WHERE r.is_partial AND p.room_nid = r.room_nid
) AS servers
FROM rooms r
WHERE r.room_id = $1::text
"""

SQL_JOINED_SERVERS_AT: Final[LiteralString] = fill("""
WITH at AS MATERIALIZED (
    SELECT r.room_nid, r.is_partial, e.event_nid, e.outlier, g.audience
    FROM rooms r
    LEFT JOIN events e ON e.room_nid + 0 = r.room_nid AND e.event_id = $2::text
    LEFT JOIN state_groups g ON g.state_group = e.state_group_before
    WHERE r.room_id = $1::text
)
SELECT at.event_nid IS NOT NULL AS is_stored, at.audience IS NOT NULL AS has_state, ARRAY(
    SELECT p.name
    FROM visibility v
    JOIN principals p USING (principal_nid)
    WHERE v.room_nid = at.room_nid AND v.last_join_topological IS NULL AND left(p.name, 1) <> '@'
        -- not everybody, not the shared audiences; + 0: the primary key leads over all members
        AND v.principal_nid + 0 > {PRINCIPAL_SHARED}
        AND CASE
            WHEN at.audience < v.first_audience
                THEN joined_before(v.room_nid, v.principal_nid, at.audience)
            ELSE v.audiences @> at.audience
                AND NOT COALESCE(v.invited_audiences @> at.audience, false)
        END
    UNION
    SELECT unnest(p.servers)
    FROM partial_rooms p
    WHERE at.is_partial AND p.room_nid = at.room_nid
) AS servers
FROM at
""")


class ServersRow(NamedTuple):
    """The servers of a room."""

    servers: list[str]


class ServersAtRow(NamedTuple):
    """The servers in the state before an event, if it is stored with its state."""

    is_stored: bool
    has_state: bool
    servers: list[str]


async def joined_servers(conn: Connection, room_id: RoomId) -> set[ServerName]:
    """Return the servers with a user who is joined in the room's current state. `UnknownRoom`."""
    row = await conn.fetchrow(SQL_JOINED_SERVERS, room_id, row=ServersRow)
    if row is None:
        raise UnknownRoom(room_id)
    return set(map(ServerName, row.servers))


async def joined_servers_at(
    conn: Connection, room_id: RoomId, event_id: EventId
) -> set[ServerName]:
    """Return the servers with a user who is joined in the state before an event of the room.

    `UnknownRoom`; `UnknownEvent`, also for an event of another room; `StateUnknown` for an outlier.
    """
    row = await conn.fetchrow(SQL_JOINED_SERVERS_AT, room_id, event_id, row=ServersAtRow)
    if row is None:
        raise UnknownRoom(room_id)
    if not row.is_stored:
        raise UnknownEvent(event_id)
    if not row.has_state:
        raise StateUnknown(event_id)
    return set(map(ServerName, row.servers))


# --------------------------------------------------------------------------------------------------
# The ids of the members of a room with one membership.
#
# A room may have 50,000 of them, and their names are in another table. So the statement looks the
# names up by an array of their numbers, which reads each page of the index once. It returns them as
# one text, because the driver takes as long for a row of each as the look-up.
#
# The current state of a room has a state group, and the content of a group never changes. A process
# remembers the ids with their group, and gets no names as long as the room has the same group.

SQL_MEMBER_IDS: Final[LiteralString] = """
SELECT r.current_state_group AS state_group, member.id_count, member.user_ids
FROM rooms r
CROSS JOIN LATERAL (
    SELECT count(*) AS id_count, string_agg(k.state_key, E'\\n') AS user_ids
    FROM state_keys k
    WHERE r.current_state_group IS DISTINCT FROM $3::bigint AND k.state_key_nid = ANY(ARRAY(
        SELECT c.state_key_nid
        FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = $2::smallint
    ))
) AS member
WHERE r.room_id = $1::text
"""

SQL_MEMBER_IDS_APART: Final[LiteralString] = """
SELECT k.state_key
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
WHERE r.room_id = $1::text AND c.membership = $2::smallint
"""


class MemberIdsRow(NamedTuple):
    """The state group of the current state, and the ids, one a line.

    There are none if the group is the one that the caller knows.
    """

    state_group: int | None
    id_count: int
    user_ids: str | None


async def member_ids(
    conn: Connection, room_id: RoomId, membership: int, cached: MemberIds | None
) -> MemberIds:
    """Return the users with this membership in the room's current state, in no order.

    The result is ``cached`` where that is still right. `UnknownRoom`.
    """
    group = None if cached is None else cached.state_group
    row = await conn.fetchrow(SQL_MEMBER_IDS, room_id, membership, group, row=MemberIdsRow)
    if row is None:
        raise UnknownRoom(room_id)
    if cached is not None and row.state_group == cached.state_group:
        return cached
    ids: list[Any] = row.user_ids.split("\n") if row.user_ids else []
    if len(ids) != row.id_count:  # an id has a line break
        return MemberIds(None, await conn.fetchvals(SQL_MEMBER_IDS_APART, room_id, membership))
    return MemberIds(row.state_group, ids)
