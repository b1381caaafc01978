"""The forms of the responses to clients."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from storage import JoinedRoom, RoomInfo, SpaceChild, Store, StoredEvent, Sync

from .web import Call, Json

Shown = dict[str, Json]
"""Events in the form for clients, by id."""
SUMMARY = {"name": "name", "topic": "topic", "avatar_url": "avatar", "canonical_alias": "alias"}
SUMMARY |= {"room_type": "type", "join_rule": "join_rule", "num_joined_members": "joined_count"}


async def shown(
    store: Store,
    call: Call,
    events: Iterable[StoredEvent],
    state: Iterable[StoredEvent],
    **how: Any,
) -> Shown:
    """Return the events that the user may see, and events of a state, all at once."""
    found = await store.client_events(call.sender, state, as_state=True, **how)
    found += await store.client_events(call.sender, events, device_id=call.device, **how)
    return {one["event_id"]: one for one in found}


def pick(found: Shown, events: Iterable[StoredEvent]) -> list[Json]:
    """Return those of the events that a client gets."""
    return [found[one.event_id] for one in events if one.event_id in found]


async def sync_form(store: Store, call: Call, found: Sync) -> Json:
    """Return the response of /sync."""
    rooms = [*found.join.values(), *found.leave.values()]
    timelines = chain.from_iterable(one.timeline.events for one in rooms)
    states = chain.from_iterable(one.state for one in rooms)
    events = await shown(store, call, timelines, states, with_room_id=False)
    parts = {
        "join": {room: _room(one, events) for room, one in found.join.items()},
        "leave": {room: _room(one, events) for room, one in found.leave.items()},
        "invite": {r: {"invite_state": _events(o.invite_state)} for r, o in found.invite.items()},
        "knock": {r: {"knock_state": _events(o.knock_state)} for r, o in found.knock.items()},
    }
    return {
        "next_batch": found.next_batch,
        "rooms": parts,
    }


def _room(room: JoinedRoom, events: Shown) -> Json:
    timeline = {"limited": room.timeline.limited, "prev_batch": room.timeline.prev_batch}
    form: Json = {
        "timeline": timeline | _events(pick(events, room.timeline.events)),
        "state": _events(pick(events, room.state)),
        "account_data": _events([]),
        "ephemeral": _events([]),
    }
    return form


def _events(events: Sequence[Json]) -> Json:
    return {"events": events}


def summary_of(room: RoomInfo) -> Json:
    """Return what the directory and a space show of a room."""
    known = {key: getattr(room, name) for key, name in SUMMARY.items()}
    known |= {"room_id": room.room_id, "world_readable": room.visibility == "world_readable"}
    known["guest_can_join"] = room.guest_access == "can_join"
    return {key: value for key, value in known.items() if value is not None}


def child(found: SpaceChild) -> Json:
    """Return the form of an m.space.child event in a space."""
    keys = ("type", "state_key", "sender", "content", "origin_server_ts")
    return {key: found.event.json[key] for key in keys}
