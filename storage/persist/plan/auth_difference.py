"""Find the auth difference of several states, and the conflicted subgraph, for state resolution.

Both walks visit only the events of their result and its border:
- A path from a conflicted event to an event of the auth difference passes only through events of
  the difference. Reason: if an event on the path were in the auth chains of all states, so would be
  everything that it reaches. So the walk continues only from events of the difference.
- An event between two conflicted events is reached through events that reach a conflicted event.
  So the walk continues only from those.

Closures (`storage.persist.load.chain_ancestors`) answer whether an event is in the auth chain of a
state: they are those of the state's entries. "Reaches" means by auth events, one or more steps.

Source: room versions, state resolution v2 ("full conflicted set") and v2.1.
"""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, ParamSpec, TypeVar

from storage.database.names import KEY_POWER_LEVELS
from storage.errors import StorageCorrupt
from storage.graph.chains import (
    ChainEntry,
    ChainParent,
    ChainPosition,
    Closure,
    closure_of,
    enter,
    reaches,
)
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.missing_data import MissingData
from storage.persist.model.rows import EventRow
from storage.state.groups import Group

# --------------------------------------------------------------------------------------------------
# Find the auth difference and the conflicted subgraph by walking whole auth chains.
#
# This is needed if an event of the search has no position in the chain cover: a rejected event in a
# state that a caller gave. The other half of this file finds the same by the chain cover.
#
# The module also computes the closures of events in memory (`closures`), for both ways.

Graph = Mapping[int, tuple[int, ...]]

PLACES_AT_ONCE: Final = 256  # limit per event of the first query of `reached_by_committed`
WALKED_STATE: Final = 500  # a state with more entries is too large to walk its auth chain


class AuthChains(NamedTuple):
    """Two sets of nids that state resolution needs.

    ``difference`` has the events in the auth chain of some state but not of all. ``subgraph`` has
    the events on auth paths between two conflicted events.
    """

    difference: set[int]
    subgraph: set[int]


def walked(change_set: ChangeSet, states: Sequence[Group], keys: set[int]) -> AuthChains:
    """Return the auth difference of states that differ only in ``keys``, and the subgraph."""
    conflicted = [{state.entries[key] for key in keys if key in state.entries} for state in states]
    graph = auth_graph(change_set, set().union(*conflicted))
    chains = [reach(graph, nids) for nids in conflicted]
    difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
    difference -= _reached_by_common(change_set, states[0], keys, difference)
    return AuthChains(difference, _between(graph, set().union(*conflicted)))


def _reached_by_common(
    change_set: ChangeSet, state: Group, keys: set[int], nids: set[int]
) -> set[int]:
    """Return those of these events that the common entries of the states reach.

    A small state's common entries are walked, which costs less than a query. Of a large state only
    those new in this change set are walked; a query covers the committed ones.
    """
    if not nids:
        return set()
    common = (
        [nid for key, nid in state.entries.items() if key not in keys]
        if len(state.entries) <= WALKED_STATE
        else []
    )
    if common:
        return reach(auth_graph(change_set, common), common) & nids
    new = (
        [
            nid
            for key, nid in state.entries.items()
            if key not in keys and nid in change_set.events.new_events
        ]
        if change_set.auth_graph.new_places
        else []
    )
    reached = reach(auth_graph(change_set, new), new) & nids
    return reached | reached_by_committed(change_set, state, keys, nids - reached)


def reached_by_committed(
    change_set: ChangeSet, state: Group, keys: Collection[int], nids: Iterable[int]
) -> set[int]:
    """Return those of these events that the committed common entries reach.

    The query follows the chain cover upwards from ``nids`` to the events that reach them. It
    returns a limited number of those per event, because nearly always one of the first is in the
    state. Events without a hit at the limit are queried again with a larger limit.
    """
    reached: set[int] = set()
    limit = PLACES_AT_ONCE
    left = frozenset(nids)
    while left:
        reaching = change_set.answers.answer(("reaching", left, limit))
        reached |= {
            reached_nid
            for reached_nid, nid, key in reaching
            if key not in keys and state.entries.get(key) == nid
        }
        full = Counter(reached_nid for reached_nid, _, _ in reaching)
        left = frozenset(nid for nid in left - reached if full[nid] == limit)
        limit *= 16
    return reached


def auth_graph(change_set: ChangeSet, nids: Iterable[int]) -> Graph:
    """Return the auth events of these events and of all events that they reach.

    Rows in memory are used first; the rest is queried. Raise `StorageCorrupt` if an event is not
    stored.
    """
    graph: dict[int, tuple[int, ...]] = {}
    committed: set[int] = set()
    stack = list(nids)
    while stack:
        nid = stack.pop()
        if nid in graph or nid in committed:
            continue
        row = change_set.events.row_in_memory(nid)
        if row is None:
            committed.add(nid)
        else:
            graph[nid] = row.auth_events
            stack.extend(row.auth_events)
    if committed:
        graph.update(change_set.answers.answer(("auth_graph", frozenset(committed))))
    if lost := {auth for auths in graph.values() for auth in auths if auth not in graph}.union(
        committed - graph.keys()
    ):
        raise StorageCorrupt(
            "events that the auth graph refers to are not stored", event_nids=sorted(lost)
        )
    return graph


