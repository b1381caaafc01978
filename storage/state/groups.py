"""State groups in memory: immutable states that share their common part.

A `Group` has its whole state as a persistent map (a change costs O(log n)) and the rows of its
path. So a child can be written as a delta. Two groups are compared by the rows after their common
ancestor, not by their size.

Keys are state key nids and values event nids; see `storage.state.paths`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter, eq
from typing import Final, LiteralString, NamedTuple, TypeAlias

from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.persistent_map import IntMap, Map, changed
from storage.state import paths
from storage.state.paths import path_columns, path_of

REMOVED: Final = 0  # the value that removes a key in a delta
# largest distance to a row of the path: the table stores the difference in four bytes
FARTHEST: Final = (1 << 31) - 1
_MASK: Final = (1 << 64) - 1
_number: Final = attrgetter("state_group")

State: TypeAlias = IntMap


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """One row of a path: the group that wrote it, and its entries (the whole state for a root).

    A root that this process wrote keeps in ``origin`` the path that it replaced, with its own
    change as the last row. So states before and after it are compared by the rows between them. It
    goes back one root only, and is only in memory.
    """

    state_group: int
    delta: Mapping[int, int]
    origin: "tuple[DeltaRow, ...]" = field(default=(), compare=False, repr=False)


class Group(NamedTuple):
    """One state.

    ``steps`` are the rows to fold, root first, its own last. ``audience`` is that of events sent
    under the state. ``is_sought``: it is no state after one event, so a later merge may have the
    same state and look for it. That is known of new groups only.
    """

    state_group: int
    room_nid: int
    entries: State
    steps: tuple[DeltaRow, ...]
    runs: tuple[int, ...]
    digest: int
    audience: int
    is_sought: bool = False

    def __repr__(self) -> str:
        return f"Group({self.state_group}, {len(self.entries)} entries, {len(self.steps)} steps)"


def entry_digest(key_nid: int, event_nid: int) -> int:
    """Return a 64-bit mix of one entry (the finaliser of splitmix64 over both numbers)."""
    x = (key_nid * 0x9E3779B97F4A7C15 ^ event_nid * 0xC2B2AE3D27D4EB4F) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def signed(number: int) -> int:
    """Return a number modulo 2^64 as Postgres' int8."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def digest_of(entries: Mapping[int, int]) -> int:
    """Return the digest of a whole state: the sum of its entries' digests, in any order."""
    return signed(sum(entry_digest(key, event) for key, event in entries.items()))


def fold(steps: Iterable[DeltaRow]) -> dict[int, int]:
    """Fold the rows of a path: later entries win, and removals stay as `REMOVED`."""
    folded: dict[int, int] = {}
    for step in steps:
        folded.update(step.delta)
    return folded


def root_group(state_group: int, room_nid: int, entries: State, audience: int) -> Group:
    """Return a group that holds its whole state."""
    step = DeltaRow(state_group, entries)
    return Group(
        state_group,
        room_nid,
        entries,
        (step,),
        paths.root(len(entries)).runs,
        digest_of(entries),
        audience,
    )


def derive(parent: Group, change: Mapping[int, int], state_group: int, audience: int) -> Group:
    """Return the group of the parent's state with a change applied, at the level that fits."""
    entries = applied(parent.entries, change)
    digest = digest_after(parent.digest, parent.entries, change)
    for placement in paths.candidates(parent.runs, len(entries)):
        kept = parent.steps[: placement.keep]
        if not kept:
            break
        delta = fold(parent.steps[placement.keep :])
        delta.update(change)
        if any(abs(state_group - step.state_group) > FARTHEST for step in kept):
            break
        if paths.affordable(sum(len(step.delta) for step in kept[1:]), len(delta), len(entries)):
            return Group(
                state_group,
                parent.room_nid,
                entries,
                (*kept, DeltaRow(state_group, delta)),
                placement.runs,
                digest,
                audience,
            )
    first, *rest = parent.steps
    step = DeltaRow(
        state_group,
        entries,
        (DeltaRow(first.state_group, first.delta), *rest, DeltaRow(state_group, dict(change))),
    )
    return Group(
        state_group,
        parent.room_nid,
        entries,
        (step,),
        paths.root(len(entries)).runs,
        digest,
        audience,
    )


def applied(entries: State, change: Mapping[int, int]) -> State:
    """Return a state with a change applied; `REMOVED` removes the key."""
    return changed(entries, change, removed=REMOVED)


