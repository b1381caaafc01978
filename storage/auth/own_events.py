"""Check an event of this server for more than the auth rules require, before it is signed.

The auth rules accept events on which a real Synapse fails, and on each later event of the room: an
invite of a member whose state key is no user id, for one. From other servers such an event is
stored, because the rooms of all servers would differ otherwise. This server makes none.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from storage import arguments as args
from storage.auth.state_keys import MEMBER, is_user_id
from storage.errors import InputError, InvalidEvent
from storage.event.hashes import defect_of
from storage.event.parsing import MAX_ID_BYTES

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
        known = defect_of(whole, bits=64) or InvalidEvent(str(error), key="content")
        raise known from error
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
