"""Sets in the graph of auth events, over an in-memory map.

Walks are iterative and visit each event once. So neither depth nor a cycle (possible where senders
choose event ids, in room versions 1 and 2) stops them. A cited event that is not in the map belongs
to a chain and ends it.

Source: room version 2, "Auth chain", "Auth difference"; room version 12, "Conflicted state
subgraph".
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from storage.event import Event
from storage.ids import EventId

Events = Mapping[EventId, Event]

_NOTHING: frozenset[EventId] = frozenset()


def auth_chain(
    event_ids: Iterable[EventId], events: Events, *, stop_at: AbstractSet[EventId] = _NOTHING
) -> set[EventId]:
    """Return all ancestors of these events by `auth_events`.

    The events themselves are included only where they are ancestors of others. The walk does not
    return, or pass, events in `stop_at`.
    """
    chain: set[EventId] = set()
    waiting = list(event_ids)
    while waiting:
        event = events.get(waiting.pop())
        for cited in () if event is None else event.auth_event_ids:
            if cited not in chain and cited not in stop_at:
                chain.add(cited)
                waiting.append(cited)
    return chain


def auth_difference(state_sets: Iterable[Collection[EventId]], events: Events) -> set[EventId]:
    """Return the events that are in the auth chains of some of these states, but not of all.

    Each state is given by the ids of its events. The part that the states share is walked once.
    """
    states: list[set[EventId]] = [set(state) for state in state_sets]
    if not states:
        return set()
    shared = states[0].intersection(*states[1:])
    base = auth_chain(shared, events)
    chains = [auth_chain(state - shared, events, stop_at=base) for state in states]
    return chains[0].union(*chains[1:]) - chains[0].intersection(*chains[1:])


def conflicted_subgraph(conflicted: Collection[EventId], events: Events) -> set[EventId]:
    """Return the events on all `auth_events` paths between conflicted events, both included."""
    starts = set(conflicted)
    below = auth_chain(starts, events)
    citing: dict[EventId, list[EventId]] = {}
    for event_id in below | starts:
        event = events.get(event_id)
        for cited in () if event is None else event.auth_event_ids:
            citing.setdefault(cited, []).append(event_id)
    above: set[EventId] = set()
    waiting = list(starts)
    while waiting:
        for event_id in citing.get(waiting.pop(), ()):
            if event_id not in above:
                above.add(event_id)
                waiting.append(event_id)
    return (above & below) | (above & starts) | (below & starts)
