"""The state keys that the authorisation rules look at, and ids taken apart."""

from typing import Final

from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import EventId, StateKey

MEMBER: Final = "m.room.member"
THIRD_PARTY_INVITE: Final = "m.room.third_party_invite"

CREATE: Final[StateKey] = ("m.room.create", "")
POWER_LEVELS: Final[StateKey] = ("m.room.power_levels", "")
JOIN_RULES: Final[StateKey] = ("m.room.join_rules", "")


def is_user_id(value: object) -> bool:
    """Whether this is a user id in the widest form that the specification lets servers accept.

    `@localpart:server`, at most 255 bytes; the characters of historical localparts are not
    restricted.
    """
    if not isinstance(value, str) or not value.startswith("@"):
        return False
    _, colon, server_name = value.partition(":")
    return bool(colon and server_name) and len(value.encode("utf-8", "surrogatepass")) <= 255


def domain_of(identifier: str) -> str | None:
    """What follows the first colon of an id; None where there is no colon, so that nothing compares equal by accident."""
    _, colon, domain = identifier.partition(":")
    return domain if colon else None


def create_id_of(room_id: str) -> EventId:
    """The id of the create event of a room, where the room id is made of it (room version 12)."""
    return EventId("$" + room_id[1:])


def denied(event: Event, rule: str, reason: str) -> AuthDenied:
    """The error to raise: `rule` is a stable slug, `reason` the values that met the rule."""
    return AuthDenied(reason, rule=rule, event_id=event.event_id)
