"""The gaps of a room: missing parents, what is known of each, and when to request it again.

The events that name a missing parent say what is known of it. A homeserver reports failed requests
with `gap_failed`: each failure doubles the pause until the next attempt. The pause ends early when
a server that failed is up again (`server_up`, REMOTE_SERVER_UP of the replication protocol). When
the event arrives, its gap is closed, and the failures are forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, require_room
from storage.database.placeholders import compose, fill
from storage.errors import PartialState, UnknownRoom
from storage.ids import EventId, RoomId, ServerName, StateKey

REASON_MAX: Final = 1_000  # characters of a reason
# The pause before a missing event is requested again; it doubles with each failure.
RETRY_MS_FIRST: Final = 60_000
RETRY_MS_MAX: Final = 86_400_000  # a day

SQL_GAPS: Final[LiteralString] = """
SELECT m.event_id, c.ids AS child_ids, c.lowest, c.depth, c.seen_ts,
    COALESCE(f.failures, 0) AS failures, f.reason, f.failed_ts,
    GREATEST(f.retry_ts - $2::bigint, 0) AS retry_after_ms
FROM rooms r
JOIN missing_events m USING (room_nid)
LEFT JOIN gap_failures f USING (event_nid)
CROSS JOIN LATERAL (
    SELECT array_agg(e.event_id ORDER BY e.topological_ordering, e.stream_ordering) AS ids,
        min(e.topological_ordering) AS lowest,
        min(claimed_depth(e.depth, e.topological_ordering)) AS depth,
        min(e.received_ts) AS seen_ts
    FROM events e
    WHERE e.event_nid = ANY(m.child_nids)
) AS c
WHERE r.room_id = $1::text
ORDER BY c.lowest DESC, m.event_id
"""

# It leaves out history from before this server was in the room, and before its return, which begins
# with a join of a local user. It also leaves out what a purge has deleted: the children of that
# were received before the purge.
SQL_UNFILLED: Final[LiteralString] = fill("""
SELECT m.event_id
FROM rooms r
JOIN principals p ON p.name = $2::text
CROSS JOIN LATERAL visibility_of(r.room_nid, p.principal_nid) AS v
JOIN missing_events m ON m.room_nid = r.room_nid
WHERE r.room_id = $1::text AND EXISTS (
    SELECT
    FROM events c
    JOIN principals s ON s.principal_nid = c.sender_nid
    WHERE c.event_nid = ANY(m.child_nids) AND c.received_ts >= $3::bigint
        AND NOT (c.type_nid = {TYPE_MEMBER} AND substr(s.name, strpos(s.name, ':') + 1) = $2::text)
        AND NOT EXISTS (
            SELECT
            FROM purge_jobs j
            WHERE j.room_nid = c.room_nid AND j.started_ts >= c.received_ts
        )
        AND (was_there(c, v.joined_since, v.joined_audiences)
            OR was_there_before(c, v.reader_nid, v.unread))
)
""")

SQL_FAILED: Final[LiteralString] = compose(
    """
WITH gap AS (
    SELECT m.event_nid
    FROM rooms r
    JOIN missing_events m USING (room_nid)
    WHERE r.room_id = :room_id AND m.event_id = ANY(:event_ids)
    ORDER BY m.event_nid
    FOR KEY SHARE OF m
)
INSERT INTO gap_failures (event_nid, failures, failed_ts, retry_ts, reason, servers)
SELECT event_nid, 1, :now_ms, :now_ms + :retry_ms, :reason, :servers
FROM gap
ON CONFLICT (event_nid) DO UPDATE SET
    failures = gap_failures.failures + 1,
    failed_ts = EXCLUDED.failed_ts,
    retry_ts = EXCLUDED.failed_ts + LEAST(:retry_ms_max,
        :retry_ms * 2 ^ LEAST(gap_failures.failures, 40))::bigint,
    reason = EXCLUDED.reason,
    servers = ARRAY(SELECT DISTINCT unnest(gap_failures.servers || EXCLUDED.servers) ORDER BY 1)
