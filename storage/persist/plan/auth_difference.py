"""Find the auth difference of several states, and the conflicted subgraph, for state resolution.

Both walks visit only the events of their result and its border:
- A path from a conflicted event to an event of the auth difference passes only through events of
  the difference. Reason: if an event on the path were in the auth chains of all states, so would be
  everything that it reaches. So the walk continues only from events of the difference.
- An event between two conflicted events is reached through events that reach a conflicted event.
  So the walk continues only from those.

Closures (`storage.persist.load.auth_closures`) answer whether an event is in the auth chain of a
state: they are those of the state's entries. "Reaches" means by auth events, one or more steps.

Source: room versions, state resolution v2 ("full conflicted set") and v2.1.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, ParamSpec, TypeVar

from storage.database.names import KEY_POWER_LEVELS
from storage.graph.chains import ChainPosition, Closure, reaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.missing_data import MissingData
from storage.persist.plan.auth_walk import AuthChains, asked, closures, known, walked
from storage.state.groups import Group

KNOWN_STATE: Final = 500  # a state with more entries is too large to load all its closures


P = ParamSpec("P")
T = TypeVar("T")
Steps = Generator[MissingData | None, None, T]
"""Work in small steps.

It yields after each step: None, or the `MissingData` that has to be loaded before the next step.
"""


class NotInChainCover(Exception):  # noqa: N818  # a turn of the search, not an error
    """An event of the search has no position in the chain cover; the graph is walked instead."""


def auth_difference(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
    """Return the auth difference of states that differ only in ``keys``, and the subgraph."""
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
    """Run all steps and return the result; raise `MissingData` if a step needs something."""
    while True:
        try:
            needs = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        if needs is not None:
            raise needs


def differing(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> Steps[set[int]]:
    """Return the events in the auth chains of some of these states, but not of all.

    Raise `NotInChainCover` if an event has no position in the chain cover.
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
    """Return those of these events that are not in the auth chains of all states."""
    change_set.auth_graph.ensure_standing(nids)
    apart = {nid for nid in nids if not everywhere.has(change_set, nid)}
    return apart - common.reached(apart)


