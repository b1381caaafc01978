"""`check`: the authorisation rules on one event and a state.

The rules on an event's own `auth_events` are in `storage.auth.auth_events`. Every rule that refuses
has a slug in `AuthDenied.rule`, such as "member.join.banned". Slugs are stable, the sentences with
the values are not.

Source: room versions 1 to 12, authorization rules.
"""

from collections.abc import Mapping
from typing import Final

from storage.auth.membership import check_member, require_joined
from storage.auth.power_levels import PowerLevels, check_power_levels
from storage.auth.state_keys import (
    CREATE,
    MEMBER,
    POWER_LEVELS,
    THIRD_PARTY_INVITE,
    denied,
    domain_of,
    is_user_id,
)
from storage.event import ROOM_VERSIONS, Event, RoomVersion
from storage.event.model import create_id_of
from storage.event.versions import version_of
from storage.ids import StateKey

# --------------------------------------------------------------------------------------------------
# Rule 1: the checks on a create event.
#
# The state key is not checked. The specification's rules do not check it (gomatrixserverlib does),
# and a create event under another key is never found as the room's create event.
#
# Source: room versions 1 to 12, authorization rules, rule 1.


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


# --------------------------------------------------------------------------------------------------
# The condition under which a redaction applies to its target.
#
# Source: room versions 1 and 2, authorization rule 11; room version 3, "Handling redactions".


def redaction_allowed(
    redaction: Event,
    target_sender: str,
    auth_state: Mapping[StateKey, Event],
    room_version: str | RoomVersion,
) -> bool:
    """Return whether an accepted redaction takes effect on a target sent by `target_sender`.

    `auth_state` is the state before the redaction: its power levels and create event. A redaction
    takes effect if the redactor has the redact level, or is on the server of the target's sender.
    In versions 1 and 2 the servers are those in the two event ids, and the same rule has already
    refused the redaction as an event.
    """
    version = version_of(room_version)
    levels = PowerLevels.of(auth_state, version)
    if levels.user(redaction.sender) >= levels.named("redact"):
        return True
    if version.redaction_by_auth_rule:
        return _same_origin(redaction)
    own = domain_of(redaction.sender)
    return own is not None and own == domain_of(target_sender)


def check_redaction(event: Event, levels: PowerLevels) -> None:
    """Raise AuthDenied where rule 11 of versions 1 and 2 refuses a redaction."""
    has, needs = levels.user(event.sender), levels.named("redact")
    if has < needs and not _same_origin(event):
        raise denied(
            event,
            "redaction.level",
            f"{event.sender} has level {has}, redacting {event.redacts!r} takes {needs}",
        )


def _same_origin(redaction: Event) -> bool:
    own = domain_of(redaction.event_id)
    return own is not None and redaction.redacts is not None and own == domain_of(redaction.redacts)


CONTENT_MATTERS: Final = frozenset({CREATE[0], MEMBER, POWER_LEVELS[0], "m.room.redaction"})
"""The types of events whose content, or whose target, the rules read.

For other types the rules read type, sender, state key, room and auth events only.
"""


def check(
    event: Event, auth_state: Mapping[StateKey, Event], room_version: str | RoomVersion
) -> None:
    """Raise AuthDenied unless the state allows the event.

    `auth_state` maps (type, state key) to the events of a state, at least those under
    `keys_needed(event)`. It holds the create event under ("m.room.create", "") in every version.
    Raise UnknownRoomVersion for a version that is not in the table.
    """
    version = version_of(room_version)
    if event.type == CREATE[0]:
        check_create(event, version)
        return
    create = _check_room(event, auth_state, version)
    if create.content.get("m.federate") is False and domain_of(event.sender) != domain_of(
        create.sender
    ):
        raise denied(
            event,
            "room.not_federated",
            f"sender {event.sender} is not of the server of {create.sender}",
        )
    if event.type == MEMBER:
        check_member(event, auth_state, version)
    elif event.type == "m.room.aliases" and version.special_case_aliases:
        _check_aliases(event)
    else:
        _check_ordinary(event, auth_state, version)


def _check_room(event: Event, auth_state: Mapping[StateKey, Event], version: RoomVersion) -> Event:
    """Return the create event, which must be of the event's own room."""
    create = auth_state.get(CREATE)
    if create is None:
        raise denied(event, "room.no_create", "the state has no create event")
    if version.create_room_id:
        if create_id_of(event.room_id) != create.event_id:
            raise denied(
                event,
                "room.other_room",
                f"room id {event.room_id} is not of create event {create.event_id}",
            )
    elif event.room_id != create.room_id:
        raise denied(
            event,
            "room.other_room",
            f"room id {event.room_id}, but the create event is of {create.room_id}",
        )
    return create


def _check_aliases(event: Event) -> None:
    """Check rule 4 of versions 1 to 5: the state key of aliases is the sender's server.

    Membership does not matter.
    """
    if event.state_key is None:
        raise denied(event, "aliases.state_key", "no state_key")
    if event.state_key != domain_of(event.sender):
        raise denied(
            event,
            "aliases.domain",
            f"state key {event.state_key!r} is not the server of {event.sender}",
        )


def _check_ordinary(
    event: Event, auth_state: Mapping[StateKey, Event], version: RoomVersion
) -> None:
    require_joined(event, auth_state, "sender.not_joined")
    levels = PowerLevels.of(auth_state, version)
    has = levels.user(event.sender)
    if event.type == THIRD_PARTY_INVITE:
        if has < levels.named("invite"):
            raise denied(
                event,
                "third_party_invite.level",
                f"{event.sender} has level {has}, inviting takes {levels.named('invite')}",
            )
        return
    needs = levels.required(event)
    if needs > has:
        raise denied(
            event, "event.level", f"{event.sender} has level {has}, {event.type} takes {needs}"
        )
    state_key = event.state_key
    if state_key is not None and state_key != event.sender and state_key.startswith("@"):
        raise denied(
            event, "event.state_key", f"state key {state_key} is not the sender {event.sender}"
        )
    if event.type == POWER_LEVELS[0]:
        check_power_levels(event, auth_state, version, has)
    elif event.type == "m.room.redaction" and version.redaction_by_auth_rule:
        check_redaction(event, levels)