""",
    room_id="text",
    event_ids="text[]",
    now_ms="bigint",
    reason="text",
    servers="text[]",
    retry_ms="bigint",
    retry_ms_max="bigint",
).sql

SQL_SERVER_UP: Final[LiteralString] = """
UPDATE gap_failures
SET failures = 0, retry_ts = failed_ts
WHERE ($1::text = ANY(servers) OR servers = '{}') AND failures > 0
"""


class OpenGapRow(NamedTuple):
    """One missing event."""

    event_id: str
    child_ids: list[str] | None
    lowest: int | None
    depth: int | None
    seen_ts: int | None
    failures: int
    reason: str | None
    failed_ts: int | None
    retry_after_ms: int | None


class UnfilledRow(NamedTuple):
    """A missing event."""

    event_id: str


@dataclass(frozen=True, slots=True)
class OpenGap:
    """A missing event that stored events name as parent.

    ``children`` name it, lowest first. It belongs below the topological ordering ``below``. The
    claimed depth of a child is ``depth``, and the first of them was received at ``seen_ts``.
    ``failures`` counts since a server was last up. The last one was at ``failed_ts`` for this
    ``reason`` (None: never). ``retry_after_ms``: 0 if you may request it now.
    """

    event_id: EventId
    children: tuple[EventId, ...]
    below: int
    depth: int
    seen_ts: int
    failures: int
    reason: str | None
    failed_ts: int | None
    retry_after_ms: int


async def gaps(conn: Connection, room_id: RoomId, now_ms: int) -> list[OpenGap]:
    """Return the gaps of a room, the latest in topological order first. `UnknownRoom`."""
    rows = await conn.fetch(SQL_GAPS, room_id, now_ms, row=OpenGapRow)
    if not rows:
        await require_room(conn, room_id)
    return [_gap(row) for row in rows]


def _gap(row: OpenGapRow) -> OpenGap:
    return OpenGap(
        event_id=EventId(row.event_id),
        children=tuple(EventId(child_id) for child_id in row.child_ids or ()),
        below=row.lowest or 0,
        depth=row.depth or 0,
        seen_ts=row.seen_ts or 0,
        failures=row.failures,
        reason=row.reason,
        failed_ts=row.failed_ts,
        retry_after_ms=row.retry_after_ms or 0,
    )


async def unfilled(
    conn: Connection, room_id: RoomId, server_name: str, since_ms: int
) -> set[EventId]:
    """Return the missing events that this server would have if it had received everything.

    Their children were received since a time, while a local user was in the room.
    """
    rows = await conn.fetch(SQL_UNFILLED, room_id, server_name, since_ms, row=UnfilledRow)
    return {EventId(row.event_id) for row in rows}


async def gap_failed(
    conn: Connection,
    room_id: RoomId,
    event_ids: Sequence[EventId],
    reason: str,
    *,
    servers: Sequence[ServerName],
    now_ms: int,
) -> None:
    """Store that requests for these events failed. Ids without a gap are skipped. `UnknownRoom`."""
    pauses = RETRY_MS_FIRST, RETRY_MS_MAX
    status = await conn.execute(
        SQL_FAILED, room_id, event_ids, now_ms, reason[:REASON_MAX], servers, *pauses
    )
    if status.endswith(" 0"):
        await require_room(conn, room_id)


async def server_up(conn: Connection, server_name: ServerName) -> None:
    """End the pause of the events that this server failed to return, or an unnamed server."""
    await conn.execute(SQL_SERVER_UP, server_name)


# --------------------------------------------------------------------------------------------------
# Rooms with a partial state: which they are, and what their state does not say yet.
#
# This server has joined such a room with the members omitted (MSC3706). The states from that join
# on lack members, so some requests have no right answer until the rest is stored. They raise
# `PartialState`:
#
#   a whole state      state_ids from the join on
#   reads of servers   whether a server is in the room is not certain, so it gets nothing
#   memberships        a local user's event about a user whose membership is not known
#
# Everything else answers from the known members.

SQL_PARTIAL_ROOMS: Final[LiteralString] = """
SELECT r.room_id, p.join_event_id, p.origin, p.servers, p.began_ts
FROM partial_rooms p
JOIN rooms r USING (room_nid)
JOIN events joined ON joined.event_id = p.join_event_id AND NOT joined.outlier
ORDER BY p.began_ts, r.room_id
"""

SQL_IS_PARTIAL: Final[LiteralString] = """
SELECT is_partial
FROM rooms
WHERE room_id = $1::text
"""

SQL_IS_MEMBER_UNKNOWN: Final[LiteralString] = fill("""
SELECT EXISTS (
    SELECT
    FROM rooms r
    WHERE r.room_id = $1::text AND r.is_partial AND NOT EXISTS (
        SELECT
        FROM state_keys k
        JOIN current_state c USING (state_key_nid)
        WHERE k.type_nid = {TYPE_MEMBER} AND k.state_key = $2::text AND c.room_nid = r.room_nid
    )
)
""")

SQL_OWN_MEMBERS: Final[LiteralString] = fill("""
SELECT k.state_key, e.event_id
FROM rooms r
JOIN current_state c USING (room_nid)
JOIN state_keys k USING (state_key_nid)
JOIN events e ON e.event_nid = c.event_nid
WHERE r.room_id = $1::text AND c.membership <> {JOIN}
    AND right(k.state_key, length($2::text) + 1) = ':' || $2::text
