"""Name the auth events of an event, and all events that must be stored before it.

They depend on the room version. From version 12 on, the create event is an auth event that no event
lists, because the room id names it. Source: room version 12, "Authorization rules".
"""

from storage.event.model import Event
from storage.event.versions import RoomVersion
from storage.ids import EventId


def create_id_of(room_id: str) -> EventId:
    """Return the id of the room's create event, from a room id of room version 12."""
    return EventId("$" + room_id[1:])


def implied_auth_ids(version: RoomVersion, event_type: str, room_id: str) -> tuple[EventId, ...]:
    """Return the ids of the auth events that such an event has without listing them."""
    if version.create_room_id and event_type != "m.room.create":
        return (create_id_of(room_id),)
    return ()


def auth_ids_of(event: Event) -> tuple[EventId, ...]:
    """Return the ids of an event's auth events, the listed ones first; an id may be repeated."""
    implied = implied_auth_ids(event.room_version, event.type, event.room_id)
    return event.auth_event_ids + implied


def references_of(event: Event) -> tuple[EventId, ...]:
    """Return the ids of an event's parents and auth events; an id may be repeated."""
    return event.prev_event_ids + auth_ids_of(event)
