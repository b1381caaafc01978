"""The entry points: resolve whole state maps, or only the conflict.

`resolve` is the specification's function and walks everything. A store that knows the auth
difference from an index calls `split_conflicts` (or knows the conflict already), `needed_events`
until nothing is missing, and `resolve_conflicts`. The work of these does not grow with the
unconflicted state.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from storage.auth.auth_events import keys_needed
from storage.auth.resolution import v2
from storage.auth.resolution.lookup import RecordingLookup, StateMap, split_conflicts
from storage.auth.resolution.v1 import resolve_v1
from storage.auth.resolution.v2 import (
    Events,
    Observe,
    conflict_of,
    power_phase,
    power_phase_events,
    remaining_order,
    resolve_v2,
)
from storage.auth.state_keys import POWER_LEVELS
from storage.event import RoomVersion
from storage.event.model import create_id_of
from storage.event.versions import version_of
from storage.ids import EventId, StateKey

# --------------------------------------------------------------------------------------------------
# The events that `resolve_conflicts` may read, so that a store can load them in a few rounds.
#
# events, absent = {}, set()
# while wanted := needed_events(
#     version, unconflicted, conflicted, difference, events, absent=absent
# ):
#     found = load(wanted)
#     events |= found
#     absent |= wanted - found.keys()
#
# The first round names the full conflicted set. The second names the auth events of its members and
# the state for their auth checks. The following ones follow the chains of power levels from both
# sides until they meet.

_NOTHING: frozenset[EventId] = frozenset()


def needed_events(
    room_version: str | RoomVersion,
    unconflicted: StateMap,
    conflicted: Mapping[StateKey, AbstractSet[EventId]],
    auth_difference: AbstractSet[EventId],
    events: Events,
    *,
    rejected: AbstractSet[EventId] = _NOTHING,
    conflicted_subgraph: AbstractSet[EventId] | None = None,
    absent: AbstractSet[EventId] = _NOTHING,
) -> set[EventId]:
    """Return the ids that `resolve_conflicts` with the same arguments may read next.

    They are not in `events`; an empty set means that it may be called. `absent` has ids that were
    looked up without result: they are not named again. When nothing is named any more, the result
    on `events` equals the result on all stored events of the room.
    """
    version = version_of(room_version)
    lookup = RecordingLookup(events, absent)
    if version.state_resolution == "v1":
        _read_checked(
            set().union(*conflicted.values()), unconflicted, lookup, with_auth_events=False
        )
        return lookup.missing
    if conflicted_subgraph is None and version.state_resolution == "v2.1":
        conflicted_subgraph = _subgraph(set().union(*conflicted.values()), events, lookup)
        if lookup.missing:
            return lookup.missing
    conflict = conflict_of(version, unconflicted, conflicted, auth_difference, conflicted_subgraph)
    _read_checked(conflict.full, conflict.base, lookup, with_auth_events=True)
    if conflict.base.get(POWER_LEVELS) is not None:
        lookup(conflict.base[POWER_LEVELS])
    power_phase_events(conflict, lookup)
    if not lookup.missing:
        decided, checked = power_phase(conflict, lookup, rejected)
        remaining_order(conflict, decided, checked, lookup)
    return lookup.missing


def _subgraph(
    conflicted: AbstractSet[EventId], events: Events, lookup: RecordingLookup
) -> set[EventId]:
    """Return the conflicted state subgraph, and look up every event that the search reads."""
    for event_id in conflicted | v2.auth_chain(conflicted, events):
        lookup(event_id)
    return v2.conflicted_subgraph(conflicted, events)


def _read_checked(
    event_ids: AbstractSet[EventId],
    base: StateMap,
    lookup: RecordingLookup,
    *,
    with_auth_events: bool,
) -> None:
    """Look up events, the events they cite, and the state under the keys they need."""
    for event_id in event_ids:
        event = lookup(event_id)
        if event is None:
            continue
        for key in keys_needed(event):
            state_id = base.get(key)
            if state_id is not None:
                lookup(state_id)
        if with_auth_events:
            for cited_id in event.auth_event_ids:
                lookup(cited_id)
            if event.room_version.create_room_id:
                lookup(create_id_of(event.room_id))


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
    difference = v2.auth_difference([state_map.values() for state_map in state_maps], events)
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
        subgraph = v2.conflicted_subgraph(set().union(*conflicted.values()), events)
    conflict = conflict_of(version, unconflicted, conflicted, auth_difference, subgraph)
    return resolve_v2(conflict, unconflicted, events.get, rejected, observe)
