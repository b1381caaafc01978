"""The state at a merge: resolution of the parents' states, at the cost of the fork, not the room.

A walk from the parents back to their common ancestors finds the keys that can differ. With `exact`
the whole of `storage.auth.resolve` decides. Without, `resolve_conflicts` gets an auth difference
computed only from the events since the fork. An older event that no older event cites may then be
missing from the difference. That is good enough for a generator that needs plausible states in a
room of 50,000 members, but not for a test that compares states.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from storage.auth import resolve, resolve_conflicts
from storage.ids import EventId, StateKey
from storage.persistent_map import changed
from storage.testing.graph import EMPTY_STATE, ParsedEvents, RoomGraph
from storage.testing.model import Merged, State

MERGES_MAX: Final = 256


def merge(graph: RoomGraph, parents: Sequence[EventId], *, exact: bool) -> Merged:
    """Return the state before an event with these parents; without parents the empty state."""
    states = [graph.nodes[parent].state_after for parent in parents]
    if not states:
        return Merged(EMPTY_STATE, frozenset())
    if all(state is states[0] for state in states):
        return Merged(states[0], frozenset())
    known = graph.merges.get((exact, *parents))
    if known is None:
        known = _merge_unlike(graph, parents, states, exact=exact)
        if len(graph.merges) >= MERGES_MAX:
            graph.merges.clear()
        graph.merges[exact, *parents] = known
    return known


def _merge_unlike(
    graph: RoomGraph, parents: Sequence[EventId], states: Sequence[State], *, exact: bool
) -> Merged:
    since_fork = _reach_since_fork(graph, parents)
    disputed = frozenset(
        key
        for key in _changed_keys(graph, since_fork)
        if len({state.get(key) for state in states}) > 1
    )
    if not disputed:
        return Merged(states[0], disputed)
    if exact:
        return Merged(_resolved_exactly(graph, states), disputed)
    return Merged(_resolved_nearby(graph, states, disputed, set(since_fork)), disputed)


def _reach_since_fork(graph: RoomGraph, parents: Sequence[EventId]) -> list[EventId]:
    """Return the events that some but not all parents descend from (or are), newest first."""
    everybody = (1 << len(parents)) - 1
    masks: dict[EventId, int] = {}
    queue: list[tuple[int, EventId]] = []
    partial = 0
    for bit, parent in enumerate(parents):
        masks[parent] = masks.get(parent, 0) | 1 << bit
    for parent, mask in masks.items():
        heapq.heappush(queue, (-graph.nodes[parent].topological, parent))
        partial += mask != everybody
    reached: list[EventId] = []
    while queue and partial:
        _, event_id = heapq.heappop(queue)
        mask = masks[event_id]
        if mask != everybody:
            partial -= 1
            reached.append(event_id)
        for before in graph.nodes[event_id].prev_events:
            node = graph.nodes.get(before)
            if node is None:
                continue
            old = masks.get(before, 0)
            new = old | mask
            if old == 0:
                heapq.heappush(queue, (-node.topological, before))
                partial += new != everybody
            elif old != everybody and new == everybody:
                partial -= 1
            masks[before] = new
    return reached


def _changed_keys(graph: RoomGraph, ids: Iterable[EventId]) -> set[StateKey]:
    keys: set[StateKey] = set()
    for event_id in ids:
        key = graph.nodes[event_id].key
        if key is not None:
            keys.add(key)
        keys |= graph.resolution_changes.get(event_id, frozenset())
    return keys


def _resolved_exactly(graph: RoomGraph, states: Sequence[State]) -> State:
    resolved = resolve(
        graph.room_version,
        [dict(state) for state in states],
        ParsedEvents(graph),
        rejected=graph.rejected,
    )
    return _updated(states[0], resolved, set(states[0]) | set(resolved))


def _updated(state: State, values: Mapping[StateKey, EventId], keys: Iterable[StateKey]) -> State:
    """Return `state` with `keys` as in `values`; drop a key that is missing there."""
    return changed(state, {key: values.get(key) for key in keys})


def _resolved_nearby(
    graph: RoomGraph,
    states: Sequence[State],
    disputed: frozenset[StateKey],
    since_fork: set[EventId],
) -> State:
    conflicted = {key: {state[key] for state in states if key in state} for key in disputed}
    decided = resolve_conflicts(
        graph.room_version,
        _Undisputed(states[0], disputed),
        conflicted,
        _auth_difference(
            graph,
            [{state[key] for key in disputed if key in state} for state in states],
            since_fork,
        ),
        ParsedEvents(graph),
        rejected=graph.rejected,
        conflicted_subgraph=_conflicted_subgraph(graph, set().union(*conflicted.values())),
    )
    return _updated(states[0], decided, disputed | set(decided))


class _Undisputed(Mapping[StateKey, EventId]):
    """A state without the disputed keys, for look-ups that do not cost the size of the state."""

    def __init__(self, state: State, disputed: frozenset[StateKey]) -> None:
        self._state = state
        self._disputed = disputed

    def __getitem__(self, key: StateKey) -> EventId:
        if key in self._disputed:
            raise KeyError(key)
        return self._state[key]

    def __iter__(self) -> Iterator[StateKey]:
        return (key for key in self._state if key not in self._disputed)

    def __len__(self) -> int:
        return len(self._state) - sum(key in self._state for key in self._disputed)


def _auth_difference(
    graph: RoomGraph, values: Sequence[set[EventId]], since_fork: set[EventId]
) -> set[EventId]:
    chains = [_auth_chain_within(graph, ids, since_fork) for ids in values]
    return set().union(*chains) - chains[0].intersection(*chains[1:])


def _auth_chain_within(
    graph: RoomGraph, ids: Iterable[EventId], bounds: set[EventId]
) -> set[EventId]:
    seen: set[EventId] = set()
    todo = [event_id for event_id in ids if event_id in bounds]
    while todo:
        for cited in graph.node(todo.pop()).auth_events:
            if cited in bounds and cited not in seen:
                seen.add(cited)
                todo.append(cited)
    return seen


def _conflicted_subgraph(graph: RoomGraph, conflicted: set[EventId]) -> set[EventId]:
    """Return the events on auth_events paths between two conflicted ones, with both ends.

    For room version 12.
    """
    floor = min(graph.node(event_id).topological for event_id in conflicted)
    cited = {event_id: _cited_above(graph, event_id, floor) for event_id in conflicted}
    todo = list(cited)
    while todo:
        for event_id in cited[todo.pop()]:
            if event_id not in cited:
                cited[event_id] = _cited_above(graph, event_id, floor)
                todo.append(event_id)
    found: set[EventId] = set()
    for event_id in sorted(cited, key=lambda event_id: graph.node(event_id).topological):
        if event_id in conflicted or not found.isdisjoint(cited[event_id]):
            found.add(event_id)
    return found


def _cited_above(graph: RoomGraph, event_id: EventId, floor: int) -> list[EventId]:
    return [
        cited
        for cited in graph.node(event_id).auth_events
        if cited in graph and graph.node(cited).topological >= floor
    ]
