"""Rule 1: the checks on a create event.

The state key is not checked. The specification's rules do not check it (gomatrixserverlib does),
and a create event under another key is never found as the room's create event.

Source: room versions 1 to 12, authorization rules, rule 1.
"""

from storage.auth.state_keys import denied, domain_of, is_user_id
from storage.event import ROOM_VERSIONS, Event, RoomVersion


def check_create(event: Event, version: RoomVersion) -> None:
    """Raise AuthDenied where the create event breaks rule 1. It needs no state."""
    if event.prev_event_ids:
        raise denied(event, "create.prev_events", f"cites {len(event.prev_event_ids)} events")
    if version.create_room_id:
        if "room_id" in event.json:
            raise denied(event, "create.room_id", f"has the room id {event.json['room_id']!r}")
    else:
        _check_domain(event)
    recognised = event.content.get("room_version", "1")
    if not isinstance(recognised, str) or recognised not in ROOM_VERSIONS:
        raise denied(event, "create.room_version", f"room version {recognised!r}")
    if not version.creator_is_sender and "creator" not in event.content:
        raise denied(event, "create.creator", "no creator in the content")
    if version.privileged_creators:
        _check_additional_creators(event)


def _check_domain(event: Event) -> None:
    room, sender = domain_of(event.room_id), domain_of(event.sender)
    if room is None or room != sender:
        raise denied(
            event,
            "create.domain",
            f"room {event.room_id} is of another server than sender {event.sender}",
        )


def _check_additional_creators(event: Event) -> None:
    if "additional_creators" not in event.content:
        return
    additional = event.content["additional_creators"]
    if not isinstance(additional, list):
        raise denied(
            event, "create.additional_creators", f"not a list but {type(additional).__name__}"
        )
    for user_id in additional:
        if not is_user_id(user_id):
            raise denied(event, "create.additional_creators", f"not a user id: {user_id!r}")
