"""Check an event of this server for more than the auth rules require, before it is signed.

The auth rules accept events on which a real Synapse fails, and on each later event of the room: an
invite of a member whose state key is no user id, for one. From other servers such an event is
stored, because the rooms of all servers would differ otherwise. This server makes none.
"""

from collections.abc import Mapping
from typing import Any, Final

from storage.auth.state_keys import MEMBER, is_user_id
from storage.errors import InvalidEvent
from storage.event.parsing import MAX_ID_BYTES

AUTHORISER: Final = "join_authorised_via_users_server"
THIRD_PARTY: Final = "third_party_invite"


def check_own_event(type_: str, state_key: str | None, content: Mapping[str, Any]) -> None:
    """Raise `InvalidEvent` for an event that a local user may not send."""
    for name, value in (("type", type_), ("state_key", state_key or "")):
        if len(value.encode()) > MAX_ID_BYTES:
            raise InvalidEvent(f"{name} is longer than {MAX_ID_BYTES} bytes")
    if type_ == MEMBER:
        _check_member(state_key, content)


def _check_member(state_key: str | None, content: Mapping[str, Any]) -> None:
    if not is_user_id(state_key):
        raise InvalidEvent(f"the state key {state_key!r} of {MEMBER} is no user id")
    if AUTHORISER in content and not is_user_id(content[AUTHORISER]):
        raise InvalidEvent(f"{AUTHORISER} is no user id")
    if THIRD_PARTY in content:
        _check_third_party(state_key, content[THIRD_PARTY])


def _check_third_party(state_key: str | None, invite: object) -> None:
    signed = invite.get("signed") if isinstance(invite, dict) else None
    if not isinstance(signed, dict):
        raise InvalidEvent(f"{THIRD_PARTY} has no object signed")
    if signed.get("mxid") != state_key:
        raise InvalidEvent(f"{THIRD_PARTY}.signed.mxid is not the state key {state_key!r}")
    if not isinstance(signed.get("token"), str) or not isinstance(signed.get("signatures"), dict):
        raise InvalidEvent(f"{THIRD_PARTY}.signed has no token and signatures")
