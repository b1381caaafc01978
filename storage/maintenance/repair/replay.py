"""Rebuild visibility and audiences of a room by replaying its states.

The audiences are numbered by storage/persist/plan/audience.py. Events are taken in topological
order, so that a state gets its number after a state that precedes it. The functions that decide are
those of the live path. They read what this replay has decided so far (rows of visibility, audience
numbers), and not what the tables have.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple, TypeVar

from storage.database.columns import PREV_NIDS
from storage.database.connection import Connection
from storage.database.names import JOIN, TYPE_MEMBER
from storage.database.placeholders import compose, transposed
from storage.errors import StorageCorrupt
from storage.maintenance.room_states import RoomStates
from storage.maintenance.totals import event_total
from storage.observability.counters import Counted, Report, silent
from storage.persist.load.on_demand import load
from storage.persist.model.cache_view import StateView, VisibilityView
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.missing_data import Answers, MissingData
from storage.persist.model.rows import (
    UNSEEN,
    AudienceRow,
    EventRow,
    RoomChanges,
    RoomRow,
    VisibilityRow,
)
from storage.persist.plan import audience
from storage.state.groups import GROUP_COLUMNS, Group, row_of
from storage.visibility import multirange
from storage.visibility.multirange import FIRST, NOTHING

# --------------------------------------------------------------------------------------------------
# Plan for a locked room as the live path does: same pure functions and loading, separate writes.
#
# Missing data is loaded from the tables (`storage.persist.load.on_demand`). States are the
# exception: the thousands of a room share their entries (`storage.maintenance.room_states`). None
# of it enters the caches of a writer.

T = TypeVar("T")

MEMORY: Final = {"events": 20_000, "groups": 1, "state_entries": 1, "rooms": 10, "names": 500_000}


class RepairPlanner:
    """Run functions of `storage.persist` on one room."""

    def __init__(
        self,
        row: RoomRow,
        server_name: str,
        states: RoomStates,
        change_set: ChangeSet | None = None,
    ) -> None:
        self.row = row
        self.states = states
        self.change_set: ChangeSet = change_set or ChangeSet(new_caches(), NidBlocks(), server_name)
        self.room: RoomChanges = RoomChanges.of(row)

    @classmethod
    async def of(
        cls, conn: Connection, room_id: str, server_name: str, states: RoomStates
    ) -> "RepairPlanner":
        return cls(await stored_room(conn, room_id), server_name, states)

    async def plan(self, conn: Connection, work: Callable[[EventChanges], T]) -> T:
        """Run a decision, loading the data that it lacks, and keep its changes."""
        while True:
            changes = EventChanges(self.change_set, self.room)
            try:
                result = work(changes)
            except MissingData as needs:
                lacking = needs
            else:
                changes.commit()
                return result
            await self.load(conn, lacking)

    async def load(self, conn: Connection, needs: MissingData) -> None:
        """Load the data that a decision lacks."""
        if needs.kind != "groups":
            await load(conn, self.change_set, needs)
            return
        wanted = {key for key in needs.keys if isinstance(key, int)}
        groups = await self.states.load(conn, wanted)
        lost = wanted - groups.keys()
        if lost:
            raise StorageCorrupt(
                "state groups cannot be read", room_nid=self.row.room_nid, state_groups=sorted(lost)
            )
        self.change_set.states.groups.update(groups)

    async def write_groups(self, conn: Connection) -> None:
        """Insert the planned groups."""
        groups = list(self.change_set.states.new_groups.values())
        while True:
            try:
                self.change_set.names.ensure_state_key_names(
                    key for group in groups for key in group.steps[-1].delta
                )
            except MissingData as needs:
                lacking = needs
            else:
                break
            await load(conn, self.change_set, lacking)
        rows = [row_of(group, self._is_member) for group in groups]
        await conn.copy_in("state_groups", GROUP_COLUMNS, rows)

    def _is_member(self, key_nid: int) -> bool:
        return self.change_set.names.state_key_name(key_nid)[0] == TYPE_MEMBER


def new_caches() -> WriterCaches:
    """Return separate, empty caches."""
    return WriterCaches(**MEMORY)


async def stored_room(conn: Connection, room_id: str) -> RoomRow:
    change_set = ChangeSet(new_caches(), NidBlocks(), "")
    await load(conn, change_set, MissingData("rooms", [room_id]))
    row = change_set.rooms.rows[room_id]
    if row is None:
        raise StorageCorrupt("a locked room is gone", room_id=room_id)
    return row


# --------------------------------------------------------------------------------------------------
# Find the main line of a room: from its last event back to its first, always to the latest parent.
#
# Audiences of the main line are cheap: the range of a principal simply grows. Other events are
# exceptions to it. While a room is written, the main line is the history of its current state, of
# which only the end is still known. Any path gives correct answers.

SQL_BACKWARDS: Final[LiteralString] = compose(
    """
