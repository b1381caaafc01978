"""Check the state before and after each event, and the current state, by resolving them again."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import OWN_ENTRIES, PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose, fill
from storage.maintenance.room_states import following
from storage.maintenance.verify.auth_graph import read_auth_graph
from storage.maintenance.verify.auth_results import Resolver
from storage.maintenance.verify.event_loader import (
    BATCH,
    EventLoader,
    Finding,
    TimelineRow,
    VerifiedRoom,
    event_ids,
    timeline,
)
from storage.state import paths
from storage.state.groups import Group, changed_keys

SQL_PARENTS: Final[LiteralString] = compose(
    """
SELECT event_nid, event_id, stream_ordering, topological_ordering, state_group_before,
    state_group_after,
    state_key_nid, soft_failed, rejected, :prev_nids.call AS prev_events
FROM events
WHERE event_nid = ANY($1::bigint[]) AND NOT outlier
""",
    PREV_NIDS,
).sql

SHOWN_MAX: Final = 5  # differing keys that a finding names


class StateCheck(NamedTuple):
    """The objects that the check of states shares."""

    room: VerifiedRoom
    contents: EventLoader
    resolver: Resolver


async def check_states(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the states before and after each event ("state_before", "state_after").

    The state before it is the resolution of those after its parents; after it, its own key is set.
    Where parents were missing when an event arrived, the state before it was given and is not
    checked. In a partial room a state may have keys that those after the parents lack: the members
    that the event cites (storage/persist/plan/partial_state.py).
    """
    states = await _states(conn, room)
    async for rows in timeline(conn, room.nid):
        parents = await _parents(conn, rows)
        numbers = {
            group
            for row in (*rows, *parents.values())
            for group in (row.state_group_before, row.after)
        }
        groups = await room.states.load(conn, numbers)
        used = {group for row in rows for group in (row.state_group_before, row.after)}
        for finding in _of_other_rooms(room, [groups[nr] for nr in sorted(used & groups.keys())]):
            yield finding
        for row in rows:
            lost = [group for group in {row.state_group_before, row.after} if group not in groups]
            for group in lost:
                yield room.finding(
                    "state_groups",
                    [f"state group {group}", row.event_id],
                    "cannot be read",
                    "a whole path",
                )
            if lost:
                continue
            stored_parents = [
                parents[nid]
                for nid in row.prev_events
                if nid in parents and parents[nid].stream_ordering < row.stream_ordering
            ]
            if len(stored_parents) == len(row.prev_events):
                async for finding in _before(conn, states, row, stored_parents, groups):
                    yield finding
            for finding in _after(room, row, groups):
                yield finding


