"""Check the tables that repeat the current state: by key, and by local user."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.database.placeholders import compose, fill
from storage.maintenance.verify.event_loader import (
    BATCH,
    BEFORE_ALL,
    Finding,
    VerifiedRoom,
    event_ids,
)
from storage.state.groups import Group, digest_of, entry_digest, signed

SQL_CURRENT: Final[LiteralString] = """
SELECT state_key_nid, event_nid, membership
FROM current_state
WHERE room_nid = $1::int
"""

SQL_COUNTS: Final[LiteralString] = fill("""
SELECT r.joined_count, r.invited_count,
    (SELECT count(*)::int FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = {JOIN}) AS joined,
    (SELECT count(*)::int FROM current_state c
        WHERE c.room_nid = r.room_nid AND c.membership = {INVITE}) AS invited
FROM rooms r
WHERE r.room_nid = $1::int
""")

SQL_STATE_EVENTS: Final[LiteralString] = fill("""
SELECT e.event_nid, e.membership, e.state_key_nid, k.state_key,
    e.type_nid = {TYPE_MEMBER} AS is_member,
    e.outlier OR (e.backfilled AND e.rejected IS NULL AND NOT e.soft_failed) AS is_outside
FROM events e
CROSS JOIN LATERAL (
    SELECT state_key FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
WHERE e.event_nid = ANY($1::bigint[])
""")

SQL_MEMBERSHIPS: Final[LiteralString] = """
SELECT COALESCE(p.name, 'principal ' || m.principal_nid) AS user_id, m.event_nid, m.membership
FROM memberships m
LEFT JOIN principals p USING (principal_nid)
WHERE m.room_nid = $1::int
"""


# the last change of the user's membership, or a later position of the room at which an earlier
# membership was overruled or the room was completed
SQL_MEMBER_POSITIONS: Final[LiteralString] = fill("""
SELECT p.name AS user_id, m.stream_ordering AS found, d.stream_ordering AS expected,
    m.writer_nid AS found_writer, COALESCE(d.writer_nid, e.writer_nid) AS expected_writer
FROM memberships m
JOIN principals p USING (principal_nid)
JOIN state_keys k ON k.type_nid = {TYPE_MEMBER} AND k.state_key = p.name
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
""")

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
                conn,
                [event_nid for event_nid in (nid, row and row.event_nid) if event_nid is not None],
            )
            actual = (
                "nothing"
                if row is None
                else f"{ids[row.event_nid]} with membership {row.membership}"
            )
            expected = "nothing" if nid is None else f"{ids[nid]} with membership {membership}"
            yield room.finding("current_state", [f"state key {key}"], actual, expected)


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
        expected = (0, 0) if event is None else (event.event_nid, event.membership or 0)
        if row is None:
            if event is not None:
                yield room.finding("memberships", [user], "nothing", _described(expected))
        elif (row.event_nid, row.membership) != expected and (
            is_resident or not _out_of_band(row, events.get(row.event_nid))
        ):
            yield room.finding(
                "memberships",
                [user],
                _described((row.event_nid, row.membership)),
                _described(expected),
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


# --------------------------------------------------------------------------------------------------
# Replay the forward extremities of a room, to know when one event alone gave its current state.
#
# An accepted live event becomes an extremity, and its parents are none any more. Events that can be
# no extremity are transparent: their parents are superseded, too (`extremities_after` in
# storage/persist/plan/topology.py). An event that arrives after its children does the same then.
# Each transparent event is passed once.
#
# Where the replay cannot know an extremity that was dropped or purged, it has too many, and yields
# less. It never yields a state that was not the current one.

SQL_STREAM: Final[LiteralString] = compose(
    """
SELECT event_nid, stream_ordering, COALESCE(state_group_after, state_group_before) AS state_group,
    rejected IS NULL AND NOT soft_failed AND NOT backfilled AS may_end, backfilled, event_id,
    :prev_nids.call AS prev_events
FROM events
WHERE room_nid = $1::int AND NOT outlier AND NOT backfilled AND stream_ordering > $2::bigint
ORDER BY stream_ordering
LIMIT $3::bigint
""",
    PREV_NIDS,
).sql

SQL_NAMED: Final[LiteralString] = compose(
    """
SELECT e.event_nid, e.stream_ordering,
    COALESCE(e.state_group_after, e.state_group_before) AS state_group,
    e.rejected IS NULL AND NOT e.soft_failed AND NOT e.backfilled AS may_end, e.backfilled,
    e.event_id, :prev_nids.call(e) AS prev_events
FROM unnest($2::bigint[]) AS n (event_nid)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = n.event_nid OFFSET 0) AS e
WHERE e.room_nid = $1::int AND NOT e.outlier
""",
    PREV_NIDS,
).sql

SQL_LAST_GAP: Final[LiteralString] = """
SELECT max(e.stream_ordering)
FROM missing_events m
CROSS JOIN LATERAL unnest(m.child_nids) AS c (event_nid)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = c.event_nid OFFSET 0) AS e
WHERE m.room_nid = $1::int
"""


class ReplayedEventRow(NamedTuple):
    """An event of the timeline. ``may_end``: it can be a forward extremity."""

    event_nid: int
    stream_ordering: int
    state_group: int
    may_end: bool
    backfilled: bool
    event_id: str
    prev_events: list[int]


class CurrentPoint(NamedTuple):
    """An event that is the only forward extremity at a position, and the state after it.

    ``is_new``: the state differs from that of the point before.
    """

    stream_ordering: int
    event_id: str
    state_group: int
    is_new: bool


class CurrentReplay:
    """The extremities at a position, and the events that were named but have not arrived."""

    def __init__(self, conn: Connection, room_nid: int) -> None:
        self._conn = conn
        self._room_nid = room_nid
        self._named: set[int] = set()
        self._passed: set[int] = set()
        # named events that arrive as history, by position
        self._late: list[tuple[int, int]] = []
        self._known: dict[int, ReplayedEventRow] = {}
        self.extremities: dict[int, ReplayedEventRow] = {}

    async def begin(self, rows: Iterable[ReplayedEventRow]) -> None:
        """Load what a page of events names, and forget the page before."""
        self._known = {row.event_nid: row for row in rows}
        await self._load_named([nid for row in rows for nid in row.prev_events])

    async def arrive(self, row: ReplayedEventRow) -> None:
        """Store an event, and before it the history that filled gaps."""
        while self._late and self._late[0][0] < row.stream_ordering:
            _, nid = heappop(self._late)
            await self._load_named([nid])
            await self._store(self._known[nid])
        await self._store(row)

    async def _store(self, row: ReplayedEventRow) -> None:
        """Make an event an extremity, unless a descendant of it arrived before."""
        is_named = row.event_nid in self._named
        self._named.discard(row.event_nid)
        if is_named and not row.may_end:
            self._passed.add(row.event_nid)
        if is_named or row.may_end:
            await self._supersede(row.prev_events, row.stream_ordering)
        if row.may_end and not is_named:
            self.extremities[row.event_nid] = row

    async def _supersede(self, nids: Iterable[int], at: int) -> None:
        """Take these events, and those below transparent ones, out of the extremities."""
        queue = list(nids)
        while queue:
            await self._load_named([nid for nid in queue if nid not in self.extremities])
            below: list[int] = []
            for nid in queue:
                row = self.extremities.pop(nid, None) or self._known.get(nid)
                if row is None or row.stream_ordering > at:
                    if row is not None and row.backfilled and nid not in self._named:
                        heappush(self._late, (row.stream_ordering, nid))
                    self._named.add(nid)
                elif not row.may_end and nid not in self._passed:
                    self._passed.add(nid)
                    below += row.prev_events
            queue = below

    async def _load_named(self, nids: Iterable[int]) -> None:
        """Load these events, as far as they are in the timeline."""
        lacking = list({nid for nid in nids if nid not in self._known})
        if lacking:
            rows = await self._conn.fetch(SQL_NAMED, self._room_nid, lacking, row=ReplayedEventRow)
            self._known.update((row.event_nid, row) for row in rows)


async def replayed_groups(
    conn: Connection, room: VerifiedRoom, *, after: int, is_cut: bool
) -> AsyncIterator[CurrentPoint]:
    """Yield the points above a position at which one event alone gave the current state.

    ``is_cut``: history was purged. Then extremities of the past may be unknown as long as live
    events name events that are not stored.
    """
    if is_cut:
        after = max(after, await conn.fetchval(SQL_LAST_GAP, room.nid) or 0)
    replay = CurrentReplay(conn, room.nid)
    position, group = 0, 0
    while rows := await conn.fetch(SQL_STREAM, room.nid, position, BATCH, row=ReplayedEventRow):
        await replay.begin(rows)
        for row in rows:
            await replay.arrive(row)
            if row.stream_ordering > after and len(replay.extremities) == 1:
                [end] = replay.extremities.values()
                is_new = end.state_group != group
                yield CurrentPoint(row.stream_ordering, end.event_id, end.state_group, is_new)
                group = end.state_group
        position = rows[-1].stream_ordering


# --------------------------------------------------------------------------------------------------
# Check `state_deltas`: the changes of the current state, each at its position of the stream.
#
# The deltas of a key are a chain: each begins with the value at which the one before it ended, and
# the last ends at the current state. A chain begins with nothing, unless a purge deleted its
# beginning. Then the state at the beginning is the current one with all changes undone.
#
# From there the check applies the changes in the order of the stream. Wherever one event is the
# only forward extremity (`current_replay`), the result must be the state after that event. So a
# change without a delta is found, too. Before the position at which the state of a partial room was
# completed, or deltas were repaired, only the chains are checked: the states of the events are
# newer than the deltas.
#
# Its memory is that of the current state, and of one page of events.

SQL_DELTAS: Final[LiteralString] = """
SELECT d.stream_ordering, d.state_key_nid, d.event_nid, d.prev_event_nid,
    e.room_nid = $1::int AND e.state_key_nid = d.state_key_nid AS is_of_key,
    cause.room_nid = $1::int AS has_cause, cause.writer_nid = d.writer_nid AS is_of_writer
