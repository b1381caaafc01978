"""Visibility and audiences of a room from nothing: its states are gone through again, and numbered by storage/persist/audience.py.

Events are taken in topological order, so that a state is numbered off one that came before it. What the functions decide with
is the live path's; what they read (rows of visibility, numbers of audiences) is what was decided so far, and not what the tables
have.
"""

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.database.names import JOIN
from storage.maintenance.repair.numbering import main_line
from storage.maintenance.repair.planning import Planner, held_room, new_caches
from storage.maintenance.states import States
from storage.persist import audience
from storage.persist.columns import columns
from storage.persist.context import Needs
from storage.persist.draft import Blocks, Draft, RoomDraft
from storage.persist.rows import UNSEEN, AudienceRow, EventRow, VisibilityRow
from storage.persist.step import Step
from storage.state.groups import Group
from storage.visibility import numbers, ranges
from storage.visibility.numbers import FIRST, NOTHING

SQL_REPLAYED: Final[LiteralString] = """
SELECT event_nid, topological_ordering, stream_ordering
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) > ($2::bigint, $3::bigint)
ORDER BY topological_ordering, stream_ordering
LIMIT $4::bigint
"""

SQL_STATES_OF_PARENTS: Final[LiteralString] = """
SELECT COALESCE(e.state_group_after, e.state_group_before)
FROM unnest($1::bigint[]) WITH ORDINALITY AS n (event_nid, place)
JOIN events e USING (event_nid)
WHERE NOT e.outlier
ORDER BY n.place
"""

SQL_ROOM_GROUPS: Final[LiteralString] = """
SELECT state_group
FROM state_groups
WHERE room_nid = $1::int
ORDER BY (entry_count = 0) DESC, path_of(state_group, back)
"""

SQL_SET_EVENTS: Final[LiteralString] = """
UPDATE events e
SET audience = i.audience
FROM unnest($1::bigint[], $2::bigint[]) AS i (event_nid, audience)
WHERE e.event_nid = i.event_nid AND e.audience <> i.audience
"""

SQL_SET_GROUPS: Final[LiteralString] = """
UPDATE state_groups g
SET audience = i.audience
FROM unnest($1::bigint[], $2::bigint[]) AS i (state_group, audience)
WHERE g.state_group = i.state_group AND g.audience <> i.audience
"""

SQL_DROP_VISIBILITY: Final[LiteralString] = """
DELETE FROM visibility
WHERE room_nid = $1::int
"""

SQL_DROP_AUDIENCES: Final[LiteralString] = """
DELETE FROM audiences
WHERE room_nid = $1::int
"""

SQL_ADD_PRINCIPALS: Final[LiteralString] = """
INSERT INTO principals (principal_nid, name)
SELECT * FROM unnest($1::int[], $2::text[])
"""

SQL_ADD_VISIBILITY: Final[LiteralString] = """
INSERT INTO visibility (room_nid, principal_nid, audiences, last_join_topological, joined_count, invited_count, invited_audiences,
    first_audience)
SELECT $1::int, i.principal_nid, i.audiences::int8multirange, i.last_join_topological, i.joined_count, i.invited_count,
    NULLIF(i.invited_audiences::int8multirange, '{}'), i.first_audience
FROM unnest($2::int[], $3::text[], $4::bigint[], $5::int[], $6::int[], $7::text[], $8::bigint[])
    AS i (principal_nid, audiences, last_join_topological, joined_count, invited_count, invited_audiences, first_audience)
"""

SQL_DROP_PAST: Final[LiteralString] = """
DELETE FROM past_visibility
WHERE room_nid = $1::int
"""

SQL_ADD_PAST: Final[LiteralString] = """
INSERT INTO past_visibility (room_nid, principal_nid, first_audience, opened_topological, audiences, invited_audiences, stretches)
SELECT $1::int, i.principal_nid, i.first_audience, i.opened_topological, i.audiences::int8multirange,
    NULLIF(i.invited_audiences::int8multirange, '{}'), i.stretches::int8multirange
FROM unnest($2::int[], $3::bigint[], $4::bigint[], $5::text[], $6::text[], $7::text[])
    AS i (principal_nid, first_audience, opened_topological, audiences, invited_audiences, stretches)
"""

