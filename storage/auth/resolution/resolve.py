"""The entry points: resolve whole state maps, or only the conflict.

`resolve` is the specification's function and walks everything. A store that knows the auth
difference from an index calls `split_conflicts` (or knows the conflict already), `needed_events`
until nothing is missing, and `resolve_conflicts`. The work of these does not grow with the
unconflicted state.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from storage.auth.resolution import graph
from storage.auth.resolution.conflicts import StateMap, split_conflicts
from storage.auth.resolution.graph import Events
from storage.auth.resolution.iterate import Observe
from storage.auth.resolution.v1 import resolve_v1
from storage.auth.resolution.v2 import conflict_of, resolve_v2
from storage.event import RoomVersion
from storage.event.versions import version_of
from storage.ids import EventId, StateKey

_NOTHING: frozenset[EventId] = frozenset()


def resolve(
    room_version: str | RoomVersion,
    state_maps: Sequence[StateMap],
    events: Events,
    *,
    rejected: AbstractSet[EventId] = _NOTHING,
) -> dict[StateKey, EventId]:
    """Resolve several states into one.

    The result does not depend on their order.

    `events` holds the state events and their auth chains (room version 12: and the create event).
    If one is missing, the auth checks of events that need it fail, and nothing else. `rejected`
    events do not supply keys that a state lacks.
    """
    version = version_of(room_version)
    unconflicted, conflicted = split_conflicts(state_maps)
    if not conflicted:
        return unconflicted
    if version.state_resolution == "v1":
        return unconflicted | resolve_v1(unconflicted, conflicted, events.get)
    difference = graph.auth_difference([state_map.values() for state_map in state_maps], events)
    decided = resolve_conflicts(
        version, unconflicted, conflicted, difference, events, rejected=rejected
    )
    return unconflicted | decided


def resolve_conflicts(
    room_version: str | RoomVersion,
    unconflicted: StateMap,
    conflicted: Mapping[StateKey, AbstractSet[EventId]],
    auth_difference: AbstractSet[EventId],
    events: Events,
    *,
    rejected: AbstractSet[EventId] = _NOTHING,
    conflicted_subgraph: AbstractSet[EventId] | None = None,
    observe: Observe | None = None,
) -> dict[StateKey, EventId]:
    """Return the keys that the conflict decides (none of them unconflicted), with their values.

    `unconflicted` is looked up by key only. `conflicted` and `auth_difference` are as
    `split_conflicts` and `storage.auth.auth_difference` return them; version 1 of the algorithm
    ignores the latter. `conflicted_subgraph` is the set of events on auth paths between conflicted
    events. Version 2.1 makes it part of the conflict. Version 2 only uses it to limit the walk of
    auth chains. If it is None, version 2.1 computes it from `events`, and version 2 walks whole
    chains. `observe` is called for each checked event, in the order of the checks.
    """
    version = version_of(room_version)
    if version.state_resolution == "v1":
        return resolve_v1(unconflicted, conflicted, events.get, observe)
    subgraph = conflicted_subgraph
    if subgraph is None and version.state_resolution == "v2.1":
        subgraph = graph.conflicted_subgraph(set().union(*conflicted.values()), events)
    conflict = conflict_of(version, unconflicted, conflicted, auth_difference, subgraph)
    return resolve_v2(conflict, unconflicted, events.get, rejected, observe)
