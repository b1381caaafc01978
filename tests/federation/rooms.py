"""Rooms that several servers share, and what must be equal on all of them."""

from collections.abc import Sequence
from typing import Any

from storage import EventId, RoomId
from tests.federation.peers import Homeserver, as_json, shown

PUBLIC = ("m.room.join_rules", "", {"join_rule": "public"})


async def shared_room(one: Homeserver, *others: Homeserver, version: str = "12") -> RoomId:
    """A room of the first server that the others have joined."""
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=[PUBLIC])
    inside = [one]
    for other in others:
        result = await other.join(room_id, one)
        assert result.outcome == "joined", result
        assert result.event_id is not None
        join = (await other.store.events([result.event_id]))[result.event_id]
        for third in inside[1:]:
            await third.receive(one, [join.json])
        inside.append(other)
    return room_id


async def state_pdus(server: Homeserver, room_id: RoomId) -> list[dict[str, Any]]:
    """The state of a room without its members, as another server gets it."""
    found = await server.store.events((await server.store.current_state(room_id)).values())
    return [as_json(one) for one in found.values() if one.type != "m.room.member"]


async def agree(room_id: RoomId, *servers: Homeserver) -> None:
    """Check that all servers have the same state, a causal order, and the same visible history."""
    for server in servers:
        await server.fill(room_id)
    states = [await server.store.current_state(room_id) for server in servers]
    assert all(state == states[0] for state in states)
    histories = [await shown(server, room_id) for server in servers]
    late = await soft_failed(servers, {one for history in histories for one in history})
    assert all(set(history) - late == set(histories[0]) - late for history in histories)
    for server, history in zip(servers, histories, strict=True):
        await check_order(server, history)


async def soft_failed(servers: Sequence[Homeserver], event_ids: set[EventId]) -> set[EventId]:
    """The events that a server has hidden because its current state refused them on arrival."""
    found = [await server.store.events(event_ids) for server in servers]
    return {one for events in found for one, event in events.items() if event.soft_failed}


async def check_order(server: Homeserver, history: list[EventId]) -> None:
    """Check that no event comes before one of its parents."""
    place = {event_id: number for number, event_id in enumerate(history)}
    events = await server.store.events(history)
    for event_id, event in events.items():
        for parent in event.json["prev_events"]:
            named = EventId(parent if isinstance(parent, str) else parent[0])
            assert place.get(named, -1) < place[event_id], server.name


async def outcomes(server: Homeserver, origin: Homeserver, *pdus: dict[str, object]) -> list[str]:
    """Receive a transaction and return the outcomes."""
    return [result.outcome for result in (await server.receive(origin, pdus)).values()]
