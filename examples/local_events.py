"""Build, authorise, sign and store events of this server's users. Other examples import it.

A homeserver does this for each request of its clients. The functions work for the room versions 3
to 12. Versions 1 and 2 carry their event ids and their parents' hashes in the event.
"""

import time
from collections.abc import Mapping
from typing import Any

from signedjson.types import SigningKey

import storage
from storage import EventId, RoomId, Store, auth, event

DEPTH_MAX = 2**53 - 1


class Refused(Exception):  # noqa: N818 - it is the answer 403 to a client
    """The event was not stored, or it has no effect."""


async def draft(
    store: Store,
    room_id: RoomId,
    sender: str,
    type_: str,
    content: Mapping[str, Any],
    *,
    state_key: str | None = None,
) -> tuple[dict[str, Any], str]:
    """Return an unsigned event at the end of the room, and the room version.

    Raise `storage.AuthDenied` if the current state of the room does not allow it.
    """
    parents = await store.events(await store.forward_extremities(room_id))
    version = next(iter(parents.values())).room_version
    pdu = {
        "room_id": room_id,
        "sender": sender,
        "type": type_,
        "content": content,
        "origin_server_ts": time.time_ns() // 1_000_000,
        "prev_events": list(parents),
        "auth_events": [],
        "depth": min(1 + max(one.depth for one in parents.values()), DEPTH_MAX),
    }
    if state_key is not None:
        pdu["state_key"] = state_key
    return await authorised(store, room_id, pdu, version), version


async def authorised(
    store: Store, room_id: RoomId, pdu: dict[str, Any], version: str
) -> dict[str, Any]:
    """Return the event with its auth events. Raise `storage.AuthDenied` if it is not allowed."""
    hashed = {**pdu, "hashes": {"sha256": event.content_hash(pdu)}, "signatures": {}}
    parsed = event.parse(hashed, version)
    state = await store.current_state(room_id)
    ids = {key: state[key] for key in auth.keys_needed(parsed) if key in state}
    stored = await store.events(ids.values())
    auth_state = {key: event.parse(stored[one].raw, version) for key, one in ids.items()}
    auth.check(parsed, auth_state, version)
    cited = auth.auth_event_keys(parsed)  # from version 12 on without the create event
    return {**pdu, "auth_events": [one for key, one in ids.items() if key in cited]}


async def send(
    store: Store,
    room_id: RoomId,
    sender: str,
    type_: str,
    content: Mapping[str, Any],
    *,
    key: SigningKey,
    state_key: str | None = None,
) -> EventId:
    """Store an event of a local user, and return its id. `storage.AuthDenied`, `Refused`."""
    pdu, version = await draft(store, room_id, sender, type_, content, state_key=state_key)
    return await stored(store, event.sign(pdu, version, server_of(sender), key), version)


async def stored(store: Store, signed: dict[str, Any], version: str) -> EventId:
    """Store a signed event, again after errors that allow it. Raise `Refused` if it has no effect.

    To append the same bytes again is safe: an event that is stored returns "duplicate".
    """
    for attempt in range(5):
        try:
            [result] = await store.append([signed], room_version=version)
        except (storage.DatabaseUnavailable, storage.DatabaseConflict, storage.CommitUnknown):
            if attempt == 4:
                raise
            continue
        if result.event_id is None or result.outcome not in ("stored", "duplicate"):
            raise Refused(result.reason)
        return result.event_id
    raise AssertionError("the loop returns or raises")


async def create_room(
    store: Store, creator: str, *, key: SigningKey, version: str = "12"
) -> RoomId:
    """Create a public room of version 11 or 12 with its first five events."""
    server = server_of(creator)
    created: dict[str, Any] = {
        "type": "m.room.create",
        "sender": creator,
        "state_key": "",
        "content": {"room_version": version},
        "origin_server_ts": time.time_ns() // 1_000_000,
        "prev_events": [],
        "auth_events": [],
        "depth": 1,
    }
    rules = event.ROOM_VERSIONS[version]
    if not rules.create_room_id:
        created["room_id"] = f"!{time.time_ns()}:{server}"
    create_id = await stored(store, event.sign(created, version, server, key), version)
    room_id = RoomId(created.get("room_id", "!" + create_id[1:]))
    # From version 12 on, creators have no level and need none.
    levels = {} if rules.create_room_id else {"users": {creator: 100}}
    for type_, state_key, content in (
        ("m.room.member", creator, {"membership": "join"}),
        ("m.room.power_levels", "", levels),
        ("m.room.join_rules", "", {"join_rule": "public"}),
        ("m.room.history_visibility", "", {"history_visibility": "shared"}),
    ):
        await send(store, room_id, creator, type_, content, key=key, state_key=state_key)
    return room_id


def server_of(user_id: str) -> str:
    """Return the server name of a user id."""
    return user_id.partition(":")[2]
