"""Check the state before and after each event, and the current state, by resolving them again."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.maintenance.partial_ends import following
from storage.maintenance.verify.auth_graph import read_auth_graph
from storage.maintenance.verify.event_loader import EventLoader
from storage.maintenance.verify.finding import Finding
from storage.maintenance.verify.room import TimelineRow, VerifiedRoom, event_ids, timeline
from storage.maintenance.verify.state_resolution import Resolver
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
        wanted = {
            group
            for row in (*rows, *parents.values())
            for group in (row.state_group_before, row.after)
        }
        groups = await room.states.load(conn, wanted)
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
            held = [
                parents[nid]
                for nid in row.prev_events
                if nid in parents and parents[nid].stream_ordering < row.stream_ordering
            ]
            if len(held) == len(row.prev_events):
                async for finding in _before(conn, states, row, held, groups):
                    yield finding
            for finding in _after(room, row, groups):
                yield finding


async def check_current_group(conn: Connection, room: VerifiedRoom) -> AsyncIterator[Finding]:
    """Check the current state group against the forward extremities ("current_state_group").

    It is the resolution of the states after them; in a partial room, of those that follow its join.
    """
    number = room.row.current_state_group
    ends = await conn.fetch(SQL_PARENTS, room.row.forward_extremities, row=TimelineRow)
    groups = await room.states.load(
        conn, {*(end.after for end in ends), *([] if number is None else [number])}
    )
    current = None if number is None else groups.get(number)
    if number is not None and current is None:
        yield room.finding(
            "state_groups", [f"state group {number}"], "cannot be read", "a whole path"
        )
    elif current is not None and not ends and current.entries:
        yield room.finding(
            "current_state_group",
            [room.row.room_id],
            f"{len(current.entries)} entries",
            "the empty state",
        )
    elif current is not None and ends and all(end.after in groups for end in ends):
        states = await _states(conn, room)
        afters = [groups[end.after] for end in ends]
        latest = max(end.stream_ordering for end in ends)
        wrong = await _before_differs(conn, states, current, afters, latest)
        if wrong:
            found, expected = await _described(conn, states, wrong)
            yield room.finding(
                "current_state_group", [room.row.room_id, f"state group {number}"], found, expected
            )


async def _states(conn: Connection, room: VerifiedRoom) -> StateCheck:
    contents = EventLoader(room)
    graph = await read_auth_graph(conn, room.nid)
    return StateCheck(room, contents, Resolver(room.row.room_version, graph, contents))


async def _parents(conn: Connection, rows: Sequence[TimelineRow]) -> dict[int, TimelineRow]:
    known = {row.event_nid: row for row in rows}
    lacking = {nid for row in rows for nid in row.prev_events} - known.keys()
    found = await conn.fetch(SQL_PARENTS, list(lacking), row=TimelineRow)
    return known | {row.event_nid: row for row in found}


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
    found = {one: after.entries.get(one, 0) for one in changed_keys(before, after)}
    if found == changes:
        return []
    actual = (
        f"changes state keys {sorted(found)} to nids {[found[one] for one in sorted(found)]}"
        if found
        else "no change"
    )
    wanted = f"state key {key} set to the event" if changes else "no change"
    return [room.finding("state_after", [row.event_id], actual, wanted)]
