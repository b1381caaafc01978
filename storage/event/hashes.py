"""Content hash, reference hash and event ids.

What is hashed is written by canonicaljson, the encoder that the Python servers use, or by orjson
where that gives the same bytes. Source: Matrix specification, server-server API, "Calculating the
content hash" and "Calculating the reference hash"; room versions 3 and 4, "Event IDs".
"""

from binascii import b2a_base64
from hashlib import sha256
from typing import Any

import orjson
from canonicaljson import encode_canonical_json
from unpaddedbase64 import decode_base64

from storage.errors import InvalidEvent
from storage.event.redaction import redact, redacted_content
from storage.event.versions import RoomVersion, version_of
from storage.ids import EventId

_NOT_IN_CONTENT_HASH = frozenset({"unsigned", "signatures", "hashes"})
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def canonical(value: object) -> bytes:
    """Canonical JSON; InvalidEvent where the value has none (NaN, lone surrogates, objects that are not JSON)."""
    try:
        return encode_canonical_json(value)
    except UnicodeEncodeError as error:
        raise InvalidEvent("a string holds a lone surrogate") from error
    except RecursionError as error:
        raise InvalidEvent("nested too deeply") from error
    except (ValueError, TypeError) as error:
        raise InvalidEvent(f"not JSON: {error}") from error


def encoded(value: dict[str, Any], *, exact: bool) -> bytes:
    """Canonical JSON of what was read and checked.

    ``exact``: its numbers are all integers that canonical JSON allows.

    For such values orjson writes the same bytes as canonicaljson, fifteen times faster: both escape
    what they must and nothing else, and the order of UTF-8 is that of code points. It writes floats
    differently, and stops at 254 levels.
    """
    if exact:
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError:  # nested too deeply for it, or a lone surrogate
            return canonical(value)
    return canonical(value)


def content_digest(pdu: dict[str, Any]) -> bytes:
    """The 32 bytes of the content hash."""
    return sha256(
        canonical({key: value for key, value in pdu.items() if key not in _NOT_IN_CONTENT_HASH})
    ).digest()


def content_hash(pdu: dict[str, Any]) -> str:
    """The content hash, as it stands in `hashes.sha256`: over everything but `unsigned`, `signatures` and `hashes`."""
    return unpadded(content_digest(pdu))


def content_hash_fits(pdu: dict[str, Any]) -> bool:
    """Whether `hashes.sha256` is the content hash.

    Any base64 of the same bytes will do, padded or not.
    """
    hashes = pdu.get("hashes")
    return isinstance(hashes, dict) and _is_hash(hashes, content_digest(pdu))


def _is_hash(hashes: dict[str, Any], digest: bytes) -> bool:
    given = hashes.get("sha256")
    if not isinstance(given, str):
        return False
    if given == unpadded(digest):
        return True
    try:
        return bool(decode_base64(given) == digest)
    except ValueError:  # not base64: then it is not the hash either
        return False


def reference_hash(pdu: dict[str, Any], room_version: str | RoomVersion) -> bytes:
    """The 32 bytes that name an event: the hash of its redacted form without signatures.

    From version 3 an `event_id` that a receiver wrote into the PDU is not part of it.
    """
    return sha256(canonical(_referenced(pdu, version_of(room_version)))).digest()


def _referenced(pdu: dict[str, Any], version: RoomVersion) -> dict[str, Any]:
    """What the reference hash is made of."""
    redacted = redact(pdu, version)
    redacted.pop("signatures", None)
    if version.event_id_format != "in_pdu":
        redacted.pop("event_id", None)
    return redacted


def event_id(pdu: dict[str, Any], room_version: str | RoomVersion) -> EventId:
    """The event's id: from the PDU in versions 1 and 2 (InvalidEvent if it has none), from the reference hash after."""
    version = version_of(room_version)
    if version.event_id_format == "in_pdu":
        given = pdu.get("event_id")
        if not isinstance(given, str):
            raise InvalidEvent(f"event_id is {'missing' if given is None else 'not a string'}")
        return EventId(given)
    return id_from_hash(reference_hash(pdu, version), version)


def id_from_hash(digest: bytes, version: RoomVersion) -> EventId:
    """The event id that a reference hash gives in this version (3: standard base64, later: URL-safe)."""
    encoded = b2a_base64(digest, newline=False)[:-1]
    if version.event_id_format == "url_safe_base64":
        encoded = encoded.translate(_URL_SAFE)
    return EventId("$" + encoded.decode("ascii"))


def fits_and_id(pdu: dict[str, Any], version: RoomVersion, *, exact: bool) -> tuple[bool, EventId]:
    """(whether the content hash fits, the event id) of a checked PDU; ``exact`` as in `encoded`."""
    covered = pdu.copy()
    for key in _NOT_IN_CONTENT_HASH:
        covered.pop(key, None)
    fits = _is_hash(pdu["hashes"], sha256(encoded(covered, exact=exact)).digest())
    if version.event_id_format == "in_pdu":
        return fits, pdu["event_id"]
    if version.common_keys.issuperset(covered):  # a redaction takes nothing from the top
        kept, kept["hashes"] = covered, pdu["hashes"]
        kept["content"] = redacted_content(pdu["type"], pdu["content"], version)
    else:
        kept = _referenced(pdu, version)
    return fits, id_from_hash(sha256(encoded(kept, exact=exact)).digest(), version)


def unpadded(digest: bytes) -> str:
    """Unpadded standard base64."""
    return b2a_base64(digest, newline=False).rstrip(b"=\n").decode("ascii")
