"""Content hash, reference hash and event ids.

The hashed bytes come from canonicaljson, the encoder that the Python servers use, or from orjson
where that gives the same bytes. Source: Matrix specification, server-server API, "Calculating the
content hash" and "Calculating the reference hash"; room versions 3 and 4, "Event IDs".
"""

import re
from binascii import b2a_base64
from hashlib import sha256
from math import isfinite
from typing import Any, Final, NamedTuple

import orjson
from canonicaljson import encode_canonical_json
from unpaddedbase64 import decode_base64

from storage.errors import InvalidEvent, InvalidKind
from storage.event.versions import RoomVersion, version_of
from storage.ids import EventId

# --------------------------------------------------------------------------------------------------
# Redaction: the part of an event that remains when its content is removed.
#
# Source: Matrix specification, room versions, "Redactions" of each version.


def redact(pdu: dict[str, Any], room_version: str | RoomVersion) -> dict[str, Any]:
    """Return the redacted form of `pdu` as a new dict; drop `unsigned`, keep hashes and signatures.

    Kept values are shared with `pdu`, not copied. A content that is missing or not an object
    becomes {}: published signatures of events without content cover that form.
    """
    version = version_of(room_version)
    keys = version.redaction_keys
    redacted = {key: value for key, value in pdu.items() if key in keys}
    redacted["content"] = redacted_content(pdu.get("type"), pdu.get("content"), version)
    return redacted


def redacted_content(event_type: object, content: object, version: RoomVersion) -> dict[str, Any]:
    """Return the part of the content that redaction keeps for this event type."""
    if not isinstance(content, dict) or not isinstance(event_type, str):
        return {}
    if version.redaction_keeps_create and event_type == "m.room.create":
        return content
    keys = version.redaction_content.get(event_type)
    if keys is None:
        return {}
    kept = {key: value for key, value in content.items() if key in keys}
    if version.redaction_keeps_signed_invite and event_type == "m.room.member":
        invite = content.get("third_party_invite")
        if isinstance(invite, dict) and "signed" in invite:
            kept["third_party_invite"] = {"signed": invite["signed"]}
    return kept


_NOT_IN_CONTENT_HASH = frozenset({"unsigned", "signatures", "hashes"})
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SHOWN: Final = 99
"""Characters of a key that an error names."""


class BadNumber(NamedTuple):
    """A number that the text of an object has and that is refused, in its place."""

    reason: str