async def check_current_group(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the current state group against the forward extremities ("current_state_group").

    It is the resolution of the states after them; in a partial room, of those that follow its join.
    """
    number = room.row.current_state_group
    extremities = await conn.fetch(SQL_PARENTS, room.row.forward_extremities, row=TimelineRow)
    groups = await room.states.load(
        conn, {*(end.after for end in extremities), *([] if number is None else [number])}
    )
    current = None if number is None else groups.get(number)
    for finding in _of_other_rooms(room, [] if current is None else [current]):
        yield finding
    if number is not None and current is None:
        yield room.finding(
            "state_groups", [f"state group {number}"], "cannot be read", "a whole path"
        )
    elif current is not None and not extremities and current.entries:
        yield room.finding(
            "current_state_group",
            [room.row.room_id],
            f"{len(current.entries)} entries",
            "the empty state",
        )
    elif current is not None and extremities and all(end.after in groups for end in extremities):
        states = await _states(conn, room)
        afters = [groups[end.after] for end in extremities]
        latest = max(end.stream_ordering for end in extremities)
        wrong = await _before_differs(conn, states, current, afters, latest)
        if wrong:
            found, expected = await _described(conn, states, wrong)
            yield room.finding(
                "current_state_group", [room.row.room_id, f"state group {number}"], found, expected
            )


def _of_other_rooms(room: VerifiedRoom, groups: Iterable[Group]) -> Iterator[Finding]:
    """Yield the groups that the room uses, though they are of another one or continue one of it."""
    for group in groups:
        if not room.states.is_of_room(group, room.nid):
            subject = [f"state group {group.state_group}"]
            yield room.finding("state_groups", subject, "groups of another room", "of this room")


async def _states(conn: Connection, room: VerifiedRoom) -> StateCheck:
    contents = EventLoader(room)
    graph = await read_auth_graph(conn, room.nid)
    return StateCheck(room, contents, Resolver(room.row.room_version, graph, contents))


async def _parents(conn: Connection, rows: Sequence[TimelineRow]) -> dict[int, TimelineRow]:
    parents = {row.event_nid: row for row in rows}
    lacking = {nid for row in rows for nid in row.prev_events} - parents.keys()
    parent_rows = await conn.fetch(SQL_PARENTS, list(lacking), row=TimelineRow)
    return parents | {row.event_nid: row for row in parent_rows}


async def _before(
    conn: Connection,
    states: StateCheck,
    row: TimelineRow,
    parents: Sequence[TimelineRow],
    groups: Mapping[int, Group],
) -> AsyncIterator[Finding]:
    before = groups[row.state_group_before]
    afters = {parent.after for parent in parents}
    if afters == {row.state_group_before} or not afters <= groups.keys():
        return
    wrong: dict[int, tuple[int, int]] = {}
    if not afters:
        wrong = {key: (nid, 0) for key, nid in before.entries.items()}
    else:
        wrong = await _before_differs(
            conn, states, before, [groups[after] for after in sorted(afters)], row.stream_ordering
        )
    if states.room.row.is_partial:
        wrong = {key: pair for key, pair in wrong.items() if pair[1]}
    if wrong:
        found, expected = await _described(conn, states, wrong)
        yield states.room.finding("state_before", [row.event_id], found, expected)


async def _before_differs(
    conn: Connection, states: StateCheck, found: Group, groups: Sequence[Group], before: int
) -> dict[int, tuple[int, int]]:
    """Return where a state before an event differs from the resolution of those after its parents.

    In a partial room it may be made of those alone that follow the join
    (`storage.persist.plan.partial_state`).
    """
    wrong = await _resolution_differs(conn, states, found, groups, before)
    if not states.room.row.is_partial or not any(expected for _, expected in wrong.values()):
        return wrong
    inside = await following(conn, states.room.nid, groups)
    if len(inside) == len(groups):
        return wrong
    return await _resolution_differs(conn, states, found, inside, before)


async def _resolution_differs(
    conn: Connection, states: StateCheck, found: Group, groups: Sequence[Group], before: int
) -> dict[int, tuple[int, int]]:
    """Return key -> (found, expected) where a state differs from the resolution of these states."""
    base = groups[0]
    answers = await states.resolver.resolve(conn, groups, before) if len(groups) > 1 else [{}]
    differing = changed_keys(found, base)
    wrong: dict[int, tuple[int, int]] = {}
    for answer in answers:
        expected = {
            key: answer.get(key, base.entries.get(key, 0)) for key in differing | answer.keys()
        }
        wrong = {
            key: (found.entries.get(key, 0), nid)
            for key, nid in expected.items()
            if found.entries.get(key, 0) != nid
        }
        if not wrong:
            break
    return wrong


async def _described(
    conn: Connection, states: StateCheck, wrong: Mapping[int, tuple[int, int]]
) -> tuple[str, str]:
    """Describe the differing keys: as found, and as expected."""
    shown = dict(sorted(wrong.items())[:SHOWN_MAX])
    await states.contents.load_keys(conn, shown)
    ids = await event_ids(conn, (nid for pair in shown.values() for nid in pair if nid))
    more = [] if len(wrong) <= SHOWN_MAX else [f"{len(wrong) - SHOWN_MAX} more keys"]

    def describe(side: int) -> str:
        entries = [
            f"{states.contents.keys[key]}: {ids.get(pair[side], 'nothing')}"
            for key, pair in shown.items()
        ]
        return "; ".join(entries + more)

    return describe(0), describe(1)


def _after(room: VerifiedRoom, row: TimelineRow, groups: Mapping[int, Group]) -> list[Finding]:
    before, after, key = groups[row.state_group_before], groups[row.after], row.state_key_nid
    if key is None or row.rejected is not None:
        changes: dict[int, int] = {}
    else:
        changes = {} if before.entries.get(key) == row.event_nid else {key: row.event_nid}
    found = {key_nid: after.entries.get(key_nid, 0) for key_nid in changed_keys(before, after)}
    if found == changes:
        return []
    keys = sorted(found)
    actual = (
        f"changes state keys {keys} to nids {[found[key_nid] for key_nid in keys]}"
        if found
        else "no change"
    )
    expected = f"state key {key} set to the event" if changes else "no change"
    return [room.finding("state_after", [row.event_id], actual, expected)]


# --------------------------------------------------------------------------------------------------
# Check the rows of state groups: paths, entries, sizes and digests.

SQL_GROUPS: Final[LiteralString] = """
SELECT state_group
FROM state_groups
WHERE room_nid = $1::int
ORDER BY path_of(state_group)
"""

SQL_GROUP_FACTS: Final[LiteralString] = """
SELECT g.state_group, g.digest, g.entry_count, path.parts AS path, g.runs,
    path_of(p.state_group) AS ancestor_path, p.room_nid AS ancestor_room_nid
FROM state_groups g
CROSS JOIN LATERAL (SELECT path_of(g.state_group) AS parts) AS path
LEFT JOIN state_groups p ON p.state_group = path.parts[cardinality(path.parts) - 1]
WHERE g.state_group = ANY($1::bigint[])
"""

SQL_WRONG_ENTRIES: Final[LiteralString] = compose(
    """
SELECT g.state_group, x.state_key_nid, x.event_nid, x.is_member, e.event_id,
    e.event_id IS NULL AND x.event_nid <> 0 AS is_lost,
    COALESCE(e.room_nid <> g.room_nid OR e.state_key_nid IS DISTINCT FROM x.state_key_nid,
        false) AS is_other,
    k.state_key_nid IS NULL AS is_nameless,
        (k.type_nid = {TYPE_MEMBER}) IS DISTINCT FROM x.is_member AS is_misplaced,
    x.occurrences > 1 AS is_repeated
FROM state_groups g
CROSS JOIN LATERAL (
    SELECT own.*, count(*) OVER (PARTITION BY own.state_key_nid) AS occurrences
    FROM :own_entries.call(g) AS own
) AS x
LEFT JOIN state_keys k ON k.state_key_nid = x.state_key_nid
LEFT JOIN events e ON e.event_nid = x.event_nid
WHERE g.state_group = ANY($1::bigint[])
    AND (
        (e.event_id IS NULL AND x.event_nid <> 0)
        OR e.room_nid <> g.room_nid
        OR (e.event_id IS NOT NULL AND e.state_key_nid IS DISTINCT FROM x.state_key_nid)
        OR (k.type_nid = {TYPE_MEMBER}) IS DISTINCT FROM x.is_member
        OR x.occurrences > 1
    )
""",
    OWN_ENTRIES,
).sql


# the first byte has the width of a difference, 1 to 4, and a bit: there is at least one
PART_IS_BROKEN: Final[LiteralString] = """
path IS NOT NULL AND CASE
        WHEN octet_length(path) = 0 OR get_byte(path, 0) & 7 NOT BETWEEN 1 AND 4 THEN true
        WHEN get_byte(path, 0) > 4 AND octet_length(path) = 1 THEN true
        ELSE (octet_length(path) - 1) % (get_byte(path, 0) & 7) <> 0
    END
"""

TEMPLATE_BROKEN_PATHS: Final[LiteralString] = """
SELECT state_group, encode(path, 'hex') AS path
FROM state_groups
WHERE room_nid = $1::int AND {is_broken}
ORDER BY state_group
"""

SQL_BROKEN_PATHS: Final[LiteralString] = fill(TEMPLATE_BROKEN_PATHS, is_broken=PART_IS_BROKEN)


class BrokenPathRow(NamedTuple):
    """A group whose path has no right form, in hexadecimal."""

    state_group: int
    path: str


class GroupFactsRow(NamedTuple):
    """The columns of a group, and the path of the group that precedes it on its own path."""

    state_group: int
    digest: int | None
    entry_count: int
    path: list[int]
    runs: int
    ancestor_path: list[int] | None
    ancestor_room_nid: int | None


class WrongEntryRow(NamedTuple):
    """An invalid entry of a group's row, and why it is invalid."""

    state_group: int
    state_key_nid: int
    event_nid: int
    is_member: bool
    event_id: str | None
    is_lost: bool
    is_other: bool
    is_nameless: bool
    is_misplaced: bool
    is_repeated: bool


async def broken_paths(conn: Connection, room: VerifiedRoom) -> list[Finding]:
    """Return the groups whose paths cannot be read at all ("state_paths").

    Every statement that reads such a path fails.
    """
    return [
        room.finding("state_paths", [f"state group {row.state_group}"], row.path, "a path")
        for row in await conn.fetch(SQL_BROKEN_PATHS, room.nid, row=BrokenPathRow)
    ]


async def check_groups(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check that every state group is readable and has correct columns ("state_groups")."""
    numbers: list[int] = await conn.fetchvals(SQL_GROUPS, room.nid)
    for start in range(0, len(numbers), BATCH):
        batch = numbers[start : start + BATCH]
        groups = await room.states.load(conn, batch)
        for row in await conn.fetch(SQL_GROUP_FACTS, batch, row=GroupFactsRow):
            for found, expected in (*_path(room, row), *_facts(row, groups.get(row.state_group))):
                yield room.finding(
                    "state_groups", [f"state group {row.state_group}"], found, expected
                )
        for entry in await conn.fetch(SQL_WRONG_ENTRIES, batch, row=WrongEntryRow):
            found, expected = _entry(entry)
            yield room.finding(
                "state_groups",
                [f"state group {entry.state_group}", entry.event_id or f"nid {entry.event_nid}"],
                found,
                expected,
            )


def _path(room: VerifiedRoom, row: GroupFactsRow) -> Iterator[tuple[str, str]]:
    """Check that a path continues the path of the group before it, so that no row is missing."""
    before = row.path[:-1]
    if before and row.ancestor_path is None:
        yield f"path {row.path}", f"a row for state group {before[-1]}"
    elif before and row.ancestor_path != before:
        yield f"path {row.path}", f"{[*(row.ancestor_path or []), row.state_group]}"
    elif before and row.ancestor_room_nid != room.nid:
        yield f"path {row.path}", "groups of the same room"
    if 1 + sum(paths.unpack(row.runs)) != len(row.path):
        yield f"runs {paths.unpack(row.runs)}", f"{len(row.path) - 1} rows after the root"


def _facts(row: GroupFactsRow, group: Group | None) -> Iterator[tuple[str, str]]:
    if group is None:
        return  # it cannot be read: its path says why
    if row.digest is not None and row.digest != group.digest:
        yield f"digest {row.digest}", str(group.digest)
    if row.entry_count != len(group.entries):
        yield f"entry_count {row.entry_count}", str(len(group.entries))


def _entry(row: WrongEntryRow) -> tuple[str, str]:
    if row.is_repeated:
        return f"state key {row.state_key_nid} more than once", "once"
    if row.is_nameless:
        return (
            f"state key {row.state_key_nid} without a row in state_keys",
            "a type and a state key",
        )
    if row.is_lost:
        return f"state key {row.state_key_nid} with an event that is not stored", "a stored event"
    if row.is_other:
        return f"state key {row.state_key_nid}", "the event's own state key, in this room"
    return (
        f"state key {row.state_key_nid} among {'members' if row.is_member else 'the others'}",
        "members apart",
    )
