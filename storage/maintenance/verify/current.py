"""Check the tables that repeat the current state: by key, and by local user."""

from collections.abc import AsyncIterator, Iterable
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import VerifiedRoom, event_ids

SQL_CURRENT: Final[LiteralString] = """
SELECT state_key_nid, event_nid, membership
FROM current_state
WHERE room_nid = $1::int
"""

SQL_COUNTS: Final[LiteralString] = """
SELECT r.joined_count, r.invited_count,
    (SELECT count(*)::int FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 5) AS joined,
    (SELECT count(*)::int FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = 4) AS invited
FROM rooms r
WHERE r.room_nid = $1::int
"""

SQL_STATE_EVENTS: Final[LiteralString] = """
SELECT e.event_nid, e.membership, e.state_key_nid, k.state_key, e.type_nid = 2 AS is_member,
    e.outlier OR (e.backfilled AND e.rejected IS NULL AND NOT e.soft_failed) AS is_outside
FROM events e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.event_nid = ANY($1::bigint[])
"""

SQL_MEMBERSHIPS: Final[LiteralString] = """
SELECT COALESCE(p.name, 'principal ' || m.principal_nid) AS user_id, m.event_nid, m.membership
FROM memberships m
LEFT JOIN principals p USING (principal_nid)
WHERE m.room_nid = $1::int
"""


# the last change of the user's membership, or a later position of the room at which an earlier
# membership was overruled or the room was completed
SQL_MEMBER_POSITIONS: Final[LiteralString] = """
SELECT p.name AS user_id, m.stream_ordering AS found, d.stream_ordering AS expected,
    m.writer_nid AS found_writer, COALESCE(d.writer_nid, e.writer_nid) AS expected_writer
FROM memberships m
JOIN principals p USING (principal_nid)
JOIN state_keys k ON k.type_nid = 2 AND k.state_key = p.name
CROSS JOIN LATERAL (
    SELECT stream_ordering, writer_nid
    FROM state_deltas
    WHERE room_nid = m.room_nid AND state_key_nid = k.state_key_nid
    ORDER BY stream_ordering DESC
    LIMIT 1
) AS d
LEFT JOIN LATERAL (
    SELECT writer_nid
    FROM events
    WHERE stream_ordering = m.stream_ordering AND room_nid = m.room_nid
    OFFSET 0
) AS e ON m.stream_ordering > d.stream_ordering
LEFT JOIN LATERAL (
    SELECT true AS is_fact
    FROM outlier_memberships o
    JOIN events x ON x.event_nid = o.event_nid
    WHERE o.stream_id = m.stream_ordering AND x.room_nid = m.room_nid
    OFFSET 0
) AS f ON m.stream_ordering > d.stream_ordering
WHERE m.room_nid = $1::int AND m.event_nid <> 0
    AND (
        m.stream_ordering < d.stream_ordering
        OR (m.stream_ordering > d.stream_ordering AND e.writer_nid IS NULL AND f.is_fact IS NULL)
        OR (m.stream_ordering = d.stream_ordering AND m.writer_nid <> d.writer_nid)
        OR m.writer_nid <> e.writer_nid
    )
ORDER BY 1
"""

SQL_LACKS_MARK: Final[LiteralString] = """
SELECT r.is_partial AND NOT EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = r.room_nid)
FROM rooms r
WHERE r.room_nid = $1::int
"""


class MemberPositionRow(NamedTuple):
    """A local user's membership at another position than that of its last change."""

    user_id: str
    found: int
    expected: int
    found_writer: int
    expected_writer: int


class CurrentEntryRow(NamedTuple):
    """An entry of the current state."""

    state_key_nid: int
    event_nid: int
    membership: int | None


class CountsRow(NamedTuple):
    """How many members a room has: as stored, and as counted."""

    joined_count: int
    invited_count: int
    joined: int
    invited: int


class StateEventRow(NamedTuple):
    """A state event. ``is_outside``: it can be newer than the current state that is stored."""

    event_nid: int
    membership: int | None
    state_key_nid: int
    state_key: str
    is_member: bool
    is_outside: bool


class LocalMembershipRow(NamedTuple):
    """A local user's membership."""

    user_id: str
    event_nid: int
    membership: int