def reach(graph: Graph, nids: Iterable[int]) -> set[int]:
    """Return the auth chain of these events: all events that they reach.

    One of ``nids`` is included only if another reaches it.
    """
    reached: set[int] = set()
    stack = [parent for nid in nids for parent in graph[nid]]
    while stack:
        nid = stack.pop()
        if nid not in reached:
            reached.add(nid)
            stack.extend(graph[nid])
    return reached


def _between(graph: Graph, conflicted: set[int]) -> set[int]:
    """Return the events on auth paths between two conflicted events, and the conflicted events.

    These are the events that a conflicted event reaches and that reach a conflicted event.
    """
    down = reach(graph, conflicted) | conflicted
    children: dict[int, list[int]] = {}
    for nid in down:
        for parent in graph[nid]:
            children.setdefault(parent, []).append(nid)
    up = set(conflicted)
    stack = list(conflicted)
    while stack:
        for child in children.get(stack.pop(), ()):
            if child not in up:
                up.add(child)
                stack.append(child)
    return down & up


def closures(change_set: ChangeSet, nids: Iterable[int]) -> dict[int, Closure] | None:
    """Return the closures of these events; None if one has no position in the chain cover.

    Raise `MissingData` for closures that are not in memory and cannot be computed from it.
    """
    lacking: set[int] = set()
    by_nid: dict[int, Closure] = {}
    for nid in nids:
        closure = closure_in_memory(change_set, nid)
        if closure is None:
            closure = _closure(change_set, nid, lacking)
        if closure is not None:
            by_nid[nid] = closure
    if not lacking.isdisjoint(change_set.auth_graph.loose):
        return None
    if lacking:
        raise MissingData("closures", lacking)
    return by_nid


def _closure(change_set: ChangeSet, nid: int, lacking: set[int]) -> Closure | None:
    """Compute and keep the closure of an event from those of its auth events.

    The walk is depth-first and iterative, because auth chains can be long. An event whose closure
    needs data that is not in memory is ``stuck``. Then the result is None, and ``lacking`` gets the
    events to load.
    """
    stuck: set[int] = set()
    stack = [nid]
    while stack:
        top = stack[-1]
        row = (
            None if closure_in_memory(change_set, top) is not None else _placed_row(change_set, top)
        )
        if row is not None and (
            unvisited := [
                auth
                for auth in row.auth_events
                if auth not in stuck and closure_in_memory(change_set, auth) is None
            ]
        ):
            stack += unvisited
            continue
        stack.pop()
        if row is not None and stuck.isdisjoint(row.auth_events):
            change_set.auth_graph.closures[top] = closure_of(
                [
                    (change_set.auth_graph.chain_position(auth), own)
                    for auth in row.auth_events
                    if (own := closure_in_memory(change_set, auth)) is not None
                ]
            )
        elif closure_in_memory(change_set, top) is None:
            stuck.add(top)
            if row is None:
                lacking.add(top)
    return closure_in_memory(change_set, nid)


def closure_in_memory(change_set: ChangeSet, nid: int) -> Closure | None:
    """Return the closure of an event if it is in memory.

    None means only that it is not in memory.
    """
    closure = change_set.auth_graph.closures.get(nid)
    return change_set.caches.closures.get(nid) if closure is None else closure


def _placed_row(change_set: ChangeSet, nid: int) -> EventRow | None:
    """Return the row of an event that has a position in the chain cover or is about to get one.

    Then its auth events have positions, too. Return None if that is unknown here.
    """
    row = change_set.events.row_in_memory(nid)
    if (
        row is change_set.events.pending
        or nid in change_set.auth_graph.places
        or nid in change_set.caches.places
    ):
        return row
    return None


CLOSURES_STATE_MAX: Final = 500  # a state with more entries is too large to load all its closures


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
    value_closures = yield from asking(_closures, change_set, values)
    everywhere = EveryChain([[value_closures[nid] for nid in nids] for nids in conflicted])
    common = CommonReach(change_set, states[0], keys)
    difference: set[int] = set()
    seen: set[int] = set()
    frontier = values
    while frontier:
        parents = (yield from asking(_parents, change_set, frontier)) - seen
        seen |= parents
        frontier = yield from asking(_apart, change_set, parents, everywhere, common)
        difference |= frontier
        yield None
    return difference


def _apart(
    change_set: ChangeSet, nids: Collection[int], everywhere: "EveryChain", common: "CommonReach"
) -> set[int]:
    """Return those of these events that are not in the auth chains of all states."""
    change_set.auth_graph.ensure_standing(nids)
    apart = {nid for nid in nids if not everywhere.has(change_set, nid)}
    return apart - common.reached(apart)