def canonical(value: object) -> bytes:
    """Return canonical JSON.

    Raise InvalidEvent for a value that has none: NaN, lone surrogates, objects that are not JSON.
    """
    try:
        return encode_canonical_json(value)
    except UnicodeEncodeError as error:
        raise defect_of(value) or InvalidEvent("a string holds a lone surrogate") from error
    except RecursionError as error:
        raise InvalidEvent("nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise defect_of(value) or InvalidEvent(f"not JSON: {error}") from error


def defect_of(value: object, *, bits: int | None = None) -> InvalidEvent | None:
    """Return the error for the first value that is no JSON, with its key; None if there is none.

    ``bits`` is the largest size of an integer. A value that holds itself is looked through once.
    """
    waiting: list[tuple[int, object, object]] = [(-1, "", value)]
    visited: set[int] = set()
    for index, (_, _, item) in enumerate(waiting):
        if isinstance(item, dict | list | tuple) and not isinstance(item, BadNumber):
            if id(item) not in visited:
                visited.add(id(item))
                inner = item.items() if isinstance(item, dict) else enumerate(item)
                waiting += [(index, key, it) for key, it in inner]
                if isinstance(item, dict):
                    waiting += [(index, "", key) for key in item]
        elif (defect := _defect_of_value(item, bits)) is not None:
            return _defect(waiting, index, *defect)
    return None


def _defect_of_value(value: object, bits: int | None) -> tuple[str, InvalidKind] | None:
    match value:
        case BadNumber(reason):
            return reason, "number"
        case str():
            surrogate = not value.isascii() and _SURROGATE.search(value)
            return ("a string holds a lone surrogate", "malformed") if surrogate else None
        case float() if not isfinite(value):
            return f"not JSON: {value}", "number"
        case int() if bits is not None and value.bit_length() >= bits:
            return f"a number of more than {bits} bits", "number"
        case int() | float() | None:
            return None
    return f"not JSON: a value of type {type(value).__name__}", "malformed"


def _defect(
    waiting: list[tuple[int, object, object]],
    index: int,
    reason: str,
    kind: InvalidKind,
) -> InvalidEvent:
    """Return the error for a value; its key is the path to it."""
    keys: list[str] = []
    while index > 0:
        index, key, _ = waiting[index]
        keys += [str(key)] if key != "" else []
    path = ".".join(reversed(keys)).encode("utf-8", "backslashreplace").decode()[:_SHOWN]
    return InvalidEvent(f"{path}: {reason}" if path else reason, kind=kind, key=path or None)


def encoded(value: dict[str, Any], *, exact: bool) -> bytes:
    """Return the canonical JSON of a value that was read and checked.

    ``exact`` means that all numbers are integers that canonical JSON allows.

    For such values orjson writes the same bytes as canonicaljson, fifteen times faster. Both escape
    only what JSON requires, and the order of UTF-8 is that of code points. orjson writes floats
    differently, and stops at 254 levels.
    """
    if exact:
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:  # nested too deeply for orjson, or a lone surrogate
            return canonical(value)
    return canonical(value)


def content_digest(pdu: dict[str, Any]) -> bytes:
    return sha256(
        canonical({key: value for key, value in pdu.items() if key not in _NOT_IN_CONTENT_HASH})
    ).digest()


def content_hash(pdu: dict[str, Any]) -> str:
    """Return the content hash in the form of `hashes.sha256`.

    It covers every key but `unsigned`, `signatures` and `hashes`.
    """
    return unpadded(content_digest(pdu))


def content_hash_fits(pdu: dict[str, Any]) -> bool:
    """Return whether `hashes.sha256` is the content hash.

    Any base64 of the same bytes matches, padded or not.
    """
    hashes = pdu.get("hashes")
    return isinstance(hashes, dict) and _is_hash(hashes, content_digest(pdu))


def _is_hash(hashes: dict[str, Any], digest: bytes) -> bool:
    claimed = hashes.get("sha256")
    if not isinstance(claimed, str):
        return False
    if claimed == unpadded(digest):
        return True
    try:
        return bool(decode_base64(claimed) == digest)
    except ValueError:  # not base64: it cannot match
        return False


def reference_hash(pdu: dict[str, Any], room_version: str | RoomVersion) -> bytes:
    """Return the 32 bytes that name an event: the hash of its redacted form without signatures.

    From version 3, an `event_id` that a receiver wrote into the PDU is not part of it.
    """
    return sha256(canonical(_referenced(pdu, version_of(room_version)))).digest()


def _referenced(pdu: dict[str, Any], version: RoomVersion) -> dict[str, Any]:
    """Return the part of the PDU that the reference hash covers."""
    redacted = redact(pdu, version)
    redacted.pop("signatures", None)
    if version.event_id_format != "in_pdu":
        redacted.pop("event_id", None)
    return redacted


def event_id(pdu: dict[str, Any], room_version: str | RoomVersion) -> EventId:
    """Return the event id.

    Versions 1 and 2 read it from the PDU and raise InvalidEvent if it has none. Later versions
    derive it from the reference hash.
    """
    version = version_of(room_version)
    if version.event_id_format == "in_pdu":
        claimed_id = pdu.get("event_id")
        if not isinstance(claimed_id, str):
            raise InvalidEvent(
                f"event_id is {'missing' if claimed_id is None else 'not a string'}", key="event_id"
            )
        return EventId(claimed_id)
    return id_from_hash(reference_hash(pdu, version), version)


def id_from_hash(digest: bytes, version: RoomVersion) -> EventId:
    """Return the event id that a reference hash gives in this version.

    Version 3 uses standard base64, later versions URL-safe base64.
    """
    encoded = b2a_base64(digest, newline=False)[:-1]
    if version.event_id_format == "url_safe_base64":
        encoded = encoded.translate(_URL_SAFE)
    return EventId("$" + encoded.decode("ascii"))


class Hashed(NamedTuple):
    """The result of both hashes of a PDU.

    ``fits``: whether the content hash matches. ``signed``: what the signatures cover, None where
    these are other bytes than those of the reference hash.
    """

    fits: bool
    event_id: EventId
    signed: bytes | None


def hashed(pdu: dict[str, Any], version: RoomVersion, *, exact: bool) -> Hashed:
    """Return the hashes of a checked PDU; ``exact`` is as in `encoded`."""
    covered = pdu.copy()
    for key in _NOT_IN_CONTENT_HASH:
        covered.pop(key, None)
    fits = _is_hash(pdu["hashes"], sha256(encoded(covered, exact=exact)).digest())
    if version.event_id_format == "in_pdu":
        return Hashed(fits, pdu["event_id"], None)
    if version.common_keys.issuperset(covered):  # a redaction removes no top-level key
        kept, kept["hashes"] = covered, pdu["hashes"]
        kept["content"] = redacted_content(pdu["type"], pdu["content"], version)
    else:
        kept = _referenced(pdu, version)
    referenced = encoded(kept, exact=exact)
    signed = None if "event_id" in pdu else referenced  # signatures cover it, the hash does not
    return Hashed(fits, id_from_hash(sha256(referenced).digest(), version), signed)


def unpadded(digest: bytes) -> str:
    """Return unpadded standard base64."""
    return b2a_base64(digest, newline=False).rstrip(b"=\n").decode("ascii")