FROM (
    SELECT *
    FROM state_deltas
    WHERE room_nid = $1::int AND (stream_ordering, state_key_nid) > ($2::bigint, $3::int)
    ORDER BY stream_ordering, state_key_nid
    LIMIT $4::bigint
) AS d
LEFT JOIN LATERAL (
    SELECT room_nid, state_key_nid FROM events WHERE event_nid = d.event_nid OFFSET 0
) AS e ON true
LEFT JOIN LATERAL (
    SELECT room_nid, writer_nid FROM events WHERE stream_ordering = d.stream_ordering OFFSET 0
) AS cause ON true
ORDER BY d.stream_ordering, d.state_key_nid
"""

SQL_ARRIVALS: Final[LiteralString] = """
SELECT arrival_ordering
FROM events
WHERE room_nid = $1::int AND NOT outlier AND arrival_ordering = ANY($2::bigint[])
"""

# only what was purged of the history: the purge of a whole room ends the room
SQL_STREAM_CUT: Final[LiteralString] = """
SELECT max(stream_cut)
FROM purge_jobs
WHERE room_nid = $1::int
"""

SHOWN_MAX: Final = 5  # differing keys that a finding names


class StateDeltaRow(NamedTuple):
    """A delta.

    ``is_of_key``: its event is one of the room with its key, None if there is no such event.
    ``has_cause`` and ``is_of_writer``: the same of the event at its position.
    """

    stream_ordering: int
    state_key_nid: int
    event_nid: int | None
    prev_event_nid: int | None
    is_of_key: bool | None
    has_cause: bool | None
    is_of_writer: bool | None


class ChangedState(NamedTuple):
    """The current state at a position, from its changes; ``digest`` as in `Group`."""

    entries: dict[int, int]
    digest: int

    def changed(self, key: int, nid: int | None) -> "ChangedState":
        """Return the state with one key set, in the same dict."""
        before = self.entries.pop(key, None)
        if nid is not None:
            self.entries[key] = nid
        gained = 0 if nid is None else entry_digest(key, nid)
        lost = 0 if before is None else entry_digest(key, before)
        return ChangedState(self.entries, signed(self.digest + gained - lost))


async def check_deltas(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the changes of the current state by their chains and by the states of events."""
    cut = await conn.fetchval(SQL_STREAM_CUT, room.nid)
    start: dict[int, int | None] = {}
    async for finding in _check_chains(conn, room, start, cut):
        yield finding
    async for finding in _check_states(conn, room, start, cut):
        yield finding


