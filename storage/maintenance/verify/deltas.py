"""Check `state_deltas`: the changes of the current state, each at its position of the stream.

The deltas of a key are a chain: each begins with the value at which the one before it ended, and
the last ends at the current state. A chain begins with nothing, unless a purge deleted its
beginning. Then the state at the beginning is the current one with all changes undone.

From there the check applies the changes in the order of the stream. Wherever one event is the only
forward extremity (`current_replay`), the result must be the state after that event. So a change
without a delta is found, too. Before the position at which the state of a partial room was
completed, or deltas were repaired, only the chains are checked: the states of the events are newer
than the deltas.

Its memory is that of the current state, and of one page of events.
"""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.maintenance.verify.current import current_entries
from storage.maintenance.verify.current_replay import replayed_groups
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import BATCH, BEFORE_ALL, VerifiedRoom, event_ids
from storage.state.groups import Group, digest_of, entry_digest, signed

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
    ahead = await anext(deltas, None)
    upto = max(cut or 0, room.row.completed_at or 0)
    async for point in replayed_groups(conn, room, after=upto, is_cut=cut is not None):
        is_changed = point.is_new
        while ahead is not None and ahead.stream_ordering <= point.stream_ordering:
            state = state.changed(ahead.state_key_nid, ahead.event_nid)
            is_changed, ahead = True, await anext(deltas, None)
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

    def side(place: int) -> str:
        named = (f"state key {key}: {_named(pair[place], ids)}" for key, pair in shown.items())
        return "; ".join([*named, *more])

    return side(0), side(1)


def _named(nid: int | None, ids: Mapping[int, str]) -> str:
    return ids[nid] if nid else "nothing"


def _finding(room: VerifiedRoom, row: StateDeltaRow, found: str, expected: str) -> Finding:
    subject = [f"position {row.stream_ordering}", f"state key {row.state_key_nid}"]
    return room.finding("state_deltas", subject, found, expected)