async def check_current_state(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that the entries are those of the room's current state group ("current_state")."""
    entries = await current_entries(conn, room)
    found = {
        row.state_key_nid: row
        for row in await conn.fetch(SQL_CURRENT, room.nid, row=CurrentEntryRow)
    }
    events = await _state_events(conn, entries.values())
    for key in sorted(entries.keys() | found.keys()):
        row, nid = found.get(key), entries.get(key)
        membership = None if nid is None or nid not in events else events[nid].membership
        if (None if row is None else (row.event_nid, row.membership)) != (
            None if nid is None else (nid, membership)
        ):
            ids = await event_ids(
                conn, [one for one in (nid, row and row.event_nid) if one is not None]
            )
            actual = (
                "nothing"
                if row is None
                else f"{ids[row.event_nid]} with membership {row.membership}"
            )
            wanted = "nothing" if nid is None else f"{ids[nid]} with membership {membership}"
            yield room.finding("current_state", [f"state key {key}"], actual, wanted)


async def check_member_counts(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the numbers of joined and invited members by the current state ("member_counts")."""
    row = await conn.fetchrow(SQL_COUNTS, room.nid, row=CountsRow)
    if row is not None and row[:2] != row[2:]:
        yield room.finding("member_counts", [], f"joined, invited {row[:2]}", row[2:])


async def check_memberships(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check memberships of local users by the current state and out-of-band events ("memberships").

    An out-of-band event (an invite or knock over federation, or its end) may contradict the current
    state while no local user is joined, because this server may not have followed it. It must be
    the user's own, no join, and in the timeline only as accepted history.
    """
    entries = await current_entries(conn, room)
    state = {
        event.state_key: event
        for event in (await _state_events(conn, entries.values())).values()
        if event.is_member
    }
    local = {user: event for user, event in state.items() if user.endswith(f":{room.server_name}")}
    is_resident = any(event.membership == JOIN for event in local.values())
    rows = {
        row.user_id: row
        for row in await conn.fetch(SQL_MEMBERSHIPS, room.nid, row=LocalMembershipRow)
    }
    events = await _state_events(conn, (row.event_nid for row in rows.values()))
    for user in sorted(local.keys() | rows.keys()):
        row, event = rows.get(user), local.get(user)
        wanted = (0, 0) if event is None else (event.event_nid, event.membership or 0)
        if row is None:
            if event is not None:
                yield room.finding("memberships", [user], "nothing", _described(wanted))
        elif (row.event_nid, row.membership) != wanted and (
            is_resident or not _out_of_band(row, events.get(row.event_nid))
        ):
            yield room.finding(
                "memberships",
                [user],
                _described((row.event_nid, row.membership)),
                _described(wanted),
            )


async def check_member_positions(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check at which position memberships of local users changed ("memberships")."""
    for row in await conn.fetch(SQL_MEMBER_POSITIONS, room.nid, row=MemberPositionRow):
        found = f"changed at {row.found} by writer {row.found_writer}"
        expected = f"at {row.expected} by writer {row.expected_writer}"
        yield room.finding("memberships", [row.user_id], found, expected)


async def check_partial(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    if await conn.fetchval(SQL_LACKS_MARK, room.nid):
        yield room.finding("rooms", [room.row.room_id], "is_partial", "a row of partial_rooms")


async def current_entries(conn: Connection, room: VerifiedRoom) -> dict[int, int]:
    """Return the entries of the current state's group; empty if there is none that can be read."""
    number = room.row.current_state_group
    groups = await room.states.load(conn, [] if number is None else [number])
    return {key: nid for group in groups.values() for key, nid in group.entries.items()}


async def _state_events(conn: Connection, nids: Iterable[int]) -> dict[int, StateEventRow]:
    return {
        row.event_nid: row
        for row in await conn.fetch(SQL_STATE_EVENTS, list(nids), row=StateEventRow)
    }


def _out_of_band(row: LocalMembershipRow, event: StateEventRow | None) -> bool:
    """Return whether a row may have come with an outlier."""
    if event is None or not event.is_outside or event.state_key != row.user_id:
        return False
    return event.is_member and event.membership == row.membership and row.membership != JOIN


def _described(membership: tuple[int, int]) -> str:
    return f"membership {membership[1]} by event nid {membership[0]}"
