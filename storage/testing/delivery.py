"""The delivery of a built room to a store: in order, late, shuffled, or with a gap."""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from storage.ids import EventId
from storage.testing.builder import RoomBuilder
from storage.testing.model import BuiltEvent, GeneratedEvent, GeneratedRoom


def deliver_shuffled(room: RoomBuilder, seed: int = 0) -> GeneratedRoom:
    """Deliver in any order.

    Children come before their parents, redactions before their targets, the create event anywhere.
    """
    events = room.events
    random.Random(seed).shuffle(events)  # noqa: S311
    return _room(room, [event.generated() for event in events])


def deliver_late(room: RoomBuilder, seed: int = 0) -> GeneratedRoom:
    """Deliver in a random order in which parents and auth events come before an event."""
    rng = random.Random(seed)  # noqa: S311
    by_id = {event.event_id: event for event in room.events}
    missing = {
        key: {cited for cited in (*event.prev_events, *event.auth_events) if cited in by_id}
        for key, event in by_id.items()
    }
    citing: dict[EventId, list[EventId]] = {key: [] for key in by_id}
    for key, cited in missing.items():
        for cited_id in cited:
            citing[cited_id].append(key)
    ready = [key for key, cited in missing.items() if not cited]
    order: list[GeneratedEvent] = []
    while ready:
        key = ready.pop(rng.randrange(len(ready)))
        order.append(by_id[key].generated())
        for child in citing[key]:
            missing[child].discard(key)
            if not missing[child]:
                ready.append(child)
    return _room(room, order)


def deliver_with_gap(room: RoomBuilder, start: int, stop: int) -> GeneratedRoom:
    """Deliver `room.events[start:stop]` late as backfill; everything else is live.

    An event after the gap with a parent in it comes after outliers: the missing events of its
    state, and of the auth chains of state and event. It has `state_before`. At the end the gap
    comes as backfill, oldest first. `start` must leave the create event out of the gap, else
    ValueError is raised.
    """
    events = room.events
    if not 0 < start <= stop <= len(events):
        raise ValueError(
            f"a gap from {start} to {stop} does not lie in a room of {len(events)} events "
            "after the create event"
        )
    lost = {event.event_id for event in events[start:stop]}
    order = [event.generated() for event in events[:start]]
    fetched: set[EventId] = set()
    for event in events[stop:]:
        if lost.isdisjoint(event.prev_events):
            needed = room.graph.auth_chain([event.event_id])
            order += _outliers(room, needed & lost - fetched)
            fetched |= needed & lost
            order.append(event.generated())
            continue
        state = set(event.state_before.values())
        needed = (state | room.graph.auth_chain([*state, event.event_id])) & lost
        order += _outliers(room, needed - fetched)
        fetched |= needed
        order.append(event.generated(state_before=sorted(state)))
    order += [event.generated("backfill") for event in events[start:stop]]
    return _room(room, order)


def respell(event: GeneratedEvent, rng: random.Random) -> GeneratedEvent:
    """Return the same JSON in bytes that are not canonical.

    Keys are shuffled, spaces added, and everything beyond ASCII escaped.
    """
    shuffled = _shuffled(json.loads(event.pdu), rng)
    separators = rng.choice([(", ", ": "), (" ,", " :"), (",", ":")])
    return replace(
        event,
        pdu=json.dumps(shuffled, separators=separators, ensure_ascii=rng.random() < 0.8).encode(),
    )


def _shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return [_shuffled(item, rng) for item in value]
    if not isinstance(value, dict):
        return value
    keys = rng.sample(sorted(value), len(value))
    return {key: _shuffled(value[key], rng) for key in keys}


def _outliers(room: RoomBuilder, ids: Iterable[EventId]) -> list[GeneratedEvent]:
    nodes: Sequence[BuiltEvent] = sorted(
        (room.event(event_id) for event_id in ids),
        key=lambda node: (node.topological, node.event_id),
    )
    return [node.generated("outlier") for node in nodes]


def _room(room: RoomBuilder, events: Sequence[GeneratedEvent]) -> GeneratedRoom:
    return GeneratedRoom(room.room_id, room.version, tuple(events), room.keys)