async def stored_deltas(conn: Connection, room_nid: int) -> AsyncIterator[list[StateDeltaRow]]:
    """Yield pages of the deltas of a room, in the order of the stream."""
    at = (BEFORE_ALL, 0)
    while rows := await conn.fetch(SQL_DELTAS, room_nid, *at, BATCH, row=StateDeltaRow):
        yield rows
        at = (rows[-1].stream_ordering, rows[-1].state_key_nid)


async def _check_chains(
    conn: Connection, room: VerifiedRoom, start: dict[int, int | None], cut: int | None
) -> AsyncIterator[Finding]:
    """Check each delta and its chain; put the value before each chain into ``start``."""
    is_cut = cut is not None
    last: dict[int, int | None] = {}
    async for rows in stored_deltas(conn, room.nid):
        strange = await _strange(conn, room, rows, cut)
        for row in rows:
            key = row.state_key_nid
            before = last.get(key, row.prev_event_nid if is_cut else None)
            start.setdefault(key, before)
            for found, expected in (*strange.get(row, ()), *_smaller_faults(row)):
                yield _finding(room, row, found, expected)
            if before != row.prev_event_nid:
                ids = await event_ids(conn, [nid for nid in (before, row.prev_event_nid) if nid])
                yield _finding(
                    room,
                    row,
                    f"changed from {_named(row.prev_event_nid, ids)}",
                    f"from {_named(before, ids)}, the value before",
                )
            last[key] = row.event_nid
    entries = await current_entries(conn, room)
    if is_cut:
        start.update((key, nid) for key, nid in entries.items() if key not in start)
    keys = last.keys() if is_cut else last.keys() | entries.keys()
    wrong = {key: (last.get(key) or 0, entries.get(key, 0)) for key in keys}
    if wrong := {key: pair for key, pair in wrong.items() if pair[0] != pair[1]}:
        found, expected = await described(conn, wrong)
        yield room.finding("state_deltas", [room.row.room_id], f"end at {found}", expected)


