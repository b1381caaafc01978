"""State groups in memory: immutable states that share what they have in common.

A `Group` knows its whole state as a persistent map (a change costs O(log n)) and the rows of its
path, so that a child can be written as a delta and two groups can be compared by what lies after
their common ancestor, never by their size.

Keys are state key nids and values event nids; see design.md, section 5, and `storage.state.levels`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Final, NamedTuple

from immutables import Map

from storage.state import levels

REMOVED: Final = 0  # the value that removes a key in a delta
FARTHEST: Final = (
    1 << 31
) - 1  # how far back a row may stand: the table keeps the difference in four bytes
_MASK: Final = (1 << 64) - 1

State = Map[int, int]


@dataclass(frozen=True, slots=True)
class DeltaRow:
    """One row of a path: the group that wrote it, and its entries (the whole state for a root).

    A root that this process wrote remembers in ``origin`` the path that it took the place of, and
    its own change as the last row, so that states before and after it are compared by what lies
    between. One root back, and only in memory.
    """

    state_group: int
    delta: Mapping[int, int]
    origin: "tuple[DeltaRow, ...]" = field(default=(), compare=False, repr=False)


class Group(NamedTuple):
    """One state.

    ``steps`` are the rows to fold, root first, its own last; ``audience`` that of events sent under
    it.
    """

    state_group: int
    room_nid: int
    entries: State
    steps: tuple[DeltaRow, ...]
    runs: tuple[int, ...]
    digest: int
    audience: int

    def __repr__(self) -> str:
        return f"Group({self.state_group}, {len(self.entries)} entries, {len(self.steps)} steps)"


def entry_digest(key_nid: int, event_nid: int) -> int:
    """A 64-bit mix of one entry (the finaliser of splitmix64 over both numbers)."""
    x = (key_nid * 0x9E3779B97F4A7C15 ^ event_nid * 0xC2B2AE3D27D4EB4F) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def signed(number: int) -> int:
    """A number modulo 2^64 as Postgres' int8."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def digest_of(entries: Mapping[int, int]) -> int:
    """The digest of a whole state: the sum of its entries' digests, so it does not depend on order."""
    return signed(sum(entry_digest(key, event) for key, event in entries.items()))


def fold(steps: Iterable[DeltaRow]) -> dict[int, int]:
    """The entries of several rows of a path, later ones winning, removals kept as `REMOVED`."""
    folded: dict[int, int] = {}
    for step in steps:
        folded.update(step.delta)
    return folded


def root_group(state_group: int, room_nid: int, entries: State, audience: int) -> Group:
    """A group that holds its whole state."""
    step = DeltaRow(state_group, entries)
    return Group(
        state_group,
        room_nid,
        entries,
        (step,),
        levels.root(len(entries)).runs,
        digest_of(entries),
        audience,
    )


def derive(parent: Group, change: Mapping[int, int], state_group: int, audience: int) -> Group:
    """The group of the parent's state with a change applied, placed by the levels."""
    entries = applied(parent.entries, change)
    digest = _digest_after(parent, change)
    for place in levels.candidates(parent.runs, len(entries)):
        kept = parent.steps[: place.keep]
        if not kept:
            break
        delta = fold(parent.steps[place.keep :])
        delta.update(change)
        if any(abs(state_group - step.state_group) > FARTHEST for step in kept):
            break
        if levels.affordable(sum(len(step.delta) for step in kept[1:]), len(delta), len(entries)):
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
        levels.root(len(entries)).runs,
        digest,
        audience,
    )


def applied(entries: State, change: Mapping[int, int]) -> State:
    """A state with a change applied; `REMOVED` takes the key away."""
    draft = entries.mutate()
    for key, event in change.items():
        if event != REMOVED:
            draft[key] = event
        elif key in draft:
            del draft[key]
    return draft.finish()


def _digest_after(parent: Group, change: Mapping[int, int]) -> int:
    digest = parent.digest
    for key, event in change.items():
        before = parent.entries.get(key)
        if before is not None:
            digest -= entry_digest(key, before)
        if event != REMOVED:
            digest += entry_digest(key, event)
    return signed(digest)


def changed_keys(one: Group, other: Group) -> set[int]:
    """The keys whose values differ.

    Costs what lies after the last common row of the two paths, over one new root as well.

    Where the paths have no row in common (as far as this process remembers), the states are
    compared whole.
    """
    if one.state_group == other.state_group:
        return set()
    for base, made in ((one, other), (other, one)):
        if (
            len(made.steps) > 1 and made.steps[-2].state_group == base.state_group
        ):  # what it adds to the other's path is all
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


def _behind(group: Group) -> tuple[DeltaRow, ...]:
    """A group's path with the rows before its root in the place of the root; empty if they are not known."""
    return (*group.steps[0].origin, *group.steps[1:]) if group.steps[0].origin else ()


def difference(base: Group, other: Group) -> dict[int, int]:
    """The change that makes the base's state the other's."""
    return {key: other.entries.get(key, REMOVED) for key in changed_keys(base, other)}
