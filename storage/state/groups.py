"""State groups in memory: immutable states that share their common part.

A `Group` has its whole state as a persistent map (a change costs O(log n)) and the rows of its
path. So a child can be written as a delta. Two groups are compared by the rows after their common
ancestor, not by their size.

Keys are state key nids and values event nids; see `storage.state.delta_levels`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter, eq
from typing import Final, NamedTuple, TypeAlias

from storage.persistent_map import IntMap, changed
from storage.state import delta_levels

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
        delta_levels.root(len(entries)).runs,
        digest_of(entries),
        audience,
    )


def derive(parent: Group, change: Mapping[int, int], state_group: int, audience: int) -> Group:
    """Return the group of the parent's state with a change applied, at the level that fits."""
    entries = applied(parent.entries, change)
    digest = digest_after(parent.digest, parent.entries, change)
    for place in delta_levels.candidates(parent.runs, len(entries)):
        kept = parent.steps[: place.keep]
        if not kept:
            break
        delta = fold(parent.steps[place.keep :])
        delta.update(change)
        if any(abs(state_group - step.state_group) > FARTHEST for step in kept):
            break
        if delta_levels.affordable(
            sum(len(step.delta) for step in kept[1:]), len(delta), len(entries)
        ):
            return Group(
                state_group,
                parent.room_nid,
                entries,
                (*kept, DeltaRow(state_group, delta)),
                place.runs,
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
        delta_levels.root(len(entries)).runs,
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


def changed_keys(one: Group, other: Group) -> set[int]:
    """Return the keys whose values differ.

    The cost is that of the rows after the last common row of the two paths, even over one new root.

    Where the paths have no row in common (as far as this process knows), whole states are compared.
    """
    if one.state_group == other.state_group:
        return set()
    for base, made in ((one, other), (other, one)):
        if _is_next(made, base):
            return {
                key
                for key in made.steps[-1].delta
                if one.entries.get(key) != other.entries.get(key)
            }
    for left, right in product((one.steps, _behind(one)), (other.steps, _behind(other))):
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
        keys = set(one.entries) | set(other.entries)
    return {key for key in keys if one.entries.get(key) != other.entries.get(key)}


def _is_next(made: Group, base: Group) -> bool:
    """Return whether a path is that of ``base`` and one row more.

    The last row alone does not say it: a damaged path may end like another one. A row in memory
    has the same rows before it wherever it is used, so paths that share it need no comparison.
    """
    return len(made.steps) == len(base.steps) + 1 and (
        made.steps[-2] is base.steps[-1]
        or all(map(eq, map(_number, made.steps), map(_number, base.steps)))
    )


def _behind(group: Group) -> tuple[DeltaRow, ...]:
    """Return a group's path with the rows before its root instead of the root.

    Return an empty path if they are not known.
    """
    return (*group.steps[0].origin, *group.steps[1:]) if group.steps[0].origin else ()


def difference(base: Group, other: Group) -> dict[int, int]:
    """Return the change that turns the base's state into the other's."""
    return {key: other.entries.get(key, REMOVED) for key in changed_keys(base, other)}
