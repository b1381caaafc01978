"""Unsigned events for tests of rules: only what the rules look at."""

from collections.abc import Iterable, Mapping
from typing import Any

from storage.event import ROOM_VERSIONS, Event
from storage.ids import EventId, RoomId, StateKey, UserId

ROOM = "!room:a"
CREATOR = "@creator:a"


def make_event(
    version: str,
    event_id: str,
    event_type: str,
    sender: str,
    state_key: str | None = None,
    content: Mapping[str, Any] | None = None,
    *,
    room_id: str = ROOM,
    depth: int = 1,
    ts: int = 1,
    prev: Iterable[str] = ("$before:a",),
    auth: Iterable[str] = (),
    redacts: str | None = None,
) -> Event:
    """An event as `parse` would give it, without bytes."""
    own_room = ROOM_VERSIONS[version].create_room_id and event_type == "m.room.create"
    json: dict[str, Any] = {} if own_room else {"room_id": room_id}
    return Event(
        EventId(event_id),
        RoomId("!" + event_id[1:] if own_room else room_id),
        ROOM_VERSIONS[version],
        event_type,
        UserId(sender),
        state_key,
        dict(content or {}),
        depth,
        ts,
        tuple(EventId(e) for e in prev),
        tuple(EventId(e) for e in auth),
        redacts,
        b"",
        json,
    )


def make_create(
    version: str,
    content: Mapping[str, Any] | None = None,
    *,
    sender: str = CREATOR,
    event_id: str = "$create:a",
) -> Event:
    """A create event of room `ROOM`, or from version 12 on of the room "!create:a"."""
    given = {"creator": sender, "room_version": version} if content is None else content
    return make_event(version, event_id, "m.room.create", sender, "", given, prev=())


def member(
    version: str,
    user_id: str,
    membership: object,
    *,
    sender: str | None = None,
    room_id: str = ROOM,
) -> Event:
    """A membership in a state."""
    content = {"membership": membership}
    return make_event(
        version,
        f"$m-{user_id[1:]}",
        "m.room.member",
        sender or user_id,
        user_id,
        content,
        room_id=room_id,
    )


def state_of(*events: Event) -> dict[StateKey, Event]:
    """A state with these events."""
    return {event.key: event for event in events}
