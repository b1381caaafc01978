"""Auth events selection: the state keys that an event's authorisation reads.

Source: server-server API, "Auth events selection".
"""

from collections.abc import Mapping
from typing import Any, TypeGuard

from storage.auth.state_keys import CREATE, JOIN_RULES, MEMBER, POWER_LEVELS, THIRD_PARTY_INVITE
from storage.event import Event
from storage.ids import StateKey


def keys_needed(event: Event) -> set[StateKey]:
    """Return the state keys that `check` may read for this event; none for a create event.

    They include the create event in every room version. From version 12 on it must be given to
    `check`, but must not be in `auth_events`: see `auth_event_keys`.
    """
    if event.type == CREATE[0]:
        return set()
    keys = {CREATE, POWER_LEVELS, (MEMBER, event.sender)}
    if event.type == MEMBER:
        _add_membership_keys(event, keys)
    return keys


def auth_event_keys(event: Event) -> set[StateKey]:
    """Return the state keys allowed in an event's `auth_events`.

    An event that is built here cites all of them that the state has.
    """
    keys = keys_needed(event)
    if event.room_version.create_room_id:
        keys.discard(CREATE)
    return keys


def third_party_token(content: Mapping[str, Any]) -> str | None:
    """Return `third_party_invite.signed.token` of a membership's content.

    Return None where it is absent or cannot be a state key.
    """
    invite = content.get("third_party_invite")
    signed = invite.get("signed") if isinstance(invite, dict) else None
    token = signed.get("token") if isinstance(signed, dict) else None
    return token if _can_be_key(token) else None


def _add_membership_keys(event: Event, keys: set[StateKey]) -> None:
    content = event.content
    membership = content.get("membership")
    if event.state_key is not None:
        keys.add((MEMBER, event.state_key))
    if membership in ("join", "invite", "knock"):
        keys.add(JOIN_RULES)
    if membership == "invite":
        token = third_party_token(content)
        if token is not None:
            keys.add((THIRD_PARTY_INVITE, token))
    elif membership == "join" and event.room_version.restricted_join:
        authoriser = content.get("join_authorised_via_users_server")
        if _can_be_key(authoriser):
            keys.add((MEMBER, authoriser))


def _can_be_key(value: object) -> TypeGuard[str]:
    """Return whether an event could have this state key.

    Parsing refuses a NUL, and Postgres cannot store it as text.
    """
    return isinstance(value, str) and "\0" not in value
