"""From an event's parts to its bytes: auth events, PDU, hash, signature, damage."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from canonicaljson import encode_canonical_json
from unpaddedbase64 import encode_base64

from storage.event import content_hash, event_id, reference_hash, sign
from storage.ids import EventId, StateKey
from storage.testing.keys import KEY_ID, foreign_signing_key, signing_key

Damage = Literal["content_hash", "signature", "oversized"]

DEPTH_MAX_OLD: Final = 2**63 - 2
"""Room versions 1 to 5: the schema requires less than 2^63 - 1."""
DEPTH_MAX: Final = 2**53 - 1
"""Room versions 6 and later: canonical JSON."""

OVERSIZED_PADDING: Final = 66_000
CREATE: Final[StateKey] = ("m.room.create", "")
POWER_LEVELS: Final[StateKey] = ("m.room.power_levels", "")
JOIN_RULES: Final[StateKey] = ("m.room.join_rules", "")


def number_of(room_version: str) -> int:
    return int(room_version)


def depth_max(room_version: str) -> int:
    """Return the largest depth that may be claimed."""
    return DEPTH_MAX_OLD if number_of(room_version) <= 5 else DEPTH_MAX


def server_of(user_id: str) -> str:
    """Return the part after the first colon."""
    return user_id.split(":", 1)[1]


@dataclass(frozen=True, slots=True)
class EventDraft:
    """An event before it is hashed and signed; `extra` adds or replaces top-level keys."""

    room_version: str
    room_id: str | None
    type: str
    sender: str
    content: Mapping[str, Any]
    state_key: str | None
    prev_events: tuple[EventId, ...]
    auth_events: tuple[EventId, ...]
    depth: int
    origin_server_ts: int
    redacts: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def auth_keys(
    room_version: str, type_: str, sender: str, state_key: str | None, content: Mapping[str, Any]
) -> list[StateKey]:
    """Return the state keys that an event must cite (server-server API, "Auth events selection").

    The create event is cited up to version 11; in version 12 the room id names it.
    """
    if type_ == "m.room.create":
        return []
    keys = [] if number_of(room_version) >= 12 else [CREATE]
    keys += [POWER_LEVELS, ("m.room.member", sender)]
    if type_ == "m.room.member" and state_key is not None:
        keys += _member_auth_keys(room_version, state_key, content)
    return list(dict.fromkeys(keys))


def _member_auth_keys(room_version: str, target: str, content: Mapping[str, Any]) -> list[StateKey]:
    keys: list[StateKey] = [("m.room.member", target)]
    membership = content.get("membership")
    if membership in ("join", "invite", "knock"):
        keys.append(JOIN_RULES)
    third_party = content.get("third_party_invite")
    if membership == "invite" and isinstance(third_party, Mapping):
        keys.append(("m.room.third_party_invite", third_party["signed"]["token"]))
    authoriser = content.get("join_authorised_via_users_server")
    if membership == "join" and isinstance(authoriser, str) and number_of(room_version) >= 8:
        keys.append(("m.room.member", authoriser))
    return keys


def old_event_id(seed: int, count: int, server_name: str) -> EventId:
    """Return an event id of versions 1 and 2.

    A sender may choose it; here it is a function of the room's seed and the event's number.
    """
    opaque = hashlib.sha256(f"{seed}/{count}".encode()).hexdigest()[:18]
    return EventId(f"${opaque}:{server_name}")


def unsigned_pdu(
    draft: EventDraft, reference_hashes: Mapping[EventId, str], chosen_id: EventId | None
) -> dict[str, Any]:
    """Return the PDU as a dict without hash and signature.

    `reference_hashes` (base64) and `chosen_id` are used for versions 1 and 2 only.
    """
    old = number_of(draft.room_version) <= 2
    pdu: dict[str, Any] = {
        "auth_events": _references(draft.auth_events, reference_hashes)
        if old
        else list(draft.auth_events),
        "content": draft.content,
        "depth": draft.depth,
        "origin_server_ts": draft.origin_server_ts,
        "prev_events": _references(draft.prev_events, reference_hashes)
        if old
        else list(draft.prev_events),
        "sender": draft.sender,
        "type": draft.type,
    }
    if draft.room_id is not None:
        pdu["room_id"] = draft.room_id
    if draft.state_key is not None:
        pdu["state_key"] = draft.state_key
    if draft.redacts is not None and number_of(draft.room_version) < 11:
        pdu["redacts"] = draft.redacts
    if old:
        pdu["event_id"] = chosen_id
    pdu.update(draft.extra)
    return pdu


def _references(ids: Iterable[EventId], reference_hashes: Mapping[EventId, str]) -> list[Any]:
    return [[event_id, {"sha256": reference_hashes.get(event_id, "")}] for event_id in ids]


def finish(
    pdu: dict[str, Any], room_version: str, signers: Iterable[str], damage: Damage | None
) -> tuple[bytes, EventId]:
    """Hash, sign by every server of `signers`, damage, encode.

    Without signers a placeholder of the same length is used. Return the bytes (canonical JSON) and
    the event id.
    """
    if damage == "oversized":
        pdu = {**pdu, "content": {**pdu["content"], "padding": "x" * OVERSIZED_PADDING}}
    names = list(signers)
    for name in names:
        pdu = sign(
            pdu,
            room_version,
            name,
            foreign_signing_key(name) if damage == "signature" else signing_key(name),
        )
    if not names:
        pdu = _hashed_only(pdu)
    identifier = EventId(event_id(pdu, room_version))
    if damage == "content_hash":
        pdu = _tampered(pdu)
    return encode_canonical_json(pdu), identifier


def _hashed_only(pdu: dict[str, Any]) -> dict[str, Any]:
    digest = content_hash(pdu)
    stand_in = (digest + digest)[:85] + "A"  # 64 bytes in base64, as a signature is
    return {
        **pdu,
        "hashes": {"sha256": digest},
        "signatures": {server_of(pdu["sender"]): {KEY_ID: stand_in}},
    }


def _tampered(pdu: dict[str, Any]) -> dict[str, Any]:
    """Return the event with an addition that the content hash covers and the signature does not.

    The signature is made over the redacted form.
    """
    if pdu["type"] == "m.room.create":
        return {**pdu, "test.tampered": True}
    return {**pdu, "content": {**pdu["content"], "test.tampered": True}}


def reference_hash_text(pdu: dict[str, Any], room_version: str) -> str:
    """Return the reference hash in the form of the [id, hash] pairs of versions 1 and 2."""
    return str(encode_base64(reference_hash(pdu, room_version)))