def reached_anew(
    change_set: ChangeSet, nids: Collection[int], chain: "ChainReach"
) -> Steps[set[int]]:
    """Return the events that these reach and that the auth chain ``chain`` lacks."""
    reached: set[int] = set()
    frontier = set(nids)
    while frontier:
        parents = (yield from asking(_parents, change_set, frontier)) - reached
        frontier = yield from asking(chain.lacks, parents)
        reached |= frontier
        yield None
    return reached


def between(
    change_set: ChangeSet,
    conflicted: Collection[int],
    lowest: Mapping[int, int],
    walked_before: Collection[int] = (),
) -> Steps[set[int]]:
    """Return the events on auth paths from ``conflicted`` to a position in ``lowest`` or above.

    ``lowest`` has a number for each target chain (`lowest_of`). The result includes ``conflicted``.
    Events in ``walked_before`` are not walked again.
    """
    on_paths = set(conflicted)
    frontier = set(conflicted)
    while frontier:
        closed = yield from asking(_closures, change_set, frontier)
        leading = {nid for nid, closure in closed.items() if _leads(closure, lowest)}
        on_paths |= leading
        frontier = (yield from asking(_parents, change_set, leading)) - on_paths
        frontier.difference_update(walked_before)
        yield None
    return on_paths


def lowest_of(change_set: ChangeSet, nids: Iterable[int]) -> dict[int, int]:
    """Return the lowest number of these events on each chain of the chain cover."""
    lowest: dict[int, int] = {}
    for nid in nids:
        position = change_set.auth_graph.places.get(nid) or change_set.caches.places.row(nid)
        # the event being planned may have no position yet; then nothing reaches it
        if position is not None:
            lowest[position.chain_nid] = min(
                position.sequence_number, lowest.get(position.chain_nid, position.sequence_number)
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
    by_nid = closures(change_set, nids)
    if by_nid is None:
        raise NotInChainCover
    return by_nid


class EveryChain:
    """The intersection of the auth chains of several sets of events.

    A set is given by the closures of its events. An event is in the intersection if each set
    reaches its number on its chain. So the minimum over the sets is kept for each chain.
    """

    def __init__(self, sets: Sequence[Sequence[Closure]]) -> None:
        self._sets = sets
        self._upto: dict[int, int] = {}

    def has(self, change_set: ChangeSet, nid: int) -> bool:
        chain_nid, number = change_set.auth_graph.chain_position(nid)
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
            left -= reached_by_committed(
                self._change_set,
                self._state,
                self._keys,
                {nid for nid in left if nid not in self._change_set.auth_graph.new_places},
            )
        return set(nids) - left

    @property
    def _is_small(self) -> bool:
        return len(self._entries) <= CLOSURES_STATE_MAX

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
        left = {nid: self._change_set.auth_graph.chain_position(nid) for nid in nids}
        others: list[int] = []
        for nid in entries:  # closures in memory first: usually they suffice
            closure = closure_in_memory(self._change_set, nid)
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
    for nid in [nid for nid, position in left.items() if reaches(closure, position)]:
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
        position = change_set.auth_graph.chain_position(nid)
        key = change_set.events.row_of(nid).state_key_nid
        near = _closures(
            change_set,
            self._entries({KEY_POWER_LEVELS, *self._first, *(() if key is None else (key,))}),
        )
        if any(reaches(closure, position) for closure in near.values()):
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


# --------------------------------------------------------------------------------------------------
# Give a new state event its position in the chain cover (`storage.graph.chains`).


def cover_event(change_set: ChangeSet, row: EventRow) -> ChainEntry | None:
    """Return the chain cover entry of a state event; None for a rejected or message event.

    The event's auth events must have positions. The highest of those with its own state key is its
    predecessor: the event continues that chain, or begins a new one (`enter`).
    """
    if row.state_key_nid is None or row.rejected is not None:
        return None
    # keep the name until it is written together with the position
    change_set.names.state_key_names[row.state_key_nid] = change_set.names.state_key_name(
        row.state_key_nid
    )
    change_set.auth_graph.ensure_places(row.auth_events)
    # no MissingData here: `auth_rows_of` has looked them up by their ids
    rows = [change_set.events.row_of(nid) for nid in row.auth_events]
    parents = [
        ChainParent(
            auth.event_nid, change_set.auth_graph.chain_position(auth.event_nid), auth.auth_events
        )
        for auth in rows
    ]
    own = [
        parent.position
        for parent, auth in zip(parents, rows, strict=True)
        if auth.state_key_nid == row.state_key_nid
    ]
    predecessor = max(own, default=None)
    chain = None if predecessor is None else change_set.auth_graph.chain(predecessor.chain_nid)
    return enter(predecessor, chain, -row.event_nid, parents)
