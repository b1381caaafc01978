"""`check`: the authorisation rules on one event and a state.

The rules on an event's own `auth_events` are in `storage.auth.auth_events`. Every rule that refuses
has a slug in `AuthDenied.rule`, such as "member.join.banned". Slugs are stable, the sentences with
the values are not.

Source: room versions 1 to 12, authorization rules.
"""

from collections.abc import Mapping
from typing import Final

from storage.auth.create import check_create
from storage.auth.level_lookup import PowerLevels
from storage.auth.membership import check_member, require_joined
from storage.auth.power_levels import check_power_levels
from storage.auth.redaction import check_redaction
from storage.auth.state_keys import (
    CREATE,
    MEMBER,
    POWER_LEVELS,
    THIRD_PARTY_INVITE,
    denied,
    domain_of,
)
from storage.event import Event, RoomVersion
from storage.event.references import create_id_of
from storage.event.versions import version_of
from storage.ids import StateKey

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