""")


@dataclass(frozen=True, slots=True)
class PartialRoom:
    """A room of which members are missing.

    ``join_event_id`` is the join with which this server entered it, ``origin`` the server that
    answered, and ``servers`` are those in the room before the join, as the origin says.
    ``since_ms`` is the time of the answer.
    """

    room_id: RoomId
    join_event_id: EventId
    origin: ServerName
    servers: frozenset[ServerName]
    since_ms: int


class PartialRoomRow(NamedTuple):
    """A row of `partial_rooms`."""

    room_id: str
    join_event_id: str
    origin: str
    servers: list[str]
    began_ts: int


class OwnMemberRow(NamedTuple):
    """A local user and the event of their membership."""

    state_key: str
    event_id: str


async def partial_rooms(conn: Connection) -> list[PartialRoom]:
    """Return the rooms with a partial state, the one that waits longest first."""
    return [
        PartialRoom(
            RoomId(row.room_id),
            EventId(row.join_event_id),
            ServerName(row.origin),
            frozenset(map(ServerName, row.servers)),
            row.began_ts,
        )
        for row in await conn.fetch(SQL_PARTIAL_ROOMS, row=PartialRoomRow)
    ]


async def own_members(
    conn: Connection, room_id: RoomId, server_name: str
) -> dict[StateKey, EventId]:
    """Return the memberships of local users who have left a room, from an earlier stay.

    Give them as part of the state before the join, unless the answer has others. Without them, an
    old fork in which these users are joined would let them in again.
    """
    rows = await conn.fetch(SQL_OWN_MEMBERS, room_id, server_name, row=OwnMemberRow)
    return {("m.room.member", row.state_key): EventId(row.event_id) for row in rows}


async def refuse_partial(conn: Connection, room_id: RoomId) -> None:
    """Raise `PartialState` if members of the room are missing. `UnknownRoom`."""
    is_partial = await conn.fetchval(SQL_IS_PARTIAL, room_id)
    if is_partial is None:
        raise UnknownRoom(room_id)
    if is_partial:
        raise PartialState(room_id)


async def refuse_unknown_member(conn: Connection, room_id: RoomId, user_id: str) -> None:
    """Raise `PartialState` if it is not known whether a user is a member of the room."""
    if await conn.fetchval(SQL_IS_MEMBER_UNKNOWN, room_id, user_id):
        raise PartialState(room_id)
