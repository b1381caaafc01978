"""The events that `resolve_conflicts` may read, so that a store can load them in a few rounds.

events, absent = {}, set()
while wanted := needed_events(
    version, unconflicted, conflicted, difference, events, absent=absent
):
    found = load(wanted)
    events |= found
    absent |= wanted - found.keys()

The first round names the full conflicted set. The second names the auth events of its members and
the state for their auth checks. The following ones follow the chains of power levels from both
sides until they meet.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from storage.auth.auth_event_selection import keys_needed
from storage.auth.resolution import graph
from storage.auth.resolution.conflicts import StateMap
from storage.auth.resolution.graph import Events
from storage.auth.resolution.lookup import RecordingLookup
from storage.auth.resolution.v2 import conflict_of, power_phase, power_phase_events, remaining_order
from storage.auth.state_keys import POWER_LEVELS
from storage.event import RoomVersion
from storage.event.references import create_id_of
from storage.event.versions import version_of
from storage.ids import EventId, StateKey

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
    asked = RecordingLookup(events, absent)
    if version.state_resolution == "v1":
        _judged_by(set().union(*conflicted.values()), unconflicted, asked, with_auth_events=False)
        return asked.missing
    if conflicted_subgraph is None and version.state_resolution == "v2.1":
        conflicted_subgraph = _subgraph(set().union(*conflicted.values()), events, asked)
        if asked.missing:
            return asked.missing
    conflict = conflict_of(version, unconflicted, conflicted, auth_difference, conflicted_subgraph)
    _judged_by(conflict.full, conflict.base, asked, with_auth_events=True)
    if conflict.base.get(POWER_LEVELS) is not None:
        asked(conflict.base[POWER_LEVELS])
    power_phase_events(conflict, asked)
    if not asked.missing:
        decided, judged = power_phase(conflict, asked, rejected)
        remaining_order(conflict, decided, judged, asked)
    return asked.missing


def _subgraph(
    conflicted: AbstractSet[EventId], events: Events, asked: RecordingLookup
) -> set[EventId]:
    """Return the conflicted state subgraph, and look up every event that the search reads."""
    for event_id in conflicted | graph.auth_chain(conflicted, events):
        asked(event_id)
    return graph.conflicted_subgraph(conflicted, events)


def _judged_by(
    event_ids: AbstractSet[EventId],
    base: StateMap,
    asked: RecordingLookup,
    *,
    with_auth_events: bool,
) -> None:
    """Look up events, the events they cite, and the state under the keys they need."""
    for event_id in event_ids:
        event = asked(event_id)
        if event is None:
            continue
        for key in keys_needed(event):
            state_id = base.get(key)
            if state_id is not None:
                asked(state_id)
        if with_auth_events:
            for cited_id in event.auth_event_ids:
                asked(cited_id)
            if event.room_version.create_room_id:
                asked(create_id_of(event.room_id))