SELECT event_nid, stream_ordering, topological_ordering, :prev_nids.call AS prev_events
FROM events
WHERE room_nid = $1::int
    AND NOT outlier
    AND (topological_ordering, stream_ordering) < ($2::bigint, $3::bigint)
ORDER BY topological_ordering DESC, stream_ordering DESC
LIMIT $4::bigint
""",
    PREV_NIDS,
).sql

SQL_GAP_NIDS: Final[LiteralString] = """
SELECT event_nid
FROM missing_events
WHERE room_nid = $1::int
"""

MAIN_LINE_BATCH: Final = 2_000
AFTER_ALL: Final = (1 << 63) - 1


class BackRow(NamedTuple):
    """An event of the way back."""

    event_nid: int
    stream_ordering: int
    topological_ordering: int
    prev_events: list[int]


async def main_line(conn: Connection, room_nid: int, ends: set[int]) -> set[int]:
    """Return the nids of the events on it.

    ``ends``: the events at which it may end; if empty, it ends at the latest event. Below a gap it
    continues with the next event.
    """
    gaps = set(await conn.fetchvals(SQL_GAP_NIDS, room_nid))
    line: set[int] = set()
    wanted = ends
    at = (AFTER_ALL, AFTER_ALL)
    while rows := await conn.fetch(SQL_BACKWARDS, room_nid, *at, MAIN_LINE_BATCH, row=BackRow):
        for row in rows:
            if not wanted or row.event_nid in wanted:
                line.add(row.event_nid)
                wanted = set(row.prev_events) - gaps
        at = (rows[-1].topological_ordering, rows[-1].stream_ordering)
    return line


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
ORDER BY (entry_count = 0) DESC, path_of(state_group)
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
INSERT INTO visibility (room_nid, principal_nid, audiences, last_join_topological, joined_count,
    invited_count, invited_audiences,
    first_audience)
SELECT $1::int, i.principal_nid, i.audiences::int8multirange, i.last_join_topological,
    i.joined_count, i.invited_count,
    NULLIF(i.invited_audiences::int8multirange, '{}'), i.first_audience
FROM unnest($2::int[], $3::text[], $4::bigint[], $5::int[], $6::int[], $7::text[], $8::bigint[])
    AS i (principal_nid, audiences, last_join_topological, joined_count, invited_count,
        invited_audiences, first_audience)
"""

SQL_DROP_PAST: Final[LiteralString] = """
DELETE FROM past_visibility
WHERE room_nid = $1::int
"""

SQL_ADD_PAST: Final[LiteralString] = """
INSERT INTO past_visibility (room_nid, principal_nid, first_audience, opened_topological, audiences,
    invited_audiences, topological_ranges)
SELECT $1::int, i.principal_nid, i.first_audience, i.opened_topological,
    i.audiences::int8multirange,
    NULLIF(i.invited_audiences::int8multirange, '{}'), i.topological_ranges::int8multirange
FROM unnest($2::int[], $3::bigint[], $4::bigint[], $5::text[], $6::text[], $7::text[])
    AS i (principal_nid, first_audience, opened_topological, audiences, invited_audiences,
        topological_ranges)
"""

SQL_ADD_AUDIENCES: Final[LiteralString] = """
INSERT INTO audiences (room_nid, audience, branches, continued, opened_topological)
SELECT $1::int, i.audience, i.branches, i.continued, i.opened_topological
FROM unnest($2::bigint[], $3::int[], $4::boolean[], $5::bigint[]) AS i (audience, branches,
    continued, opened_topological)
"""

SQL_SET_AUDIENCES: Final[LiteralString] = """
UPDATE rooms
SET next_audience = $2::bigint,
    current_audience = $3::bigint,
    out_of_range = $4::text::int8multirange
WHERE room_nid = $1::int
"""

BATCH: Final = 1_000
BEFORE_ALL: Final = -(1 << 63)


class ReplayedRow(NamedTuple):
    """An event by its topological position."""

    event_nid: int
    topological_ordering: int
    stream_ordering: int


class ReplayedVisibility(VisibilityView):
    """Knows of visibility only what was decided since it began."""

    def visible(self, room_nid: int, principal_nid: int) -> VisibilityRow:
        return self.new_visibility.get((room_nid, principal_nid), UNSEEN)

    def ensure_visible(self, room_nid: int, principal_nids: Iterable[int]) -> None:
        """Do nothing: all rows are there."""

    def audience(self, room_nid: int, number: int) -> AudienceRow:
        return self.new_audiences[room_nid, number]


