"""Reverse topological power ordering: the order of the checks of power events.

Source: room version 2, "Reverse topological power ordering".
"""

from collections.abc import Collection, Generator, Mapping
from heapq import heapify, heappop, heappush
from typing import TypeVar

from storage.auth.level_lookup import Level, PowerLevels
from storage.auth.resolution.lookup import Lookup, cited, create_cited
from storage.auth.state_keys import POWER_LEVELS
from storage.event import Event
from storage.ids import EventId

T = TypeVar("T")

PowerKey = tuple[Level, int, EventId]
Steps = Generator[bool, None, T]
"""Work in small steps: yields after each whether something has to be loaded before the next."""


def sender_level(event: Event, lookup: Lookup) -> Level:
    """Return the level of an event's sender by the event's own auth events.

    Without a power levels event among them the creator has 100 and everybody else 0. Creators of
    room version 12 are above every level either way.
    """
    levels = PowerLevels(
        cited(event, POWER_LEVELS, lookup), create_cited(event, lookup), event.room_version
    )
    return levels.user(event.sender)


def power_key(event: Event, lookup: Lookup) -> PowerKey:
    """Return the sort key between events that do not cite each other; the smaller goes first."""
    return (-sender_level(event, lookup), event.origin_server_ts, event.event_id)


def reverse_topological_power_order(
    event_ids: Collection[EventId], lookup: Lookup
) -> list[EventId]:
    """Sort these events, each after those of them that it cites, and else by `power_key`.

    Missing events are left out.
    """
    events = {
        event.event_id: event for event_id in event_ids if (event := lookup(event_id)) is not None
    }
    order: list[EventId] = []
    for _ in in_power_order(
        {event_id: power_key(event, lookup) for event_id, event in events.items()}, events, order
    ):
        pass
    return order


def in_power_order(
    keys: Mapping[EventId, PowerKey], events: Mapping[EventId, Event], order: list[EventId]
) -> Steps[bool]:
    """Append the events that have keys to `order`, yielding after each.

    Return whether events cite each other in a circle.

    Kahn's algorithm over the edges between the events given. Where nothing is free because of a
    circle, the smallest of the remaining events goes next.
    """
    open_citations: dict[EventId, int] = {}
    citing: dict[EventId, list[EventId]] = {event_id: [] for event_id in keys}
    for event_id in keys:
        inside = {cited_id for cited_id in events[event_id].auth_event_ids if cited_id in keys}
        open_citations[event_id] = len(inside)
        for cited_id in inside:
            citing[cited_id].append(event_id)
        yield False
    free = [keys[event_id] for event_id, count in open_citations.items() if count == 0]
    heapify(free)
    by_key = iter(sorted(keys.values()))
    is_circular = False
    while open_citations:
        is_circular = is_circular or not free
        event_id = (heappop(free) if free else next(by_key))[2]
        if open_citations.pop(event_id, None) is None:
            continue
        order.append(event_id)
        for later in citing[event_id]:
            if later in open_citations:
                open_citations[later] -= 1
                if open_citations[later] == 0:
                    heappush(free, keys[later])
        yield False
    return is_circular
