"""Adding one event to a graph: state of its parents, auth events, bytes, and a check."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, TypedDict

import nacl.signing
from canonicaljson import encode_canonical_json
from signedjson.key import decode_signing_key_base64, get_verify_key
from signedjson.sign import sign_json
from signedjson.types import SigningKey, VerifyKey
from unpaddedbase64 import encode_base64

from storage.auth import check, keys_needed
from storage.errors import AuthDenied
from storage.event import content_hash, event_id, parse, reference_hash, sign
from storage.ids import EventId, RoomId, StateKey
from storage.testing.graph import RoomGraph, merge
from storage.testing.model import BuiltEvent, Expected, Merged, State

# --------------------------------------------------------------------------------------------------
# Signing keys of invented servers.
#
# A server's key is derived from its name alone. So rooms of different seeds have the same keys, and
# no key uses the system's randomness. These keys protect nothing: anybody can derive them.

KEY_VERSION: Final = "1"
KEY_ID: Final = f"ed25519:{KEY_VERSION}"


@lru_cache(maxsize=4096)
def signing_key(server_name: str) -> SigningKey:
    """Return the ed25519 signing key of a server; its id is always ``ed25519:1``."""
    secret = hashlib.sha256(b"room-event-storage testing key of " + server_name.encode()).digest()
    return decode_signing_key_base64("ed25519", KEY_VERSION, encode_base64(secret))


@lru_cache(maxsize=4096)
def verify_key(server_name: str) -> VerifyKey:
    """Return the public half of `signing_key`."""
    return get_verify_key(signing_key(server_name))


def verify_keys(server_names: Iterable[str]) -> dict[tuple[str, str], VerifyKey]:
    """Return (server name, key id) -> verify key, as ``store.append(verify_keys=…)`` takes it."""
    return {(name, KEY_ID): verify_key(name) for name in server_names}


def foreign_signing_key(server_name: str) -> SigningKey:
    """Return a false ``ed25519:1`` key of `server_name`: signatures made with it are bad."""
    secret = nacl.signing.SigningKey(
        hashlib.sha256(b"not the key of " + server_name.encode()).digest()
    )
    return decode_signing_key_base64("ed25519", KEY_VERSION, encode_base64(bytes(secret)))


# --------------------------------------------------------------------------------------------------
# From an event's parts to its bytes: auth events, PDU, hash, signature, damage.

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
    event: EventDraft, reference_hashes: Mapping[EventId, str], chosen_id: EventId | None
) -> dict[str, Any]:
    """Return the PDU as a dict without hash and signature.

    `reference_hashes` (base64) and `chosen_id` are used for versions 1 and 2 only.
    """
    old = number_of(event.room_version) <= 2
    pdu: dict[str, Any] = {
        "auth_events": _references(event.auth_events, reference_hashes)
        if old
        else list(event.auth_events),
        "content": event.content,
        "depth": event.depth,
        "origin_server_ts": event.origin_server_ts,
        "prev_events": _references(event.prev_events, reference_hashes)
        if old
        else list(event.prev_events),
        "sender": event.sender,
        "type": event.type,
    }
    if event.room_id is not None:
        pdu["room_id"] = event.room_id
    if event.state_key is not None:
        pdu["state_key"] = event.state_key
    if event.redacts is not None and number_of(event.room_version) < 11:
        pdu["redacts"] = event.redacts
    if old:
        pdu["event_id"] = chosen_id
    pdu.update(event.extra)
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


Reference: TypeAlias = BuiltEvent | str
"""An event or its id."""

FIRST_TIMESTAMP_MS: Final = 1_700_000_000_000
STEP_MS: Final = 1_000
SEEDS: Final = 1_000_000_000
"""Seeds with different first timestamps: 11 days of milliseconds."""


def first_ms(seed: int) -> int:
    """Return the first timestamp of a room.

    It depends on the seed, so that rooms of version 12, named by their create event, differ.
    """
    return FIRST_TIMESTAMP_MS + seed % SEEDS


class EventOptions(TypedDict, total=False):
    """The keyword arguments of every verb of the builder."""

    prev: Iterable[Reference]
    """The parents, instead of the heads."""
    auth: Iterable[Reference]
    """The auth events, instead of those that the rules select."""
    depth: int
    """A claim, instead of 1 + the parents' largest."""
    ts: int
    """origin_server_ts in milliseconds, instead of one second more with each event."""
    extra: Mapping[str, Any]
    """Top-level keys to add or replace."""
    signers: Sequence[str]
    """The servers that sign, instead of those that must."""
    expected: Expected
    """The expected outcome; a rejected, soft-failed or invalid event is no head."""
    damage: Damage
    """Break the content hash or the signatures, or make it larger than 65,536 bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all events of a room."""

    version: str
    servers: tuple[str, ...]
    seed: int
    sign: bool
    checked: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A requested event: its own parts, and its options."""

    sender: str
    type: str
    content: Mapping[str, Any]
    state_key: str | None
    redacts: str | None
    parents: tuple[EventId, ...]
    how: EventOptions


def id_of(reference: Reference) -> EventId:
    return reference.event_id if isinstance(reference, BuiltEvent) else EventId(reference)


def build(graph: RoomGraph, settings: Settings, request: Request) -> BuiltEvent:
    """Build the event and add it to the graph.

    Raise ValueError if the settings say `checked` and the event's own state contradicts the
    expected outcome.
    """
    merged = merge(graph, request.parents, exact=settings.exact)
    unsigned = _unsigned_event(graph, settings, request, merged.state)
    node = _node(graph, unsigned, request, merged, _encoded(graph, settings, unsigned, request.how))
    if settings.checked:
        _check(graph, node, has_own_auth="auth" in request.how)
    graph.add(node, unsigned.content)
    if number_of(settings.version) <= 2:
        graph.reference_hashes[node.event_id] = reference_hash_text(node.json, settings.version)
    if merged.disputed:
        graph.resolution_changes[node.event_id] = merged.disputed
    return node


def _unsigned_event(
    graph: RoomGraph, settings: Settings, request: Request, state: State
) -> EventDraft:
    how = request.how
    cited = how.get("auth")
    return EventDraft(
        room_version=settings.version,
        room_id=graph.room_id,
        type=request.type,
        sender=request.sender,
        content=request.content,
        state_key=request.state_key,
        prev_events=request.parents,
        auth_events=_selected_auth(settings, request, state)
        if cited is None
        else tuple(id_of(event) for event in cited),
        depth=how["depth"] if "depth" in how else _honest_depth(graph, settings, request.parents),
        origin_server_ts=how["ts"]
        if "ts" in how
        else first_ms(settings.seed) + STEP_MS * graph.count,
        redacts=request.redacts,
        extra=how.get("extra", {}),
    )


def _selected_auth(settings: Settings, request: Request, state: State) -> tuple[EventId, ...]:
    keys = auth_keys(
        settings.version, request.type, request.sender, request.state_key, request.content
    )
    return tuple(state[key] for key in keys if key in state)


def _honest_depth(graph: RoomGraph, settings: Settings, parents: Sequence[EventId]) -> int:
    """Return the depth as servers compute it.

    A parent's false depth is carried on, up to the largest number.
    """
    return min(
        1 + max((graph.nodes[parent].depth for parent in parents), default=0),
        depth_max(settings.version),
    )


def _encoded(
    graph: RoomGraph, settings: Settings, event: EventDraft, how: EventOptions
) -> tuple[bytes, EventId]:
    chosen = (
        old_event_id(settings.seed, graph.count, server_of(event.sender))
        if number_of(settings.version) <= 2
        else None
    )
    pdu = unsigned_pdu(event, graph.reference_hashes, chosen)
    names = how["signers"] if "signers" in how else _required_signers(event)
    return finish(pdu, settings.version, names if settings.sign else (), how.get("damage"))


def _required_signers(event: EventDraft) -> list[str]:
    names = [server_of(event.sender)]
    authoriser = event.content.get("join_authorised_via_users_server")
    if (
        isinstance(authoriser, str)
        and number_of(event.room_version) >= 8
        and event.type == "m.room.member"
    ):
        names.append(server_of(authoriser))
    return list(dict.fromkeys(names))


def _node(
    graph: RoomGraph,
    event: EventDraft,
    request: Request,
    merged: Merged,
    encoded: tuple[bytes, EventId],
) -> BuiltEvent:
    pdu, event_id = encoded
    expected = request.how.get("expected") or _expected_of(request.how.get("damage"))
    state, key = merged.state, event.state_key
    applied = key is not None and expected not in ("rejected", "invalid")
    return BuiltEvent(
        event_id=event_id,
        room_id=_room_id(event, event_id),
        room_version=event.room_version,
        pdu=pdu,
        type=event.type,
        sender=event.sender,
        state_key=key,
        prev_events=event.prev_events,
        auth_events=event.auth_events,
        depth=event.depth,
        topological=1
        + max((graph.nodes[parent].topological for parent in event.prev_events), default=0),
        origin_server_ts=event.origin_server_ts,
        state_before=state,
        state_after=state.update({(event.type, str(key)): event_id}) if applied else state,
        expected=expected,
    )


def _expected_of(damage: Damage | None) -> Expected | None:
    if damage is None:
        return None
    return "redacted" if damage == "content_hash" else "invalid"


def _room_id(event: EventDraft, event_id: EventId) -> RoomId:
    if event.room_id is None:
        return RoomId("!" + event_id[1:])
    return RoomId(event.room_id)


def _check(graph: RoomGraph, node: BuiltEvent, *, has_own_auth: bool) -> None:
    """Raise ValueError if `expected` contradicts the auth rules on the state before the event."""
    if node.expected == "invalid":
        return
    event = parse(node.pdu, node.room_version)
    keys: set[StateKey] = {*keys_needed(event), CREATE}
    auth_state = {
        key: graph.parsed(node.state_before[key]) for key in keys if key in node.state_before
    }
    try:
        check(event, auth_state, node.room_version)
    except AuthDenied as denied:
        if node.expected != "rejected":
            raise ValueError(
                f"{node.type} by {node.sender} would be rejected ({denied}); "
                "say expected='rejected' if meant"
            ) from denied
    else:
        if node.expected == "rejected" and not has_own_auth:
            raise ValueError(
                f"{node.type} by {node.sender} would not be rejected: its state before it allows it"
            )


# --------------------------------------------------------------------------------------------------
# Contents of room events, as clients send them (client-server API, "Room events").

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
    return {"body": body, "msgtype": "m.text"}


def reaction(target: str, key: str) -> Content:
    """Build m.reaction."""
    return {"m.relates_to": {"event_id": target, "key": key, "rel_type": "m.annotation"}}


def edit(target: str, body: str) -> Content:
    """Build a message that replaces another one."""
    relation = {"event_id": target, "rel_type": "m.replace"}
    return {**text("* " + body), "m.new_content": text(body), "m.relates_to": relation}


def reply(target: str, body: str) -> Content:
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