def digest_after(digest: int, entries: State, change: Mapping[int, int]) -> int:
    for key, event in change.items():
        before = entries.get(key)
        if before is not None:
            digest -= entry_digest(key, before)
        if event != REMOVED:
            digest += entry_digest(key, event)
    return signed(digest)


def keeps_digest(group: Group) -> bool:
    """Return whether the row of a group has its digest: a merge can find it by that.

    A row above the low level has it as well: those on the low level derive theirs from it.
    """
    return group.is_sought or not group.runs[-1]


def changed_keys(group: Group, other: Group) -> set[int]:
    """Return the keys whose values differ.

    The cost is that of the rows after the last common row of the two paths, even over one new root.

    Where the paths have no row in common (as far as this process knows), whole states are compared.
    """
    if group.state_group == other.state_group:
        return set()
    for base, made in ((group, other), (other, group)):
        if _is_next(made, base):
            return {
                key
                for key in made.steps[-1].delta
                if group.entries.get(key) != other.entries.get(key)
            }
    for left, right in product(
        (group.steps, _steps_from_origin(group)), (other.steps, _steps_from_origin(other))
    ):
        if left and right and left[0].state_group == right[0].state_group:
            common = {step.state_group for step in left} & {step.state_group for step in right}
            keys = {
                key
                for step in (*left, *right)
                if step.state_group not in common
                for key in step.delta
            }
            break
    else:
        keys = set(group.entries) | set(other.entries)
    return {key for key in keys if group.entries.get(key) != other.entries.get(key)}


def _is_next(made: Group, base: Group) -> bool:
    """Return whether a path is that of ``base`` and one row more.

    The last row alone does not say it: a damaged path may end like another one. A row in memory
    has the same rows before it wherever it is used, so paths that share it need no comparison.
    """
    return len(made.steps) == len(base.steps) + 1 and (
        made.steps[-2] is base.steps[-1]
        or all(map(eq, map(_number, made.steps), map(_number, base.steps)))
    )


def _steps_from_origin(group: Group) -> tuple[DeltaRow, ...]:
    """Return a group's path with the rows before its root instead of the root.

    Return an empty path if they are not known.
    """
    return (*group.steps[0].origin, *group.steps[1:]) if group.steps[0].origin else ()


def difference(base: Group, other: Group) -> dict[int, int]:
    """Return the change that turns the base's state into the other's."""
    return {key: other.entries.get(key, REMOVED) for key in changed_keys(base, other)}


# --------------------------------------------------------------------------------------------------
# A state group as a row of its table.
#
# The row is narrow, because there is one for every state change. Nearly every row has one entry, on
# the low level of its path, and takes 84 bytes:
#
# * its path in bytes (`storage.state.paths`);
# * its entry as a key and an event, where arrays of one element take 54 bytes;
# * no digest: it follows from that of the last row before the low level. Only a state that a later
#   merge may look for has one (`keeps_digest`).
#
# Other rows have arrays.


class GroupRow(NamedTuple):
    """A row of `state_groups`."""

    state_group: int
    digest: int | None
    audience: int
    room_nid: int
    entry_count: int
    runs: int
    back: list[int] | None
    key_nids: list[int] | None
    event_nids: list[int] | None
    member_key_nids: list[int] | None
    member_event_nids: list[int] | None
    key_nid: int | None = None
    member_key_nid: int | None = None
    event_nid: int | None = None
    path: bytes | None = None

    def path_in(self, rows: "Mapping[int, GroupRow]") -> list[int]:
        """Return the groups to fold: root first, this group last (`storage.state.paths`)."""
        return path_of(self.state_group, self, rows)


GROUP_COLUMNS: Final = GroupRow._fields


def row_of(group: Group, is_member: Callable[[int], bool]) -> GroupRow:
    """Build the row of a group.

    ``is_member`` returns for a state key nid whether its type is m.room.member.
    """
    path = [step.state_group for step in group.steps]
    columns = path_columns(path, group.runs[-1])
    row = GroupRow(
        group.state_group,
        group.digest if columns.path is None or keeps_digest(group) else None,
        group.audience,
        group.room_nid,
        len(group.entries),
        paths.pack(group.runs),
        columns.back,
        None,
        None,
        None,
        None,
        path=columns.path,
    )
    delta = group.steps[-1].delta
    if len(delta) == 1:
        [(key, event)] = delta.items()
        if is_member(key):
            return row._replace(member_key_nid=key, event_nid=event)
        return row._replace(key_nid=key, event_nid=event)
    # sorted, which makes reading thousands of rows faster
    entries = sorted(delta.items())
    members = {key: event for key, event in entries if is_member(key)}
    others = {key: event for key, event in entries if key not in members}
    return row._replace(
        key_nids=list(others) or None,
        event_nids=list(others.values()) or None,
        member_key_nids=list(members) or None,
        member_event_nids=list(members.values()) or None,
    )


