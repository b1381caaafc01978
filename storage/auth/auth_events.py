"""The rules on an event's own `auth_events`, and the check against the state that they form.

Source: room versions 1 to 12, authorization rules, rule "Considering the event's auth_events" (and
rule 2 of version 12).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from storage.auth.auth_event_selection import auth_event_keys
from storage.auth.rules import check
from storage.auth.state_keys import CREATE, denied
from storage.event import Event
from storage.event.parsing import MAX_ID_BYTES, SHORT
from storage.event.references import create_id_of
from storage.ids import EventId, StateKey


def check_auth_events(
    event: Event, auth_events: Mapping[EventId, Event], rejected: AbstractSet[EventId]
) -> None:
    """Raise AuthDenied where the event's `auth_events` are wrong, or do not allow it.

    `auth_events` maps ids to stored events, at least those in `event.auth_event_ids`. From version
    12 on it also has the create event, under the id that the room id names. `rejected` is looked up
    for those ids only. A missing event is refused ("auth_events.missing"): callers that can fetch
    it do so first. The auth events of a create event are ignored.
    """
    _check_size(event)
    if event.type == CREATE[0]:
        check(event, {}, event.room_version)
        return
    auth_state: dict[StateKey, Event] = {}
    allowed = auth_event_keys(event)
    for event_id in event.auth_event_ids:
        auth_event = _checked(event, event_id, auth_events, rejected)
        if auth_event.state_key is None or auth_event.key not in allowed:
            raise denied(
                event,
                "auth_events.superfluous",
                f"{event_id} is {auth_event.type} with state key {auth_event.state_key!r}",
            )
        key = auth_event.key
        if key in auth_state:
            raise denied(
                event,
                "auth_events.duplicate",
                f"{auth_state[key].event_id} and {event_id} are both {key}",
            )
        auth_state[key] = auth_event
    if event.room_version.create_room_id:
        auth_state[CREATE] = _create_of_room(event, auth_events, rejected)
    elif CREATE not in auth_state:
        raise denied(event, "auth_events.no_create", "no create event among the auth events")
    check(event, auth_state, event.room_version)


def _check_size(event: Event) -> None:
    """Refuse a type or state key of more than 255 bytes, which is malformed from version 11 on."""
    for name, value in (("type", event.type), ("state_key", event.state_key)):
        if value and len(value) > SHORT and len(value.encode()) > MAX_ID_BYTES:
            raise denied(event, f"size.{name}", f"{name} is longer than {MAX_ID_BYTES} bytes")


def _checked(
    event: Event,
    event_id: EventId,
    auth_events: Mapping[EventId, Event],
    rejected: AbstractSet[EventId],
) -> Event:
    auth_event = auth_events.get(event_id)
    if auth_event is None:
        raise denied(event, "auth_events.missing", f"{event_id} is not stored")
    if event_id in rejected:
        raise denied(event, "auth_events.rejected", f"{event_id} is rejected")
    if auth_event.room_id != event.room_id:
        raise denied(
            event,
            "auth_events.other_room",
            f"{event_id} is of room {auth_event.room_id}, not {event.room_id}",
        )
    return auth_event


def _create_of_room(
    event: Event, auth_events: Mapping[EventId, Event], rejected: AbstractSet[EventId]
) -> Event:
    """Return the accepted create event that the room id names (room version 12)."""
    create_id = create_id_of(event.room_id)
    create = auth_events.get(create_id)
    if create is None or (create.type, create.state_key) != CREATE:
        raise denied(
            event,
            "room.no_create",
            f"room id {event.room_id} does not name a create event that is stored",
        )
    if create_id in rejected:
        raise denied(event, "room.create_rejected", f"create event {create_id} is rejected")
    return create