SQL_ADD_AUDIENCES: Final[LiteralString] = """
INSERT INTO audiences (room_nid, audience, branches, continued, opened_topological)
SELECT $1::int, i.audience, i.branches, i.continued, i.opened_topological
FROM unnest($2::bigint[], $3::int[], $4::boolean[], $5::bigint[]) AS i (audience, branches, continued, opened_topological)
"""

SQL_SET_AUDIENCES: Final[LiteralString] = """
UPDATE rooms
SET next_audience = $2::bigint,
    current_audience = $3::bigint,
    strays = $4::text::int8multirange
WHERE room_nid = $1::int
"""

BATCH: Final = 1_000
BEFORE_ALL: Final = -(1 << 63)


class ReplayedRow(NamedTuple):
    """An event by its place."""

    event_nid: int
    topological_ordering: int
    stream_ordering: int


class Replay(Draft):
    """A draft that knows of visibility only what was decided since it began."""

    def __init__(self, server_name: str) -> None:
        super().__init__(new_caches(), Blocks(), server_name)
        self.numbers: dict[int, int] = {}

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        """A principal's row."""
        return self.new_visibility.get((room_nid, principal_nid), UNSEEN)

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """All rows are there."""

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        """The row of an audience."""
        return self.new_audiences[room_nid, number]

    def answer(self, question: Hashable) -> Any:
        """The principals of a room are those known by now; all else is asked of the database."""
        if isinstance(question, tuple) and question[0] == "principals":
            return [principal for _, principal in self.new_visibility]
        return super().answer(question)

    def group(self, state_group: int) -> Group:
        """A state group under its new number, `NOTHING` before it has one."""
        return super().group(state_group)._replace(audience=self.numbers.get(state_group, NOTHING))

    def add_groups(self, room: RoomDraft, groups: Iterable[Group]) -> None:
        """Groups have their numbers now."""
        del room
        self.numbers.update((group.state_group, group.audience) for group in groups)

    def forget(self) -> None:
        """What was read for the events so far."""
        for known in (self.groups, self.rows, self.row_ids, self.events, self.answers):
            known.clear()


async def replay(conn: Connection, room_id: str, server_name: str, states: States) -> None:
    """Number the audiences of a room that is held, and write who may see them."""
    draft = Replay(server_name)
    row = await held_room(conn, room_id)
    fresh = row._replace(
        current_state_group=None, next_audience=FIRST, current_audience=NOTHING, strays=ranges.EMPTY, max_topological_ordering=0
    )
    planner = Planner(fresh, server_name, states, draft)
    line = await main_line(conn, row.room_nid, set(row.forward_extremities))
    groups: list[int] = await conn.fetchvals(SQL_ROOM_GROUPS, row.room_nid)
    if groups:
        await planner.plan(conn, lambda step: _begin(step, groups[0]))
    at = (BEFORE_ALL, BEFORE_ALL)
    while rows := await conn.fetch(SQL_REPLAYED, row.room_nid, *at, BATCH, row=ReplayedRow):
        nids = [one.event_nid for one in rows]
        await planner.load(conn, Needs("event_nids", nids))
        events = [draft.row_of(nid) for nid in nids]
        numbered = [(one.event_nid, await _replay_event(conn, planner, draft, one, on_line=one.event_nid in line)) for one in events]
        await conn.execute(SQL_SET_EVENTS, *columns(numbered, 2))
        at = rows[-1][1:]
        draft.forget()
    for number in [group for group in groups if group not in draft.numbers]:
        await planner.plan(conn, partial(_number, draft=draft, state_group=number, base=None, on_line=False))
    if row.current_state_group is not None:
        current = row.current_state_group
        await planner.plan(conn, lambda step: audience.advance(step, step.group(current)))
    await _write(conn, draft, planner.room)


def _begin(step: Step, empty: int) -> None:
    """The empty state, with which every room begins, has the first number."""
    group = step.add_group(step.group(empty)._replace(audience=step.next_audience))
    audience.advance(step, group)