def entries_of(row: GroupRow) -> dict[int, int]:
    if row.event_nid is not None:
        return {row.key_nid or row.member_key_nid or 0: row.event_nid}
    entries = dict(zip(row.key_nids or (), row.event_nids or (), strict=True))
    entries.update(zip(row.member_key_nids or (), row.member_event_nids or (), strict=True))
    return entries


# --------------------------------------------------------------------------------------------------
# Reading state groups: one index scan over the rows of their paths, folded by position.

SQL_GROUPS: Final[LiteralString] = """
SELECT state_group, digest, audience, room_nid, entry_count, runs, back, key_nids, event_nids,
    member_key_nids, member_event_nids, key_nid, member_key_nid, event_nid, path
FROM state_groups
WHERE state_group = ANY(ARRAY(
    SELECT DISTINCT step.part
    FROM unnest($1::bigint[]) AS wanted (state_group)
    CROSS JOIN LATERAL state_path(wanted.state_group) AS step
))
"""

Prefixes: TypeAlias = dict[tuple[int, ...], tuple[tuple[DeltaRow, ...], State, int]]
"""Beginnings of paths: their rows, the state that they fold to, and its digest."""


async def read_groups(conn: Connection, state_groups: Collection[int]) -> dict[int, Group]:
    """Read these groups with their whole states.

    Raise `StorageCorrupt` if one, or a row of its path, is missing.
    """
    rows = {
        row.state_group: row
        for row in await conn.fetch(SQL_GROUPS, list(state_groups), row=GroupRow)
    }
    absent = [state_group for state_group in state_groups if state_group not in rows]
    if absent:
        raise StorageCorrupt("a referenced state group is missing", state_groups=absent)
    return groups_of(state_groups, rows)


def groups_of(state_groups: Iterable[int], rows: Mapping[int, GroupRow]) -> dict[int, Group]:
    """Build these groups with their whole states; raise `StorageCorrupt` as `group_of`.

    The common part of their paths is in memory once.
    """
    prefixes: Prefixes = {}
    return {state_group: group_of(state_group, rows, prefixes) for state_group in state_groups}


def group_of(
    state_group: int, rows: Mapping[int, GroupRow], prefixes: Prefixes | None = None
) -> Group:
    """Build a group with its whole state, from its row and those of its path.

    Raise `StorageCorrupt` if a row of the path is missing. ``prefixes`` has the folded rows of
    other paths; it is used and extended.
    """
    row = rows[state_group]
    path = row.path_in(rows)
    lost = [part for part in path if part not in rows]
    if lost:
        raise StorageCorrupt(
            "a state group misses rows of its path", state_group=row.state_group, lost=lost
        )
    prefixes = {} if prefixes is None else prefixes
    steps, entries, digest = _folded(path, rows, prefixes)
    return Group(
        row.state_group,
        row.room_nid,
        entries,
        steps,
        paths.unpack(row.runs),
        digest,
        row.audience,
    )


def _folded(
    path: list[int], rows: Mapping[int, GroupRow], prefixes: Prefixes
) -> tuple[tuple[DeltaRow, ...], State, int]:
    """Fold the rows of a path; a row without a digest changes that of the row before it."""
    entries: State = Map()
    steps: tuple[DeltaRow, ...] = ()
    digest = 0
    for end in range(1, len(path) + 1):
        prefix = tuple(path[:end])
        if prefix not in prefixes:
            row = rows[path[end - 1]]
            step = DeltaRow(row.state_group, entries_of(row))
            stored_digest = row.digest
            digest = (
                digest_after(digest, entries, step.delta)
                if stored_digest is None
                else stored_digest
            )
            entries = applied(entries, step.delta) if steps else Map(step.delta)
            steps = (*steps, step)
            prefixes[prefix] = (steps, entries, digest)
        steps, entries, digest = prefixes[prefix]
    return steps, entries, digest