async def strange_deltas(
    conn: Connection, room: VerifiedRoom, cut: int | None
) -> list[tuple[int, int]]:
    """Return the positions and keys of deltas with another event, or without a cause."""
    return [
        (row.stream_ordering, row.state_key_nid)
        async for rows in stored_deltas(conn, room.nid)
        for row in await _strange(conn, room, rows, cut)
    ]


async def _strange(
    conn: Connection, room: VerifiedRoom, rows: Iterable[StateDeltaRow], cut: int | None
) -> dict[StateDeltaRow, list[tuple[str, str]]]:
    """Return why deltas are of no event of their key, or at no position of an event of the room.

    The event of a delta may be purged; up to the cut, so may the event at its position. A refused
    event that was readmitted had another position.
    """
    upto = max(cut or 0, room.row.completed_at or 0)
    faults: dict[StateDeltaRow, list[tuple[str, str]]] = {}
    orphans: list[StateDeltaRow] = []
    for row in rows:
        is_purged = cut is not None and row.is_of_key is None
        if row.event_nid is not None and not row.is_of_key and not is_purged:
            found = f"event nid {row.event_nid}"
            faults[row] = [(found, "an event of the room with this state key")]
        if not row.has_cause and row.stream_ordering > upto:
            orphans.append(row)
    positions = [row.stream_ordering for row in orphans]
    arrivals = set(await conn.fetchvals(SQL_ARRIVALS, room.nid, positions)) if orphans else set()
    for row in orphans:
        if row.stream_ordering not in arrivals:
            fault = "a position without an event", "the position of an event of the room"
            faults.setdefault(row, []).append(fault)
    return faults


def _smaller_faults(row: StateDeltaRow) -> Iterator[tuple[str, str]]:
    if row.event_nid == row.prev_event_nid:
        yield "no change", "a change"
    if row.has_cause and not row.is_of_writer:
        yield "another writer", "the writer of the event at this position"


async def _check_states(
    conn: Connection, room: VerifiedRoom, start: Mapping[int, int | None], cut: int | None
) -> AsyncIterator[Finding]:
    """Compare the changed state with the state after each event that was the only extremity."""
    if room.row.is_partial:
        return
    entries = {key: nid for key, nid in start.items() if nid is not None}
    state = ChangedState(entries, digest_of(entries))
    deltas = (row async for rows in stored_deltas(conn, room.nid) for row in rows)
    delta = await anext(deltas, None)
    upto = max(cut or 0, room.row.completed_at or 0)
    async for point in replayed_groups(conn, room, after=upto, is_cut=cut is not None):
        is_changed = point.is_new
        while delta is not None and delta.stream_ordering <= point.stream_ordering:
            state = state.changed(delta.state_key_nid, delta.event_nid)
            is_changed, delta = True, await anext(deltas, None)
        if not is_changed:
            continue
        group = (await room.states.load(conn, [point.state_group])).get(point.state_group)
        if group is not None and group.digest != state.digest:
            found, expected = await described(conn, _differences(state, group))
            yield room.finding("state_deltas", [point.event_id], found, expected)
            state = ChangedState(dict(group.entries), group.digest)


def _differences(state: ChangedState, group: Group) -> dict[int, tuple[int, int]]:
    return {
        key: (state.entries.get(key, 0), group.entries.get(key, 0))
        for key in state.entries.keys() | set(group.entries)
        if state.entries.get(key) != group.entries.get(key)
    }


async def described(conn: Connection, wrong: Mapping[int, tuple[int, int]]) -> tuple[str, str]:
    """Describe differing keys, each with its found and its expected event."""
    shown = dict(sorted(wrong.items())[:SHOWN_MAX])
    ids = await event_ids(conn, (nid for pair in shown.values() for nid in pair if nid))
    more = [] if len(wrong) <= SHOWN_MAX else [f"{len(wrong) - SHOWN_MAX} more keys"]

    def side(index: int) -> str:
        named = (f"state key {key}: {_named(pair[index], ids)}" for key, pair in shown.items())
        return "; ".join([*named, *more])

    return side(0), side(1)


def _named(nid: int | None, ids: Mapping[int, str]) -> str:
    return ids[nid] if nid else "nothing"


def _finding(room: VerifiedRoom, row: StateDeltaRow, found: str, expected: str) -> Finding:
    subject = [f"position {row.stream_ordering}", f"state key {row.state_key_nid}"]
    return room.finding("state_deltas", subject, found, expected)
