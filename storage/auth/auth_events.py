"""The rules on an event's own `auth_events`, and the check against the state that they form.

Source: room versions 1 to 12, authorization rules, rule "Considering the event's auth_events" (and
rule 2 of version 12).
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, TypeGuard

import orjson

from storage import arguments as args
from storage.auth.rules import check
from storage.auth.state_keys import (
    CREATE,
    JOIN_RULES,
    MEMBER,
    POWER_LEVELS,
    THIRD_PARTY_INVITE,
    denied,
    is_user_id,
)
from storage.errors import InputError, InvalidEvent
from storage.event import Event
from storage.event.hashes import defect_of
from storage.event.model import create_id_of
from storage.event.parsing import MAX_ID_BYTES, SHORT
from storage.ids import EventId, StateKey

# --------------------------------------------------------------------------------------------------
# Auth events selection: the state keys that an event's authorisation reads.
#
# Source: server-server API, "Auth events selection".


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


# --------------------------------------------------------------------------------------------------
# Check an event of this server for more than the auth rules require, before it is signed.
#
# The auth rules accept events on which a real Synapse fails, and on each later event of the room:
# an invite of a member whose state key is no user id, for one. From other servers such an event is
# stored, because the rooms of all servers would differ otherwise. This server makes none.

AUTHORISER: Final = "join_authorised_via_users_server"
THIRD_PARTY: Final = "third_party_invite"


def own_content(type_: str, state_key: str | None, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the content. Raise `InvalidEvent` if no local user may send the event."""
    for name, value in (("type", type_), ("state_key", state_key or "")):
        if len(value.encode()) > MAX_ID_BYTES:
            raise InvalidEvent(
                f"{name} is longer than {MAX_ID_BYTES} bytes", kind="too_large", key=name
            )
    copied = _copied(args.mapping(content, "content"))
    if type_ == MEMBER:
        _check_member(state_key, copied)
    return copied


def _copied(content: Mapping[str, Any]) -> dict[str, Any]:
    try:
        copied: dict[str, Any] = orjson.loads(args.content(content, "content"))
    except InputError as error:
        whole = {"content": dict(content)}
        defect = defect_of(whole, bits=64) or InvalidEvent(str(error), key="content")
        raise defect from error
    return copied


def _check_member(state_key: str | None, content: Mapping[str, Any]) -> None:
    if not is_user_id(state_key):
        raise InvalidEvent(
            f"the state key {state_key!r} of {MEMBER} is no user id", key="state_key"
        )
    if AUTHORISER in content and not is_user_id(content[AUTHORISER]):
        raise InvalidEvent(f"{AUTHORISER} is no user id", key=f"content.{AUTHORISER}")
    if THIRD_PARTY in content:
        _check_third_party(state_key, content[THIRD_PARTY])


def _check_third_party(state_key: str | None, invite: object) -> None:
    signed = invite.get("signed") if isinstance(invite, dict) else None
    key = f"content.{THIRD_PARTY}.signed"
    if not isinstance(signed, dict):
        raise InvalidEvent(f"{THIRD_PARTY} has no object signed", key=key)
    if signed.get("mxid") != state_key:
        reason = f"{THIRD_PARTY}.signed.mxid is not the state key {state_key!r}"
        raise InvalidEvent(reason, key=f"{key}.mxid")
    if not isinstance(signed.get("token"), str) or not isinstance(signed.get("signatures"), dict):
        raise InvalidEvent(f"{THIRD_PARTY}.signed has no token and signatures", key=key)
