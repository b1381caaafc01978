"""The form of events for clients, and the response of /sync."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from storage import EventId, JoinedRoom, Store, StoredEvent, UserId

from .web import Json, now_ms

KEYS: Final[tuple[str, ...]] = ("content", "origin_server_ts", "sender", "state_key", "type")
"""The keys of an event that a client gets. A sender can claim anything in others."""


async def client_events(store: Store, events: Iterable[StoredEvent | EventId]) -> list[Json]:
    """Return events for a client; a redacted one has the event that redacted it."""
    listed = list(events)
    known = await store.events([one for one in listed if isinstance(one, str)])
    found = [known[one] if isinstance(one, str) else one for one in listed]
    redactions = await store.events([one.redacted_by for one in found if one.redacted_by])
    return [_shape(one, redactions) for one in found]


def _shape(event: StoredEvent, redactions: Mapping[EventId, StoredEvent]) -> Json:
    shown: Json = {key: event.json[key] for key in KEYS if key in event.json}
    shown |= {"event_id": event.event_id, "room_id": event.room_id}
    shown["unsigned"] = {"age": now_ms() - event.json["origin_server_ts"]}
    target = event.content.get("redacts") or event.json.get("redacts")
    if event.type == "m.room.redaction" and target:
        shown["redacts"] = target
    if event.redacted_by and event.redacted_by in redactions:
        shown["unsigned"]["redacted_because"] = _shape(redactions[event.redacted_by], {})
    return shown


async def sync(store: Store, user: UserId, device: str, since: str | None, **how: Any) -> Json:
    """Return the response of /sync: rooms, account data, receipts and to-device messages."""
    before = {} if since is None else store.positions_of(since)
    if "to_device" in before:  # the device has these
        await store.to_device.delete(user, device, before["to_device"])
    found = await store.sync(user, since=since, **how)
    now = store.positions_of(found.next_batch)
    after = {name: before[name].min if name in before else 0 for name in now}
    rooms: Json = {"join": {}, "leave": {}}
    for name, listed in (("join", found.join), ("leave", found.leave)):
        rooms[name] = {room: await _room(store, one) for room, one in listed.items()}
    for room, invited in found.invite.items():
        rooms.setdefault("invite", {})[room] = {"invite_state": {"events": invited.invite_state}}
    for room, knocked in found.knock.items():
        rooms.setdefault("knock", {})[room] = {"knock_state": {"events": knocked.knock_state}}
    account_data = await _add_facts(store, user, rooms["join"], after, found.next_batch)
    inbox = await store.to_device.inbox(user, device, upto=now["to_device"])
    return {
        "next_batch": found.next_batch,
        "rooms": rooms,
        "account_data": {"events": account_data},
        "to_device": {"events": [json.loads(row.content) for row in inbox]},
    }


async def _room(store: Store, room: JoinedRoom) -> Json:
    answer = _quiet_room(room.timeline.prev_batch, limited=room.timeline.limited)
    answer["timeline"]["events"] = await client_events(store, room.timeline.events)
    answer["state"]["events"] = await client_events(store, room.state)
    return answer


def _quiet_room(prev_batch: str, *, limited: bool = False) -> Json:
    parts = ("state", "ephemeral", "account_data")
    timeline = {"events": [], "limited": limited, "prev_batch": prev_batch}
    return {"timeline": timeline, **{part: {"events": []} for part in parts}}


async def _add_facts(
    store: Store, user: UserId, joined: Json, after: Mapping[str, int], token: str
) -> list[Json]:
    """Add new receipts and account data to their rooms. Return the global account data."""
    rooms, everywhere = await store.rooms_of(user), list[Json]()
    for room in rooms:
        receipts: Json = {}
        for row in await store.receipts.of_room(room, after=after["receipts"]):
            if row.receipt_type != "m.read.private" or row.user_id == user:
                kinds = receipts.setdefault(row.event_id, {})
                kinds.setdefault(row.receipt_type, {})[row.user_id] = json.loads(row.data)
        if receipts:
            event = {"type": "m.receipt", "content": receipts}
            joined.setdefault(room, _quiet_room(token))["ephemeral"]["events"].append(event)
    for one in await store.account_data.changes(user, after=after["account_data"]):
        event = {"type": one.type, "content": json.loads(one.content)}
        if one.room_id is None:
            everywhere.append(event)
        elif one.room_id in rooms:
            of_room = joined.setdefault(one.room_id, _quiet_room(token))
            of_room["account_data"]["events"].append(event)
    return everywhere
