"""Signing and verifying events, and the servers that have to sign.

Source: Matrix specification, server-server API, "Signing events" and "Validating hashes and
signatures on received events"; room version 8, "Authorization rules" (restricted joins).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson
from nacl.exceptions import BadSignatureError
from signedjson.key import decode_verify_key_bytes, is_signing_algorithm_supported
from signedjson.sign import SignatureVerifyException, sign_json, verify_signed_json
from signedjson.types import SigningKey, VerifyKey
from unpaddedbase64 import decode_base64

from storage import arguments as args
from storage.errors import InputError, InvalidEvent, InvalidSignature
from storage.event.hashes import canonical, content_hash, event_id, redact
from storage.event.model import Event
from storage.event.versions import RoomVersion, version_of
from storage.ids import ServerName, server_name_of


class OldKey(NamedTuple):
    """A key that signs no more. It counts for events up to a time in milliseconds."""

    verify_key: VerifyKey
    expired_ts: int


def read_old_keys(listed: Mapping[str, Mapping[str, Any]]) -> dict[str, OldKey]:
    """Return keys by key id, from the form of ``old_verify_keys``. `InputError`.

    Source: server-server API, "Publishing Keys".
    """
    return {
        key_id: _old_key(key_id, value)
        for key_id, value in args.mapping(listed, "old_signing_keys").items()
    }


def _old_key(key_id: Any, value: Any) -> OldKey:
    entry: Mapping[str, Any] = args.mapping(value, f"the old signing key {key_id!r}")
    encoded: Any = entry.get("key")
    expired_ts: Any = entry.get("expired_ts")
    if not args.is_text(key_id) or not is_signing_algorithm_supported(key_id):
        raise InputError(f"the old signing key {key_id!r}: the key id is ed25519:VERSION")
    if not args.is_text(encoded):
        raise InputError(f"the old signing key {key_id!r} has no text key: {encoded!r}")
    try:
        key = decode_verify_key_bytes(key_id, decode_base64(encoded))
    except ValueError as error:
        raise InputError(f"the old signing key {key_id!r} cannot be read: {error}") from error
    return OldKey(key, args.position(expired_ts, f"expired_ts of {key_id!r}"))


def sign(
    pdu: dict[str, Any], room_version: str | RoomVersion, server_name: str, signing_key: SigningKey
) -> dict[str, Any]:
    """Return a copy of `pdu` with its content hash and the signature of `server_name` added.

    Other signatures stay. In versions 1 and 2 the PDU keeps the `event_id` it has. Raise
    InvalidEvent if `pdu` is not JSON.
    """
    version = version_of(room_version)
    existing_hashes, existing_signatures = pdu.get("hashes"), pdu.get("signatures")
    hashes = dict(existing_hashes) if isinstance(existing_hashes, dict) else {}
    signatures = dict(existing_signatures) if isinstance(existing_signatures, dict) else {}
    own = signatures.get(server_name)
    hashes["sha256"] = content_hash(pdu)
    signatures[server_name] = dict(own) if isinstance(own, dict) else {}
    signed = {**pdu, "hashes": hashes, "signatures": signatures}
    redacted = redact(signed, version)
    canonical(redacted)
    signed["signatures"] = sign_json(redacted, server_name, signing_key)["signatures"]
    return signed


def verify(
    pdu: dict[str, Any], room_version: str | RoomVersion, server_name: str, verify_key: VerifyKey
) -> None:
    """Check the signature that `server_name` made with this key.

    Raise InvalidSignature if it is missing or does not match. The signature covers the redacted
    form: the content hash detects a changed content, not this check.
    """
    version = version_of(room_version)
    key_id = f"{verify_key.alg}:{verify_key.version}"
    reason = _fault(redact(pdu, version), server_name, key_id, verify_key)
    if reason is not None:
        raise InvalidSignature(
            reason, event_id=_id_if_any(pdu, version), server_name=server_name, key_id=key_id
        )


def verify_event(event: Event, server_name: str, verify_key: VerifyKey) -> None:
    """Check a signature as `verify`, on a parsed event: parsing has encoded the signed bytes."""
    if event.signed is None or not _fits(event.signed, event.json, server_name, verify_key):
        verify(event.json, event.room_version, server_name, verify_key)


def _fits(signed: bytes, pdu: dict[str, Any], server_name: str, verify_key: VerifyKey) -> bool:
    """Return whether the signature is valid; `verify` reports the reason if it is not."""
    try:
        signature = pdu["signatures"][server_name][f"{verify_key.alg}:{verify_key.version}"]
        verify_key.verify(signed, decode_base64(signature))
    except (BadSignatureError, KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


def _fault(
    redacted: dict[str, Any], server_name: str, key_id: str, verify_key: VerifyKey
) -> str | None:
    signatures = redacted.get("signatures")
    by_server = signatures.get(server_name) if isinstance(signatures, dict) else None
    signature = by_server.get(key_id) if isinstance(by_server, dict) else None
    if not isinstance(signature, str):
        return "missing"
    try:
        verify_signed_json(redacted, server_name, verify_key)
    except SignatureVerifyException as error:
        return str(error)
    except (ValueError, TypeError, RecursionError) as error:  # from the encoding
        return f"not JSON: {error}"
    return None


def _id_if_any(pdu: dict[str, Any], version: RoomVersion) -> str | None:
    try:
        return event_id(pdu, version)
    except InvalidEvent:  # it has no id
        return None


def required_signers(event: Event) -> set[ServerName]:
    """Return the servers that must each have at least one valid signature.

    The sender's server, except for an invite by a third party, which another server may send. In
    versions 1 and 2 also the server of the event id. From version 8 also the server of
    `join_authorised_via_users_server` of a join.
    """
    version = event.room_version
    content = event.content if event.content_hash_valid else orjson.loads(event.raw)["content"]
    membership = content.get("membership") if event.type == "m.room.member" else None
    signers = set()
    if not (membership == "invite" and "third_party_invite" in content):
        signers.add(server_name_of(event.sender))
    if version.event_id_format == "in_pdu":
        signers.add(server_name_of(event.event_id))
    if version.restricted_join and membership == "join":
        authoriser = content.get("join_authorised_via_users_server")
        if isinstance(authoriser, str):
            signers.add(server_name_of(authoriser))
    return signers
