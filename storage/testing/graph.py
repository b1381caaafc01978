"""The event graph of a built room: nodes, states, and facts about trimmed events.

The state of a node is a persistent map. So a message costs nothing and a state event O(log of the
state's size), also with 50,000 members. `trim` drops nodes behind a point that every branch has
merged into, for rooms that are streamed.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from storage.auth import resolve, resolve_conflicts
from storage.event import Event, load
from storage.ids import EventId, RoomId, StateKey
from storage.persistent_map import Map, changed
from storage.testing.model import BuiltEvent, Merged, State

EMPTY_STATE: Final[State] = Map()
PARSED_MAX: Final = 20_000


class RoomGraph:
    """The shared part of all branches of one built room."""

    def __init__(self, room_version: str) -> None:
        self.room_version = room_version
        self.room_id: RoomId | None = None
        self.nodes: dict[EventId, BuiltEvent] = {}
        self.count: int = 0
        self.rejected: set[EventId] = set()
        self.reference_hashes: dict[EventId, str] = {}
        self.merges: dict[tuple[bool | EventId, ...], Merged] = {}
        self.resolution_changes: dict[EventId, frozenset[StateKey]] = {}
        self._archive: dict[EventId, BuiltEvent] = {}
        self._contents: dict[EventId, Mapping[str, Any]] = {}
        self._memberships: dict[EventId, str] = {}
        self._parsed: dict[EventId, Event] = {}

    def add(self, node: BuiltEvent, content: Mapping[str, Any]) -> None:
        """Add a node; keep the content of state events, and of members only the membership."""
        self.nodes[node.event_id] = node
        self.count += 1
        if node.expected == "rejected":
            self.rejected.add(node.event_id)
        if node.type == "m.room.member":
            self._memberships[node.event_id] = str(content.get("membership", ""))
        elif node.state_key is not None:
            self._contents[node.event_id] = content

    def __contains__(self, event_id: object) -> bool:
        return event_id in self.nodes or event_id in self._archive

    def node(self, event_id: str) -> BuiltEvent:
        """Return a node, or the rest of a trimmed state event (with empty states).

        Raise KeyError.
        """
        key = EventId(event_id)
        node = self.nodes.get(key)
        return self._archive[key] if node is None else node

    def membership(self, state: State, user_id: str) -> str | None:
        """Return a user's membership in a state, None if there is no member event."""
        event_id = state.get(("m.room.member", user_id))
        return None if event_id is None else self._memberships[event_id]

    def content(self, state: State, key: StateKey) -> Mapping[str, Any]:
        """Return the content of a state event that is no member event; {} if the state has none."""
        event_id = state.get(key)
        return {} if event_id is None else self._contents[event_id]

    def parsed(self, event_id: EventId) -> Event:
        """Return the event as `storage.event` reads it.

        Raise KeyError if it was never here or is trimmed.
        """
        event = self._parsed.get(event_id)
        if event is None:
            node = self.node(event_id)
            event = load(
                node.pdu, self.room_version, event_id, redacted=node.expected == "redacted"
            )
            if len(self._parsed) >= PARSED_MAX:
                self._parsed.clear()
            self._parsed[event_id] = event
        return event

    def maximal(self, ids: Iterable[EventId]) -> tuple[EventId, ...]:
        """Return those of `ids` that are no ancestors of another one, in the given order."""
        unique_ids = list(dict.fromkeys(ids))
        if len(unique_ids) < 2:
            return tuple(unique_ids)
        floor = min(self.nodes[event_id].topological for event_id in unique_ids)
        covered = set(self.ancestors(unique_ids, floor))
        return tuple(event_id for event_id in unique_ids if event_id not in covered)

    def ancestors(self, ids: Iterable[EventId], floor: int) -> Iterator[EventId]:
        """Yield the ancestors of `ids` over prev_events, down to a topological number `floor`."""
        seen: set[EventId] = set()
        todo = list(ids)
        while todo:
            for parent in self.nodes[todo.pop()].prev_events:
                node = self.nodes.get(parent)
                if node is not None and parent not in seen and node.topological >= floor:
                    seen.add(parent)
                    todo.append(parent)
                    yield parent

    def auth_chain(self, ids: Iterable[EventId]) -> set[EventId]:
        """Return all events that `ids` reach over auth_events.

        The ids themselves are included only if another one reaches them.
        """
        seen: set[EventId] = set()
        todo = list(ids)
        while todo:
            fresh = [cited for cited in self.node(todo.pop()).auth_events if cited not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return seen

    def trim(self, keep: EventId) -> None:
        """Drop all nodes behind `keep`, which every later event must descend from.

        Its state, the auth events cited there, and every state event that is no member event stay.
        That is enough to continue and to resolve later forks. The time is proportional to the
        state.
        """
        last = self.nodes[keep]
        kept = set(last.state_after.values())
        for event_id in list(kept):
            kept.update(self.node(event_id).auth_events)
        for event_id, node in self.nodes.items():
            if node.state_key is not None and (event_id in kept or node.type != "m.room.member"):
                self._archive[event_id] = replace(
                    node, state_before=EMPTY_STATE, state_after=EMPTY_STATE
                )
        self._archive = {
            key: node
            for key, node in self._archive.items()
            if key in kept or node.type != "m.room.member"
        }
        self.nodes = {keep: last}
        self._forget_all_but({*self._archive, keep})

    def _forget_all_but(self, ids: Collection[EventId]) -> None:
        self._memberships = {key: value for key, value in self._memberships.items() if key in ids}
        self.reference_hashes = {
            key: value for key, value in self.reference_hashes.items() if key in ids
        }
        self.resolution_changes = {
            key: value for key, value in self.resolution_changes.items() if key in ids
        }
        self.rejected &= set(ids)
        self.merges.clear()
        self._parsed.clear()


class ParsedEvents(Mapping[EventId, Event]):
    """The graph's events as `storage.auth` needs them: parsed on demand."""

    def __init__(self, graph: RoomGraph) -> None:
        self._graph = graph

    def __getitem__(self, event_id: EventId) -> Event:
        return self._graph.parsed(event_id)

    def __iter__(self) -> Iterator[EventId]:
        return iter(self._graph.nodes)

    def __len__(self) -> int:
        return len(self._graph.nodes)


# --------------------------------------------------------------------------------------------------
# The state at a merge: resolution of the parents' states, at the cost of the fork, not the room.
#
# A walk from the parents back to their common ancestors finds the keys that can differ. With
# `exact` the whole of `storage.auth.resolve` decides. Without, `resolve_conflicts` gets an auth
# difference computed only from the events since the fork. An older event that no older event cites
# may then be missing from the difference. That is good enough for a generator that needs plausible
# states in a room of 50,000 members, but not for a test that compares states.

MERGES_MAX: Final = 256


def merge(graph: RoomGraph, parents: Sequence[EventId], *, exact: bool) -> Merged:
    """Return the state before an event with these parents; without parents the empty state."""
    states = [graph.nodes[parent].state_after for parent in parents]
    if not states:
        return Merged(EMPTY_STATE, frozenset())
    if all(state is states[0] for state in states):
        return Merged(states[0], frozenset())
    merged = graph.merges.get((exact, *parents))
    if merged is None:
        merged = _merge_unlike(graph, parents, states, exact=exact)
        if len(graph.merges) >= MERGES_MAX:
            graph.merges.clear()
        graph.merges[exact, *parents] = merged
    return merged


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
    cited = {event_id: _cited_from(graph, event_id, floor) for event_id in conflicted}
    todo = list(cited)
    while todo:
        for event_id in cited[todo.pop()]:
            if event_id not in cited:
                cited[event_id] = _cited_from(graph, event_id, floor)
                todo.append(event_id)
    subgraph: set[EventId] = set()
    for event_id in sorted(cited, key=lambda event_id: graph.node(event_id).topological):
        if event_id in conflicted or not subgraph.isdisjoint(cited[event_id]):
            subgraph.add(event_id)
    return subgraph


def _cited_from(graph: RoomGraph, event_id: EventId, floor: int) -> list[EventId]:
    return [
        cited
        for cited in graph.node(event_id).auth_events
        if cited in graph and graph.node(cited).topological >= floor
    ]
