"""Small rooms for the reads: a room, who is in it, and appending what is new of it."""

from collections.abc import Iterable
from typing import Any

from storage import Store
from storage.ids import EventId
from storage.queries.events import StoredEvent
from storage.testing import BuiltEvent, RoomBuilder

ADMIN = "@user1:s1.test"
LOCAL = "@user4:s1.test"
OTHER = "@user7:s1.test"
REMOTE = "@user2:s2.test"


def new_room(
    *,
    visibility: str = "shared",
    members: Iterable[str] = (),
    seed: int = 0,
    version: str = "11",
    **how: Any,
) -> RoomBuilder:
    """A public room that ADMIN has made, and others have joined."""
    room = RoomBuilder(version, seed=seed, sign=False)
    room.start(ADMIN, history_visibility=visibility, **how)
    for member in members:
        room.join(member)
    return room


async def append(store: Store, *events: BuiltEvent, **how: Any) -> list[str]:
    """The outcomes of these events."""
    return [
        result.outcome
        for result in await store.append(
            [event.pdu for event in events], room_version=events[0].room_version, **how
        )
    ]


async def deliver(store: Store, room: RoomBuilder, **how: Any) -> None:
    """All of the room that the store does not have; everything must be accepted."""
    results = await store.append(room.pdus, room_version=room.version, **how)
    assert {result.outcome for result in results} <= {"stored", "duplicate"}, results


def ids(events: Iterable[StoredEvent | BuiltEvent]) -> list[EventId]:
    return [event.event_id for event in events]


def bodies(events: Iterable[StoredEvent]) -> list[str]:
    """Return the `body` of each event, in order; "" if it has none."""
    return [str(event.content.get("body", "")) for event in events]


def messages_in(events: Iterable[StoredEvent]) -> list[str]:
    """Return the `body` of each message among the events."""
    return [
        str(event.content.get("body", "")) for event in events if event.type == "m.room.message"
    ]
