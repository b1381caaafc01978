"""Read many states of a room, sharing their common parts: for jobs that read all of them.

`storage.state.groups` builds each state by itself, which suits a few. Here a state is built from
the longest prefix of its path that was built before. So reading all groups of a room costs their
deltas, not their sizes. A group with a missing row is omitted, and the caller decides what that
means.
"""

from collections.abc import Iterable, Sequence
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection
from storage.persistent_map import IntMap, Map
from storage.state import paths as delta_levels
from storage.state.groups import (
    DeltaRow,
    Group,
    GroupRow,
    applied,
    digest_of,
    entries_of,
    entry_digest,
    signed,
)

SQL_PATHS: Final[LiteralString] = """
SELECT state_group, path_of(state_group) AS path
FROM state_groups
WHERE state_group = ANY($1::bigint[])
"""

SQL_ROWS: Final[LiteralString] = """
SELECT state_group, digest, audience, room_nid, entry_count, runs, back, key_nids, event_nids,
    member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path
FROM state_groups
WHERE state_group = ANY($1::bigint[])
"""

ROWS_MAX: Final = 20_000  # rows of groups kept
STATES_MAX: Final = 5_000  # states kept; they share their entries


class GroupPathRow(NamedTuple):
    """A group and its path."""

    state_group: int
    path: list[int]


class FoldedPath(NamedTuple):
    """A prefix of a path: its state, and the digest computed from the entries."""

    entries: IntMap
    digest: int


class RoomStates:
    """The states of a room, read on demand. `Group.digest` is computed here, not read."""

    def __init__(self) -> None:
        self._rows: dict[int, GroupRow] = {}
        self._deltas: dict[int, dict[int, int]] = {}
        self._folded: dict[tuple[int, ...], FoldedPath] = {}
        self._groups: dict[int, Group] = {}

    async def load(self, conn: Connection, state_groups: Iterable[int]) -> dict[int, Group]:
        """Return these groups, without those that do not exist or miss rows of their path."""
        wanted = set(state_groups)
        self._trim()
        lacking = [group for group in wanted if group not in self._groups]
        if lacking:
            paths = dict(await conn.fetch(SQL_PATHS, lacking, row=GroupPathRow))
            await self._load_rows(
                conn, {part for path in paths.values() for part in path} | paths.keys()
            )
            for state_group in lacking:
                self._build(state_group)
        return {group: self._groups[group] for group in wanted if group in self._groups}

    def is_of_room(self, group: Group, room_nid: int) -> bool:
        """Return whether a group of the last `load` and all groups on its path are of this room."""
        return all(self._rows[step.state_group].room_nid == room_nid for step in group.steps)

    def forget(self) -> None:
        """Read everything again from now on."""
        self.__init__()  # type: ignore[misc]  # reset every field

    async def _load_rows(self, conn: Connection, state_groups: set[int]) -> None:
        lacking = [group for group in state_groups if group not in self._rows]
        if lacking:
            for row in await conn.fetch(SQL_ROWS, lacking, row=GroupRow):
                self._rows[row.state_group] = row
                self._deltas[row.state_group] = entries_of(row)

    def _build(self, state_group: int) -> None:
        row = self._rows.get(state_group)
        path = () if row is None else tuple(row.path_in(self._rows))
        if row is None or any(part not in self._rows for part in path):
            return
        folded = self._fold(path)
        steps = tuple(DeltaRow(part, self._deltas[part]) for part in path)
        self._groups[state_group] = Group(
            state_group,
            row.room_nid,
            folded.entries,
            steps,
            delta_levels.unpack(row.runs),
            folded.digest,
            row.audience,
        )

    def _fold(self, path: tuple[int, ...]) -> FoldedPath:
        """Return the state of a path, from its longest known prefix."""
        known = next(
            (length for length in range(len(path), 0, -1) if path[:length] in self._folded), 0
        )
        if not known:
            entries = Map({key: event for key, event in self._deltas[path[0]].items() if event})
            folded, known = FoldedPath(entries, digest_of(entries)), 1
            self._folded[path[:1]] = folded
        else:
            folded = self._folded[path[:known]]
        for length in range(known + 1, len(path) + 1):
            folded = _changed(folded, self._deltas[path[length - 1]])
            self._folded[path[:length]] = folded
        return folded

    def _trim(self) -> None:
        """Drop everything once it is too large: later states are built again from their rows."""
        if len(self._rows) > ROWS_MAX or len(self._groups) > STATES_MAX:
            self.forget()


def _changed(folded: FoldedPath, delta: dict[int, int]) -> FoldedPath:
    digest = folded.digest
    for key, event in delta.items():
        before = folded.entries.get(key)
        digest += (entry_digest(key, event) if event else 0) - (
            0 if before is None else entry_digest(key, before)
        )
    return FoldedPath(applied(folded.entries, delta), signed(digest))


# --------------------------------------------------------------------------------------------------
# Find the states that make the current state of a partial room, from the tables.
#
# The planner has the same rule (`storage.persist.plan.partial_state.keeping_the_join`).

SQL_JOIN: Final[LiteralString] = """
SELECT e.event_nid, e.state_key_nid, claimed_depth(e.depth, e.topological_ordering) AS depth
FROM partial_rooms p
JOIN rooms r ON r.room_nid = p.room_nid AND r.is_partial
JOIN events e ON e.event_id = p.join_event_id AND NOT e.outlier
WHERE p.room_nid = $1::int
"""

SQL_DEPTHS: Final[LiteralString] = """
SELECT event_nid, claimed_depth(depth, topological_ordering) AS depth
FROM events
WHERE event_nid = ANY($1::bigint[])
"""


class PartialJoinRow(NamedTuple):
    """The join of a partial room."""

    event_nid: int
    state_key_nid: int
    depth: int


class MembershipDepthRow(NamedTuple):
    """The depth of a membership."""

    event_nid: int
    depth: int


async def following(conn: Connection, room_nid: int, states: Sequence[Group]) -> Sequence[Group]:
    """Return those of the states after the extremities that make the current state.

    In a partial room they are those that follow its join, if there is any.
    """
    join = await conn.fetchrow(SQL_JOIN, room_nid, row=PartialJoinRow)
    if join is None:
        return states
    entries = [state.entries.get(join.state_key_nid, 0) for state in states]
    depths = dict(await conn.fetch(SQL_DEPTHS, entries, row=MembershipDepthRow))
    found = [
        state
        for state, nid in zip(states, entries, strict=True)
        if nid == join.event_nid or depths.get(nid, join.depth) > join.depth
    ]
    return found or states


# --------------------------------------------------------------------------------------------------
# All events of a room, outliers and others, as the source of a statement.
#
# Each index by room has either the outliers or the others. Postgres combines both only by a bitmap.
# Without statistics, a plan with bitmaps reads too much elsewhere, so a session has none
# (`storage.database.session`). A condition for both would then read the events of all rooms.
#
# OFFSET 0 keeps the order of the outer statement away: else Postgres could read the events of all
# rooms in that order, by another index.

PART_ROOM_EVENTS: Final[LiteralString] = """
(
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier
    OFFSET 0
)
"""

PART_AUTHORISED_EVENTS: Final[LiteralString] = """
(
    SELECT * FROM events WHERE room_nid = $1::int AND NOT outlier
    UNION ALL
    SELECT * FROM events WHERE room_nid = $1::int AND outlier AND NOT is_out_of_band(events)
    OFFSET 0
)
"""
"""Without memberships that arrived out of band, which are not authorised yet."""