class ReplayedStates(StateView):
    """State groups under their new audience numbers; ``numbers`` has them by group."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        super().__init__(caches, blocks)
        self.numbers: dict[int, int] = {}

    def group(self, state_group: int) -> Group:
        """Return a state group under its new number, `NOTHING` before it has one."""
        return super().group(state_group)._replace(audience=self.numbers.get(state_group, NOTHING))

    def add_groups(self, room: RoomChanges, groups: Iterable[Group]) -> None:
        """Remember the numbers that groups have now."""
        del room
        self.numbers.update((group.state_group, group.audience) for group in groups)


class ReplayAnswers(Answers):
    """Answers of the database, except for the principals of a room: those known by now."""

    visibility: VisibilityView

    def answer(self, question: Hashable) -> Any:
        """Return the principals, or what the database has answered."""
        if isinstance(question, tuple) and question[0] == "principals":
            return [principal for _, principal in self.visibility.new_visibility]
        return super().answer(question)


class VisibilityReplay(ChangeSet):
    """A change set that knows of visibility only what was decided since it began."""

    def __init__(self, server_name: str) -> None:
        answers = ReplayAnswers()
        super().__init__(new_caches(), NidBlocks(), server_name, answers=answers)
        self.replayed: ReplayedStates = ReplayedStates(self.caches, self.blocks)
        self.states = self.replayed
        self.visibility: ReplayedVisibility = ReplayedVisibility(
            self.caches, self.names, self.rooms, answers
        )
        answers.visibility = self.visibility

    @property
    def numbers(self) -> dict[int, int]:
        """The new audience numbers, by state group."""
        return self.replayed.numbers

    def forget(self) -> None:
        """Forget what was read for the events so far."""
        for known in (
            self.states.groups,
            self.events.rows,
            self.events.row_ids,
            self.events.parsed,
            self.answers.results,
        ):
            known.clear()


async def replay(
    conn: Connection,
    room_id: str,
    server_name: str,
    states: RoomStates,
    *,
    report: Report = silent,
) -> None:
    """Give numbers to the audiences of a locked room, and write which principals may see them."""
    total = await event_total(conn, [room_id])  # with outliers, which are skipped
    counted = Counted(report, "rebuild visibility", total.rows, "events", is_estimate=True)
    change_set = VisibilityReplay(server_name)
    row = await stored_room(conn, room_id)
    fresh = row._replace(
        current_state_group=None,
        next_audience=FIRST,
        current_audience=NOTHING,
        out_of_range=multirange.EMPTY,
        max_topological_ordering=0,
    )
    planner = RepairPlanner(fresh, server_name, states, change_set)
    line = await main_line(conn, row.room_nid, set(row.forward_extremities))
    groups: list[int] = await conn.fetchvals(SQL_ROOM_GROUPS, row.room_nid)
    if groups:
        await planner.plan(conn, lambda changes: _begin(changes, groups[0]))
    at = (BEFORE_ALL, BEFORE_ALL)
    while rows := await conn.fetch(SQL_REPLAYED, row.room_nid, *at, BATCH, row=ReplayedRow):
        nids = [one.event_nid for one in rows]
        await planner.load(conn, MissingData("event_nids", nids))
        events = [change_set.events.row_of(nid) for nid in nids]
        numbered = [
            (
                one.event_nid,
                await _replay_event(conn, planner, change_set, one, on_line=one.event_nid in line),
            )
            for one in events
        ]
        await conn.execute(SQL_SET_EVENTS, *transposed(numbered, 2))
        at = rows[-1][1:]
        counted.add(len(rows))
        change_set.forget()
    for number in [group for group in groups if group not in change_set.numbers]:
        await planner.plan(
            conn,
            partial(_number, change_set=change_set, state_group=number, base=None, on_line=False),
        )
    if row.current_state_group is not None:
        current = row.current_state_group
        await planner.plan(conn, lambda changes: audience.advance(changes, changes.group(current)))
    await _write(conn, change_set, planner.room)


def _begin(changes: EventChanges, empty: int) -> None:
    """Give the first audience to the empty state, with which every room begins."""
    group = changes.add_group(changes.group(empty)._replace(audience=changes.next_audience))
    audience.advance(changes, group)


async def _replay_event(
    conn: Connection,
    planner: RepairPlanner,
    change_set: VisibilityReplay,
    row: EventRow,
    *,
    on_line: bool,
) -> int:
    """Return the audience of an event, and number its states.

    If it is on the main line, the main line advances to the state after it.
    """
    number = _settled(planner, change_set, row, on_line=on_line)
    if number is None:
        before = row.state_group_before or 0
        parents = (
            []
            if before in change_set.numbers
            else await conn.fetchvals(SQL_STATES_OF_PARENTS, list(row.prev_events))
        )
        base = next((parent for parent in parents if parent in change_set.numbers), None)
        number = await planner.plan(
            conn, partial(_decide, change_set=change_set, row=row, base=base, on_line=on_line)
        )
    planner.room.max_order = max(planner.room.max_order, row.order)
    return number


def _settled(
    planner: RepairPlanner, change_set: VisibilityReplay, row: EventRow, *, on_line: bool
) -> int | None:
    """Return the audience of an event that needs no decision, else None.

    Most events are such: they change no state, and their position is in their audience's range.
    """
    before = row.state_group_before or 0
    if row.after != before or row.membership is not None or before not in change_set.numbers:
        return None
    if before == planner.room.current:
        return planner.room.audience
    number = change_set.numbers[before]
    return None if on_line or multirange.main(number) != planner.room.audience else number


def _decide(
    changes: EventChanges,
    *,
    change_set: VisibilityReplay,
    row: EventRow,
    base: int | None,
    on_line: bool,
) -> int:
    """Decide as the live path does about the event, its states and its position."""
    changes.order = row.order
    before = _number(
        changes,
        change_set=change_set,
        state_group=row.state_group_before or 0,
        base=base,
        on_line=on_line,
    )
    after = _number(
        changes,
        change_set=change_set,
        state_group=row.after,
        base=before.state_group,
        on_line=on_line,
    )
    if on_line:
        audience.advance(changes, after)
    if row.membership == JOIN and row.accepted:
        audience.note_join(
            changes, change_set.names.state_key_name(row.state_key_nid or 0)[1], row.order
        )
    number = audience.of_event(changes, row, before, after)
    audience.note_out_of_range(changes, number, row.order)
    return number


def _number(
    changes: EventChanges,
    *,
    change_set: VisibilityReplay,
    state_group: int,
    base: int | None,
    on_line: bool,
) -> Group:
    """Return a group under its audience, assigned now if it has none.

    A new audience continues the main line's end, or branches off that of ``base``.
    """
    group = changes.group(state_group)
    if state_group in changes.groups or state_group in change_set.numbers:
        return group
    if on_line:
        audience.advance(changes, group)
        return changes.add_group(group._replace(audience=changes.current_audience))
    if base is None:
        near = (
            part.state_group
            for part in reversed(group.steps[:-1])
            if part.state_group in change_set.numbers
        )
        base = next(near, changes.main or 0)
    return changes.add_group(
        group._replace(audience=audience.branch(changes, changes.group(base), group))
    )


async def _write(conn: Connection, change_set: VisibilityReplay, room: RoomChanges) -> None:
    room_nid = room.row.room_nid
    numbered = list(change_set.numbers.items())
    for start in range(0, len(numbered), BATCH):
        await conn.execute(SQL_SET_GROUPS, *transposed(numbered[start : start + BATCH], 2))
    await conn.execute(
        SQL_ADD_PRINCIPALS,
        *transposed(((nid, name) for name, nid in change_set.names.new_principals.items()), 2),
    )
    await conn.execute(SQL_DROP_VISIBILITY, room_nid)
    seen = (
        (
            principal,
            multirange.to_text(row.audiences),
            *row[1:4],
            multirange.to_text(row.invited_audiences),
            row.first_audience,
        )
        for (_, principal), row in change_set.visibility.new_visibility.items()
    )
    await conn.execute(SQL_ADD_VISIBILITY, room_nid, *transposed(seen, 7))
    await conn.execute(SQL_DROP_PAST, room_nid)
    past = (
        (
            principal,
            first,
            row.opened_topological,
            *map(
                multirange.to_text, (row.audiences, row.invited_audiences, row.topological_ranges)
            ),
        )
        for (_, principal, first), row in change_set.visibility.new_past.items()
    )
    await conn.execute(SQL_ADD_PAST, room_nid, *transposed(past, 6))
    await conn.execute(SQL_DROP_AUDIENCES, room_nid)
    known = ((number, *row) for (_, number), row in change_set.visibility.new_audiences.items())
    await conn.execute(SQL_ADD_AUDIENCES, room_nid, *transposed(known, 4))
    await conn.execute(
        SQL_SET_AUDIENCES,
        room_nid,
        room.next_audience,
        room.audience,
        multirange.to_text(room.out_of_range),
    )