async def _replay_event(conn: Connection, planner: Planner, draft: Replay, row: EventRow, *, on_line: bool) -> int:
    """The audience of an event; its states are numbered, and the main line goes to the state after it if it lies there."""
    number = _settled(planner, draft, row, on_line=on_line)
    if number is None:
        before = row.state_group_before or 0
        parents = [] if before in draft.numbers else await conn.fetchvals(SQL_STATES_OF_PARENTS, list(row.prev_events))
        base = next((parent for parent in parents if parent in draft.numbers), None)
        number = await planner.plan(conn, partial(_decide, draft=draft, row=row, base=base, on_line=on_line))
    planner.room.max_order = max(planner.room.max_order, row.order)
    return number


def _settled(planner: Planner, draft: Replay, row: EventRow, *, on_line: bool) -> int | None:
    """The audience of an event that changes nothing, in a place where reads look for it: most are such. None for others."""
    before = row.state_group_before or 0
    if row.after != before or row.membership is not None or before not in draft.numbers:
        return None
    if before == planner.room.current:
        return planner.room.audience
    number = draft.numbers[before]
    return None if on_line or numbers.main(number) != planner.room.audience else number


def _decide(step: Step, *, draft: Replay, row: EventRow, base: int | None, on_line: bool) -> int:
    """As the live path decides about the event, its states and its place."""
    step.order = row.order
    before = _number(step, draft=draft, state_group=row.state_group_before or 0, base=base, on_line=on_line)
    after = _number(step, draft=draft, state_group=row.after, base=before.state_group, on_line=on_line)
    if on_line:
        audience.advance(step, after)
    if row.membership == JOIN and row.accepted:
        audience.note_join(step, draft.state_key_name(row.state_key_nid or 0)[1], row.order)
    number = audience.of_event(step, row, before, after)
    audience.note_place(step, number, row.order)
    return number


def _number(step: Step, *, draft: Replay, state_group: int, base: int | None, on_line: bool) -> Group:
    """A group under its number, given now if it has none: off the main line's end, or off that of ``base``."""
    group = step.group(state_group)
    if state_group in step.groups or state_group in draft.numbers:
        return group
    if on_line:
        audience.advance(step, group)
        return step.add_group(group._replace(audience=step.current_audience))
    if base is None:
        near = (part.state_group for part in reversed(group.steps[:-1]) if part.state_group in draft.numbers)
        base = next(near, step.main or 0)
    return step.add_group(group._replace(audience=audience.branch(step, step.group(base), group)))


async def _write(conn: Connection, draft: Replay, room: RoomDraft) -> None:
    room_nid = room.row.room_nid
    numbered = list(draft.numbers.items())
    for start in range(0, len(numbered), BATCH):
        await conn.execute(SQL_SET_GROUPS, *columns(numbered[start : start + BATCH], 2))
    await conn.execute(SQL_ADD_PRINCIPALS, *columns(((nid, name) for name, nid in draft.new_principals.items()), 2))
    await conn.execute(SQL_DROP_VISIBILITY, room_nid)
    seen = (
        (principal, ranges.to_text(row.audiences), *row[1:4], ranges.to_text(row.invited_audiences), row.first_audience)
        for (_, principal), row in draft.new_visibility.items()
    )
    await conn.execute(SQL_ADD_VISIBILITY, room_nid, *columns(seen, 7))
    await conn.execute(SQL_DROP_PAST, room_nid)
    past = (
        (principal, first, row.opened_topological, *map(ranges.to_text, (row.audiences, row.invited_audiences, row.stretches)))
        for (_, principal, first), row in draft.new_past.items()
    )
    await conn.execute(SQL_ADD_PAST, room_nid, *columns(past, 6))
    await conn.execute(SQL_DROP_AUDIENCES, room_nid)
    known = ((number, *row) for (_, number), row in draft.new_audiences.items())
    await conn.execute(SQL_ADD_AUDIENCES, room_nid, *columns(known, 4))
    await conn.execute(SQL_SET_AUDIENCES, room_nid, room.next_audience, room.audience, ranges.to_text(room.strays))
