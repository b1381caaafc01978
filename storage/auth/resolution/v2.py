"""State resolution versions 2 and 2.1.

The power events and their auth events in the set come first, by power. All others of the full
conflicted set follow, along the mainline of the resulting power levels. Version 2.1 differs in two
points: the full conflicted set also holds the conflicted state subgraph, and the checks start from
an empty state instead of the unconflicted one.

Work is bounded by the full conflicted set, the auth events of its members, and the power levels
back to the fork.

Source: room version 2, room version 12, "State resolution".
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from storage.auth.resolution.conflicts import StateMap
from storage.auth.resolution.iterate import Observe, iterate
from storage.auth.resolution.lookup import Lookup
from storage.auth.resolution.mainline import mainline_order
from storage.auth.resolution.power_order import reverse_topological_power_order
from storage.auth.state_keys import JOIN_RULES, MEMBER, POWER_LEVELS
from storage.event import Event, RoomVersion
from storage.ids import EventId, StateKey


@dataclass(frozen=True, slots=True)
class ConflictedEvents:
    """The input of the two phases.

    `full` is the full conflicted set. `walk` holds at least every event on a path of auth events
    from one event of `full` to another. If that is not known it is None, and whole chains are
    walked.
    """

    full: AbstractSet[EventId]
    walk: AbstractSet[EventId] | None
    base: StateMap


def is_power_event(event: Event) -> bool:
    """Return whether it is a power event.

    Power levels, join rules, and memberships that remove somebody else from the room.
    """
    if event.state_key is None:
        return False
    if event.type in (POWER_LEVELS[0], JOIN_RULES[0]):
        return True
    return (
        event.type == MEMBER
        and event.sender != event.state_key
        and event.content.get("membership") in ("leave", "ban")
    )


def power_phase_events(conflict: ConflictedEvents, lookup: Lookup) -> set[EventId]:
    """Return X: the power events of the full conflicted set, and their chains within the set."""
    found = {
        event_id
        for event_id in conflict.full
        if (event := lookup(event_id)) is not None and is_power_event(event)
    }
    seen = set(found)
    waiting = list(found)
    while waiting:
        event = lookup(waiting.pop())
        for cited_id in () if event is None else event.auth_event_ids:
            if cited_id not in seen and (conflict.walk is None or cited_id in conflict.walk):
                seen.add(cited_id)
                waiting.append(cited_id)
    return {event_id for event_id in seen if event_id in conflict.full}


def power_phase(
    conflict: ConflictedEvents,
    lookup: Lookup,
    rejected: AbstractSet[EventId],
    observe: Observe | None = None,
) -> tuple[dict[StateKey, EventId], set[EventId]]:
    """Run steps 1 and 2: return the values that the power events decide, and the checked events."""
    judged = power_phase_events(conflict, lookup)
    decided: dict[StateKey, EventId] = {}
    order = reverse_topological_power_order(judged, lookup)
    iterate(order, decided, conflict.base, lookup, rejected, observe=observe)
    return decided, judged


def remaining_order(
    conflict: ConflictedEvents, decided: StateMap, judged: AbstractSet[EventId], lookup: Lookup
) -> list[EventId]:
    """Return the order of step 3.

    It has all other events of the full conflicted set, by the mainline of the decided power levels.
    """
    remaining = [
        event
        for event_id in conflict.full
        if event_id not in judged and (event := lookup(event_id)) is not None
    ]
    newest = decided.get(POWER_LEVELS) or conflict.base.get(POWER_LEVELS)
    return mainline_order(remaining, newest, lookup)


def resolve_v2(
    conflict: ConflictedEvents,
    unconflicted: StateMap,
    lookup: Lookup,
    rejected: AbstractSet[EventId],
    observe: Observe | None = None,
) -> dict[StateKey, EventId]:
    """Run steps 1 to 5: return the values of the keys outside the unconflicted state."""
    decided, judged = power_phase(conflict, lookup, rejected, observe)
    order = remaining_order(conflict, decided, judged, lookup)
    iterate(order, decided, conflict.base, lookup, rejected, observe=observe)
    return {key: event_id for key, event_id in decided.items() if unconflicted.get(key) is None}


def conflict_of(
    version: RoomVersion,
    unconflicted: StateMap,
    conflicted: Mapping[StateKey, AbstractSet[EventId]],
    auth_difference: AbstractSet[EventId],
    subgraph: AbstractSet[EventId] | None,
) -> ConflictedEvents:
    """Return the full conflicted set, and the state that the checks start from."""
    full = set(auth_difference).union(*conflicted.values())
    walk = None if subgraph is None else full | subgraph
    if version.state_resolution == "v2":
        return ConflictedEvents(full, walk, unconflicted)
    return ConflictedEvents(full if walk is None else walk, walk, {})
