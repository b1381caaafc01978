"""Content hash, reference hash and event ids.

What is hashed is always written by canonicaljson, the encoder that the Python servers use.
Source: Matrix specification, server-server API, "Calculating the content hash" and "Calculating the reference hash"; room
versions 3 and 4, "Event IDs".
"""

from binascii import b2a_base64
from hashlib import sha256
from typing import Any

from canonicaljson import encode_canonical_json
from unpaddedbase64 import decode_base64

from storage.errors import InvalidEvent
from storage.event.redaction import redact, redacted_content
from storage.event.versions import RoomVersion, version_of
from storage.ids import EventId

_NOT_IN_CONTENT_HASH = frozenset({"unsigned", "signatures", "hashes"})
_CONTENT = b'],"content":'
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


def content_digest(pdu: dict[str, Any]) -> bytes:
    """The 32 bytes of the content hash."""
    return sha256(canonical({key: value for key, value in pdu.items() if key not in _NOT_IN_CONTENT_HASH})).digest()


def content_hash(pdu: dict[str, Any]) -> str:
    """The content hash, as it stands in `hashes.sha256`: over everything but `unsigned`, `signatures` and `hashes`."""
    return unpadded(content_digest(pdu))


def content_hash_fits(pdu: dict[str, Any]) -> bool:
    """Whether `hashes.sha256` is the content hash. Any base64 of the same bytes will do, padded or not."""
    hashes = pdu.get("hashes")
    given = hashes.get("sha256") if isinstance(hashes, dict) else None
    if not isinstance(given, str):
        return False
    digest = content_digest(pdu)
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
    version = version_of(room_version)
    redacted = redact(pdu, version)
    redacted.pop("signatures", None)
    if version.event_id_format != "in_pdu":
        redacted.pop("event_id", None)
    return sha256(canonical(redacted)).digest()


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


def fits_and_id(pdu: dict[str, Any], version: RoomVersion) -> tuple[bool, EventId]:
    """(whether the content hash fits, the event id) of a checked PDU, in one encoding instead of two where that can be."""
    if version.event_id_format == "in_pdu":
        return content_hash_fits(pdu), pdu["event_id"]
    both = _hashed_bytes(pdu, version)
    if both is None:
        return content_hash_fits(pdu), event_id(pdu, version)
    covered, reference = both
    fits = pdu["hashes"]["sha256"] == unpadded(sha256(covered).digest()) or content_hash_fits(pdu)
    return fits, id_from_hash(sha256(reference).digest(), version)


def _hashed_bytes(pdu: dict[str, Any], version: RoomVersion) -> tuple[bytes, bytes] | None:
    """What the content hash and the reference hash of a PDU are made of; None where the PDU is not of the common form.

    The common form has one sha256 and no key at the top that a redaction drops. Then both are the canonical JSON of the PDU,

        {"auth_events":[…],"content":{…},"depth":7,"hashes":{"sha256":"…"},"origin_server_ts":…}

    once without `hashes` and once with the redacted content. A quote within a string is escaped, so `],"content":` is found
    first at the end of auth_events; the piece from depth to hashes is also searched for a second time, in nested objects.
    """
    hashes = pdu["hashes"]
    given = hashes.get("sha256")
    if len(hashes) != 1 or type(given) is not str or '"' in given or "\\" in given or not version.common_keys.issuperset(pdu):
        return None
    depth = f',"depth":{pdu["depth"]},'
    middle = f'{depth}"hashes":{{"sha256":"{given}"}},'.encode()
    whole = pdu.copy()
    whole.pop("unsigned", None)
    del whole["signatures"]
    encoded = canonical(whole)
    pieces = encoded.split(middle)
    if len(pieces) != 2:
        return None
    before, after = pieces
    covered = b"".join((before, depth.encode(), after))
    kept = redacted_content(pdu["type"], pdu["content"], version)
    if kept == pdu["content"]:  # the values are the same objects, so equal means encoded alike
        return covered, encoded
    content = before.index(_CONTENT) + len(_CONTENT)
    return covered, b"".join((before[:content], canonical(kept) if kept else b"{}", middle, after))


def unpadded(digest: bytes) -> str:
    """Unpadded standard base64."""
    return b2a_base64(digest, newline=False).rstrip(b"=\n").decode("ascii")