def reached_anew(
    change_set: ChangeSet, nids: Collection[int], known: "ChainReach"
) -> Steps[set[int]]:
    """Return the events that these reach and that the auth chain ``known`` lacks."""
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
    """Return the events on auth paths from ``conflicted`` to a position in ``lowest`` or above.

    ``lowest`` has a number for each target chain (`lowest_of`). The result includes ``conflicted``.
    Events in ``known`` are not walked again.
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
    """Return the lowest number of these events on each chain of the chain cover."""
    lowest: dict[int, int] = {}
    for nid in nids:
        place = change_set.auth_graph.places.get(nid) or change_set.caches.places.row(nid)
        # the event being planned may have no position yet; then nothing reaches it
        if place is not None:
            lowest[place.chain_nid] = min(
                place.sequence_number, lowest.get(place.chain_nid, place.sequence_number)
            )
    return lowest


def farthest_of(change_set: ChangeSet, nids: Collection[int]) -> dict[int, int]:
    """Return the highest number that these events reach on each chain of the chain cover."""
    farthest: dict[int, int] = {}
    for closure in _closures(change_set, nids).values():
        for chain_nid, number in closure.items():
            if number > farthest.get(chain_nid, 0):
                farthest[chain_nid] = number
    return farthest


def asking(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
    """Call ``read`` until it returns; yield each `MissingData` that it raises."""
    while True:
        try:
            return read(*args, **kwargs)
        except MissingData as needs:
            yield needs


def _leads(closure: Closure, lowest: Mapping[int, int]) -> bool:
    """Return whether the closure reaches a position in ``lowest``; iterate over the smaller map."""
    if len(closure) < len(lowest):
        return any(
            lowest.get(chain_nid, number + 1) <= number for chain_nid, number in closure.items()
        )
    return any(closure.get(chain_nid, 0) >= number for chain_nid, number in lowest.items())


def _parents(change_set: ChangeSet, nids: Collection[int]) -> set[int]:
    """Return the auth events of these events."""
    change_set.events.ensure_rows(nids)
    return {auth for nid in nids for auth in change_set.events.row_of(nid).auth_events}


def _closures(change_set: ChangeSet, nids: Iterable[int]) -> dict[int, Closure]:
    """Return the closures of these events; raise `NotInChainCover` if one has none."""
    found = closures(change_set, nids)
    if found is None:
        raise NotInChainCover
    return found


class EveryChain:
    """The intersection of the auth chains of several sets of events.

    A set is given by the closures of its events. An event is in the intersection if each set
    reaches its number on its chain. So the minimum over the sets is kept for each chain.
    """

    def __init__(self, sets: Sequence[Sequence[Closure]]) -> None:
        self._sets = sets
        self._upto: dict[int, int] = {}

    def has(self, change_set: ChangeSet, nid: int) -> bool:
        chain_nid, number = change_set.auth_graph.place(nid)
        upto = self._upto.get(chain_nid)
        if upto is None:
            farthest = (
                max((closure.get(chain_nid, 0) for closure in closures), default=0)
                for closures in self._sets
            )
            upto = self._upto[chain_nid] = min(farthest)
        return upto >= number


class CommonReach:
    """The auth chain of the entries that the states have in common: those not under ``keys``."""

    def __init__(self, change_set: ChangeSet, state: Group, keys: set[int]) -> None:
        self._change_set = change_set
        self._state = state
        self._entries = state.entries
        self._keys = keys

    def reached(self, nids: Collection[int]) -> set[int]:
        """Return those of these events that are in the auth chain.

        Sources are tried in this order, until no event is left:
        1. The entries under the events' own keys, which nearly always suffice.
        2. Of a small state all other entries; of a large one those new in this change set.
        3. For a large state, a query for the committed entries.
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
                {nid for nid in left if nid not in self._change_set.auth_graph.new_places},
            )
        return set(nids) - left

    @property
    def _is_small(self) -> bool:
        return len(self._entries) <= KNOWN_STATE

    def _near(self, nids: Collection[int]) -> Iterator[int]:
        """Yield the common entries under the events' own keys."""
        self._change_set.events.ensure_rows(nids)
        for nid in nids:
            key = self._change_set.events.row_of(nid).state_key_nid
            entry = None if key is None or key in self._keys else self._entries.get(key)
            if entry is not None:
                yield entry

    def _others(self, _: Collection[int]) -> Iterator[int]:
        """Yield all common entries of a small state; of a large one, those of this change set."""
        if self._is_small:
            yield from (nid for key, nid in self._entries.items() if key not in self._keys)
            return
        new = self._change_set.auth_graph.new_places
        if len(self._entries) < len(new):
            yield from (
                nid for key, nid in self._entries.items() if nid in new and key not in self._keys
            )
            return
        for nid in reversed(new):
            key = self._change_set.events.row_of(nid).state_key_nid
            if key is not None and key not in self._keys and self._entries.get(key) == nid:
                yield nid

    def _reached_from(self, entries: Iterable[int], nids: Collection[int]) -> set[int]:
        left = {nid: self._change_set.auth_graph.place(nid) for nid in nids}
        others: list[int] = []
        for nid in entries:  # closures in memory first: usually they suffice
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
    """Remove the events that the closure reaches; return whether any are left."""
    for nid in [nid for nid, place in left.items() if reaches(closure, place)]:
        del left[nid]
    return bool(left)


class ChainReach:
    """The auth chain of a state."""

    def __init__(
        self, change_set: ChangeSet, state: Group, keys: set[int], first: Collection[int]
    ) -> None:
        """Describe the state to search.

        ``keys`` are its conflicted keys. ``first`` are keys to try first, because their events are
        the most likely to reach the events searched for.
        """
        self._change_set = change_set
        self._state = state
        self._keys = keys
        self._first = first
        self._conflicted: EveryChain | None = None

    def has(self, nid: int) -> bool:
        """Return whether an event of the state reaches this one.

        The likeliest entries are tried first: power levels, ``first``, and the event's own key.
        """
        change_set = self._change_set
        change_set.auth_graph.ensure_standing((nid,))
        place = change_set.auth_graph.place(nid)
        key = change_set.events.row_of(nid).state_key_nid
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
        """Return those of these events that no event of the state reaches."""
        return {nid for nid in nids if not self.has(nid)}

    def _by_conflict(self) -> "EveryChain":
        """Return the auth chain of the state's conflicted entries."""
        if self._conflicted is None:
            self._conflicted = EveryChain(
                [list(_closures(self._change_set, self._entries(self._keys)).values())]
            )
        return self._conflicted

    def _entries(self, keys: Iterable[int]) -> list[int]:
        """Return the state's events under these keys."""
        return [nid for key in keys if (nid := self._state.entries.get(key)) is not None]
