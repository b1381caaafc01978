"""The event graph of a built room: nodes, states, and facts about trimmed events.

The state of a node is a persistent map. So a message costs nothing and a state event O(log of the
state's size), also with 50,000 members. `trim` drops nodes behind a point that every branch has
merged into, for rooms that are streamed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from storage.event import Event, load
from storage.ids import EventId, RoomId, StateKey
from storage.persistent_map import Map
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
        found = self.nodes.get(key)
        return self._archive[key] if found is None else found

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
        wanted = list(dict.fromkeys(ids))
        if len(wanted) < 2:
            return tuple(wanted)
        floor = min(self.nodes[event_id].topological for event_id in wanted)
        covered = set(self.ancestors(wanted, floor))
        return tuple(event_id for event_id in wanted if event_id not in covered)

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
        wanted = set(last.state_after.values())
        for event_id in list(wanted):
            wanted.update(self.node(event_id).auth_events)
        for event_id, node in self.nodes.items():
            if node.state_key is not None and (event_id in wanted or node.type != "m.room.member"):
                self._archive[event_id] = replace(
                    node, state_before=EMPTY_STATE, state_after=EMPTY_STATE
                )
        self._archive = {
            key: node
            for key, node in self._archive.items()
            if key in wanted or node.type != "m.room.member"
        }
        self.nodes = {keep: last}
        self._forget_facts_of_all_but({*self._archive, keep})

    def _forget_facts_of_all_but(self, ids: Collection[EventId]) -> None:
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
