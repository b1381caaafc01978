"""The auth difference of several states, and the conflicted subgraph, for state resolution: walked no farther than they go.

Each event of the difference is reached from a conflicted one by way of events of the difference alone: had all states an event on the way
in their chains, they had what it reaches as well. So a walk from the conflicted events that goes on only from what is in the difference
finds all of it, and looks besides at its border only; whether an event is in a chain is seen by the closures (`storage.persist.load.auth_closures`)
of what the chain begins with. Likewise what lies between two conflicted events is reached by way of events that reach one.

Source: room versions, state resolution v2 ("full conflicted set") and v2.1; rules.md, section 7.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, ParamSpec, TypeVar

from storage.database.names import KEY_POWER_LEVELS
from storage.graph.chains import ChainPosition, Closure, reaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.missing_data import MissingData
from storage.persist.plan.auth_walk import AuthChains, asked, closures, known, walked
from storage.state.groups import Group

KNOWN_STATE: Final = 500  # entries of a state all of whose closures are kept at hand


P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[MissingData | None, None, T]
"""Work in small steps: yields after each, with what has to be loaded before the next if there is something."""


class NotInChainCover(Exception):  # noqa: N818  # a turn of the search, not an error
    """An event in question has no place in the cover."""


def auth_difference(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
    """The auth difference of states that differ in these keys only, and the conflicted subgraph."""
    try:
        return _searched(change_set, states, keys)
    except NotInChainCover:
        return walked(change_set, states, keys)


def _searched(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
    values = {state.entries[key] for state in states for key in keys if key in state.entries}
    return AuthChains(
        at_once(differing(change_set, states, keys)),
        at_once(between(change_set, values, lowest_of(change_set, values))),
    )


def at_once(steps: Steps[T]) -> T:
    """All of the steps. `MissingData` if one of them needs something."""
    while True:
        try:
            needs = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        if needs is not None:
            raise needs


def differing(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> Steps[set[int]]:
    """The events in the auth chains of some of these states, but not of all.

    `NotInChainCover` if the cover does not say it.
    """
    conflicted = [{state.entries[key] for key in keys if key in state.entries} for state in states]
    values = set[int]().union(*conflicted)
    known = yield from asking(_closures, change_set, values)
    everywhere = EveryChain([[known[nid] for nid in nids] for nids in conflicted])
    common = CommonReach(change_set, states[0], keys)
    found: set[int] = set()
    seen: set[int] = set()
    front = values
    while front:
        parents = (yield from asking(_parents, change_set, front)) - seen
        seen |= parents
        front = yield from asking(_apart, change_set, parents, everywhere, common)
        found |= front
        yield None
    return found


def _apart(
    change_set: ChangeSet, nids: Collection[int], everywhere: "EveryChain", common: "CommonReach"
) -> set[int]:
    change_set.ensure_standing(nids)
    apart = {nid for nid in nids if not everywhere.has(change_set, nid)}
    return apart - common.reached(apart)


def reached_anew(
    change_set: ChangeSet, nids: Collection[int], known: "ChainReach"
) -> Steps[set[int]]:
    """What these events reach that a state did not reach."""
    found: set[int] = set()
    front = set(nids)
    while front:
        parents = (yield from asking(_parents, change_set, front)) - found
        front = yield from asking(known.lacks, parents)
        found |= front
        yield None
    return found


def between(
    change_set: ChangeSet,
    conflicted: Collection[int],
    lowest: Mapping[int, int],
    known: Collection[int] = (),
) -> Steps[set[int]]:
    """What lies on an auth path from one of these to an event as high as ``lowest`` in its chain, these included.

    What is `known` is not walked again.
    """
    found = set(conflicted)
    front = set(conflicted)
    while front:
        closed = yield from asking(_closures, change_set, front)
        leading = {nid for nid, closure in closed.items() if _leads(closure, lowest)}
        found |= leading
        front = (yield from asking(_parents, change_set, leading)) - found
        front.difference_update(known)
        yield None
    return found


def lowest_of(change_set: ChangeSet, nids: Iterable[int]) -> dict[int, int]:
    """By chain, the lowest number of these events."""
    lowest: dict[int, int] = {}
    for nid in nids:
        place = change_set.places.get(nid) or change_set.caches.places.get(nid)
        if place is not None:  # the event in hand may have none yet; then nothing reaches it
            lowest[place.chain_nid] = min(
                place.sequence_number, lowest.get(place.chain_nid, place.sequence_number)
            )
    return lowest


def farthest_of(change_set: ChangeSet, nids: Collection[int]) -> dict[int, int]:
    """By chain, the highest number that one of these events reaches."""
    farthest: dict[int, int] = {}
    for closure in _closures(change_set, nids).values():
        for chain_nid, number in closure.items():
            if number > farthest.get(chain_nid, 0):
                farthest[chain_nid] = number
    return farthest


def asking(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
    """Read something; what it needs is yielded until it is there."""
    while True:
        try:
            return read(*args, **kwargs)
        except MissingData as needs:
            yield needs


def _leads(closure: Closure, lowest: Mapping[int, int]) -> bool:
    if len(closure) < len(lowest):
        return any(
            lowest.get(chain_nid, number + 1) <= number for chain_nid, number in closure.items()
        )
    return any(closure.get(chain_nid, 0) >= number for chain_nid, number in lowest.items())


def _parents(change_set: ChangeSet, nids: Collection[int]) -> set[int]:
    change_set.ensure_rows(nids)
    return {auth for nid in nids for auth in change_set.row_of(nid).auth_events}


def _closures(change_set: ChangeSet, nids: Iterable[int]) -> dict[int, Closure]:
    found = closures(change_set, nids)
    if found is None:
        raise NotInChainCover
    return found


class EveryChain:
    """What the chains of all these sets hold, given by the closures of their events."""

    def __init__(self, sets: Sequence[Sequence[Closure]]) -> None:
        self._sets = sets
        self._upto: dict[int, int] = {}

    def has(self, change_set: ChangeSet, nid: int) -> bool:
        """Whether the event is in the chain of each."""
        chain_nid, number = change_set.place(nid)
        upto = self._upto.get(chain_nid)
        if upto is None:
            farthest = (
                max((closure.get(chain_nid, 0) for closure in closures), default=0)
                for closures in self._sets
            )
            upto = self._upto[chain_nid] = min(farthest)
        return upto >= number


class CommonReach:
    """The auth chain of what states have in common: those of their entries whose keys are not in conflict."""

    def __init__(self, change_set: ChangeSet, state: Group, keys: set[int]) -> None:
        self._change_set = change_set
        self._state = state
        self._entries = state.entries
        self._keys = keys

    def reached(self, nids: Collection[int]) -> set[int]:
        """Which of these events it holds.

        Nearly always the entries under their own keys tell. Then the others are looked at: all of a
        small state; of a large one those of this change set, and the database is asked for the
        rest.
        """
        left = set(nids)
        for entries in (self._near, self._others):
            if left:
                left -= self._reached_from(entries(left), left)
        if left and not self._is_small:
            left -= asked(
                self._change_set,
                self._state,
                self._keys,
                {nid for nid in left if nid not in self._change_set.new_places},
            )
        return set(nids) - left

    @property
    def _is_small(self) -> bool:
        return len(self._entries) <= KNOWN_STATE

    def _near(self, nids: Collection[int]) -> Iterator[int]:
        self._change_set.ensure_rows(nids)
        for nid in nids:
            key = self._change_set.row_of(nid).state_key_nid
            entry = None if key is None or key in self._keys else self._entries.get(key)
            if entry is not None:
                yield entry

    def _others(self, _: Collection[int]) -> Iterator[int]:
        if self._is_small:
            yield from (nid for key, nid in self._entries.items() if key not in self._keys)
            return
        new = self._change_set.new_places
        if len(self._entries) < len(new):
            yield from (
                nid for key, nid in self._entries.items() if nid in new and key not in self._keys
            )
            return
        for nid in reversed(new):
            key = self._change_set.row_of(nid).state_key_nid
            if key is not None and key not in self._keys and self._entries.get(key) == nid:
                yield nid

    def _reached_from(self, entries: Iterable[int], nids: Collection[int]) -> set[int]:
        left = {nid: self._change_set.place(nid) for nid in nids}
        others: list[int] = []
        for nid in entries:  # first what is at hand: mostly that is enough
            closure = known(self._change_set, nid)
            if closure is None:
                others.append(nid)
            elif not _strike(left, closure):
                return set(nids)
        for closure in _closures(self._change_set, others).values():
            if not _strike(left, closure):
                break
        return set(nids) - left.keys()


def _strike(left: dict[int, ChainPosition], closure: Closure) -> bool:
    """Take out what the closure reaches; whether anything is left."""
    for nid in [nid for nid, place in left.items() if reaches(closure, place)]:
        del left[nid]
    return bool(left)


class ChainReach:
    """The auth chain of a state."""

    def __init__(
        self, change_set: ChangeSet, state: Group, keys: set[int], first: Collection[int]
    ) -> None:
        """``keys``: those of the state that are in conflict; ``first``: those whose events are most likely to reach what is in question."""
        self._change_set = change_set
        self._state = state
        self._keys = keys
        self._first = first
        self._conflicted: EveryChain | None = None

    def has(self, nid: int) -> bool:
        """Whether an event of the state reaches this one."""
        change_set = self._change_set
        change_set.ensure_standing((nid,))
        place = change_set.place(nid)
        key = change_set.row_of(nid).state_key_nid
        near = _closures(
            change_set,
            self._entries({KEY_POWER_LEVELS, *self._first, *(() if key is None else (key,))}),
        )
        if any(reaches(closure, place) for closure in near.values()):
            return True
        return self._by_conflict().has(change_set, nid) or bool(
            CommonReach(change_set, self._state, self._keys).reached((nid,))
        )

    def lacks(self, nids: Iterable[int]) -> set[int]:
        """Which of these events no event of the state reaches."""
        return {nid for nid in nids if not self.has(nid)}

    def _by_conflict(self) -> "EveryChain":
        if self._conflicted is None:
            self._conflicted = EveryChain(
                [list(_closures(self._change_set, self._entries(self._keys)).values())]
            )
        return self._conflicted

    def _entries(self, keys: Iterable[int]) -> list[int]:
        return [nid for key in keys if (nid := self._state.entries.get(key)) is not None]
