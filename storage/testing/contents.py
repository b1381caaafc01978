"""Contents of room events, as clients send them (client-server API, "Room events")."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from signedjson.sign import sign_json
from unpaddedbase64 import encode_base64

from storage.testing.drafting import number_of
from storage.testing.keys import signing_key, verify_key

Content = dict[str, Any]

IDENTITY_SERVER: Final = "identity.test"

LEVELS: Final[Mapping[str, Any]] = {
    "ban": 50,
    "events": {
        "m.room.avatar": 50,
        "m.room.canonical_alias": 50,
        "m.room.encryption": 100,
        "m.room.history_visibility": 100,
        "m.room.name": 50,
        "m.room.power_levels": 100,
        "m.room.server_acl": 100,
        "m.room.tombstone": 100,
    },
    "events_default": 0,
    "historical": 100,
    "invite": 0,
    "kick": 50,
    "redact": 50,
    "state_default": 50,
    "users_default": 0,
}


def create(room_version: str, creator: str, more: Mapping[str, Any]) -> Content:
    """Build m.room.create: with `creator` up to version 10, without `room_version` in version 1."""
    content: Content = {} if room_version == "1" else {"room_version": room_version}
    if number_of(room_version) <= 10:
        content["creator"] = creator
    return {**content, **more}


def power_levels(
    room_version: str, creators: Iterable[str], users: Mapping[str, int] | None
) -> Content:
    """Build the usual levels: creators have 100.

    From version 12 on creators are above all numbers and must not be named.
    """
    named = {} if number_of(room_version) >= 12 else dict.fromkeys(creators, 100)
    return {**LEVELS, "events": dict(LEVELS["events"]), "users": {**named, **(users or {})}}


def member(membership: str, more: Mapping[str, Any]) -> Content:
    """Build m.room.member; values of None are left out."""
    return {
        "membership": membership,
        **{key: value for key, value in more.items() if value is not None},
    }


def third_party_invite(name: str) -> Content:
    """Build m.room.third_party_invite, with the public key of an invented identity server."""
    public = encode_base64(verify_key(IDENTITY_SERVER).encode())
    where = f"https://{IDENTITY_SERVER}/key"
    return {
        "display_name": name,
        "key_validity_url": where,
        "public_key": public,
        "public_keys": [{"key_validity_url": where, "public_key": public}],
    }


def third_party_member(token: str, user_id: str, name: str) -> Content:
    """Build the signed part of the invite of `user_id`, from the identity server."""
    signed = sign_json(
        {"mxid": user_id, "token": token}, IDENTITY_SERVER, signing_key(IDENTITY_SERVER)
    )
    return {"third_party_invite": {"display_name": name, "signed": signed}}


def join_rules(rule: str, allowed_rooms: Iterable[str]) -> Content:
    """Build m.room.join_rules.

    `allowed_rooms` matter to ``restricted`` and ``knock_restricted``.
    """
    allow = [{"type": "m.room_membership", "room_id": room_id} for room_id in allowed_rooms]
    return {"join_rule": rule, "allow": allow} if allow else {"join_rule": rule}


def text(body: str) -> Content:
    """Build a text message."""
    return {"body": body, "msgtype": "m.text"}


def reaction(target: str, key: str) -> Content:
    """Build m.reaction."""
    return {"m.relates_to": {"event_id": target, "key": key, "rel_type": "m.annotation"}}


def edit(target: str, body: str) -> Content:
    """Build a message that replaces another one."""
    relation = {"event_id": target, "rel_type": "m.replace"}
    return {**text("* " + body), "m.new_content": text(body), "m.relates_to": relation}


def reply(target: str, body: str) -> Content:
    """Build a rich reply."""
    return {**text(body), "m.relates_to": {"m.in_reply_to": {"event_id": target}}}


def threaded(root: str, latest: str, body: str) -> Content:
    """Build a message in the thread of `root`; `latest` is for clients without threads."""
    relation = {
        "event_id": root,
        "is_falling_back": True,
        "m.in_reply_to": {"event_id": latest},
        "rel_type": "m.thread",
    }
    return {**text(body), "m.relates_to": relation}
