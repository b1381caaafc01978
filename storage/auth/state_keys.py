"""The state keys that the authorisation rules read, and the parts of ids."""

from typing import Final

from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import StateKey

MEMBER: Final = "m.room.member"
THIRD_PARTY_INVITE: Final = "m.room.third_party_invite"

CREATE: Final[StateKey] = ("m.room.create", "")
POWER_LEVELS: Final[StateKey] = ("m.room.power_levels", "")
JOIN_RULES: Final[StateKey] = ("m.room.join_rules", "")


def is_user_id(value: object) -> bool:
    """Return whether this is a user id in the widest form that servers must accept.

    `@localpart:server`, at most 255 bytes; the characters of historical localparts are not
    restricted.
    """
    if not isinstance(value, str) or not value.startswith("@"):
        return False
    _, colon, server_name = value.partition(":")
    return bool(colon and server_name) and len(value.encode("utf-8", "surrogatepass")) <= 255


def domain_of(identifier: str) -> str | None:
    """Return the part after the first colon of an id.

    Return None where there is no colon, so that two such ids never compare equal by accident.
    """
    _, colon, domain = identifier.partition(":")
    return domain if colon else None


def denied(event: Event, rule: str, reason: str) -> AuthDenied:
    """Build the error to raise.

    `rule` is a stable slug, `reason` has the values that broke the rule. They may hold a NUL, which
    no text of Postgres can.
    """
    return AuthDenied(reason.replace("\0", "\ufffd"), rule=rule, event_id=event.event_id)
