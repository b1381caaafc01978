r"""Format 0xC2: an event of canonical JSON without its room id and what a hash gives.

    4 bytes    CRC-32 of the event id and the decoded bytes
    1 byte     n, the units of 32 bytes that follow
    32 n       ids of auth_events, prev_events and in the content, the content hash if it is kept,
               then the signature (64 bytes): all without base64
    the rest   a frame (`format_zstd`) of the parts that remain, as text

The text of the parts::

    1 byte     the number of auth_events, plus 128 if the content hash is kept
    1 byte     the number of prev_events, plus 128 if the ids are in standard base64 (version 3)
    parts      between \x01: from the content to the hashes; keys between hashes and prev_events,
               prev_events and room_id; the sender; signatures; keys after signatures

JSON has no control characters but white space, so they are free for marks: \x02 is an event id of
the content. Of the usual signatures, one by the server of the sender, the part is the version of
the key after \x03. Where other servers have signed too, the signatures stay text.

The content hash is left out where the bytes give it. It is kept where it is wrong, as in the
canonical JSON of a redacted event.

`encode` returns None for an event of any other form: parents in the form of room versions 1 and 2,
the create event of version 12, other bytes than canonical JSON. It assembles the event again and
compares it, so a form that it does not foresee cannot lose anything.
"""

import re
from binascii import Error, a2b_base64, b2a_base64
from hashlib import sha256
from typing import Final

from storage.codec.dictionaries import Dictionary
from storage.codec.format_zstd import CHECKSUM_BYTES, checksum, compressed, decompressed

FORMAT: Final = 0xC2
UNIT: Final = 32
UNITS_MAX: Final = 255
HASH_KEPT: Final = 128
STANDARD_IDS: Final = 128
IDS_MAX: Final = 127

_SEPARATOR: Final = b"\x01"
_CONTENT_ID: Final = b"\x02"
_USUAL: Final = b"\x03"

_EVENT: Final = re.compile(
    rb'\{"auth_events":\[([^\]]*)\],"content":(\{.*)"hashes":\{"sha256":"([^"]{43})"\},([^\[]*)'
    rb'"prev_events":\[([^\]]*)\],([^{]*)"room_id":"[^"]*","sender":"([^"]*)",'
    rb'"signatures":\{([^}]*(?:\},[^}]*)*\})\},([^{]*)(,"unsigned":\{.*\})?\}',
    re.DOTALL,
)
_CONTENT_IDS: Final = re.compile(rb'"\$([A-Za-z0-9_+/-]{43})"')
_TO_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_TO_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")


def encode(raw: bytes, event_id: str, room_id: str, dictionary: Dictionary) -> bytes | None:
    """Return the stored form, or None for bytes that have none."""
    taken = _taken_apart(raw, room_id)
    if taken is None:
        return None
    binary, text = taken
    frame = compressed(text, dictionary)
    return b"%b%c%b%b" % (checksum(raw, event_id), len(binary) // UNIT, binary, frame)


def decode(stored: bytes, event_id: str, room_id: str, dictionary: Dictionary) -> bytes:
    """Return the bytes; raise ValueError or ZstdError if they are not those that were encoded."""
    start = CHECKSUM_BYTES + 1
    end = start + UNIT * stored[CHECKSUM_BYTES]
    raw = _assembled(stored[start:end], decompressed(stored[end:], dictionary), room_id)
    if checksum(raw, event_id) != stored[:CHECKSUM_BYTES]:
        raise ValueError("the checksum of the bytes is wrong")
    return raw


def remaining_text(raw: bytes, room_id: str) -> bytes:
    """Return the text that is compressed, to train a dictionary on it."""
    taken = _taken_apart(raw, room_id)
    return raw if taken is None else taken[1]


def _taken_apart(raw: bytes, room_id: str) -> tuple[bytes, bytes] | None:
    """Return the binary part and the text of the other parts, or None."""
    found = _EVENT.fullmatch(raw)
    if found is None:
        return None
    auth, content, given, between, prev, before_room, sender, signed, last, extra = found.groups(
        b""
    )
    covered = b"%b%b%b}" % (
        raw[: found.start(3) - 20],
        raw[found.end(3) + 3 : found.start(8) - 14],
        last,
    )
    kept = b"" if given == _base64(sha256(covered).digest())[:43] else given
    auth_ids, prev_ids = _ids(auth), _ids(prev)
    ids = [*auth_ids, *prev_ids]
    if b'"$' in content:
        pieces = _CONTENT_IDS.split(content)
        content = _CONTENT_ID.join(pieces[::2])
        ids += pieces[1::2]
    part, signature = _usual_signature(signed, sender)
    if len(auth_ids) > IDS_MAX or len(prev_ids) > IDS_MAX:
        return None
    text = b"%c%c%b" % (
        len(auth_ids) | (HASH_KEPT if kept else 0),
        len(prev_ids) | (STANDARD_IDS if _are_standard(ids) else 0),
        _SEPARATOR.join([content, between, before_room, sender, part, last + extra]),
    )
    try:
        binary = _binary(ids, kept, signature)
        is_same = _assembled(binary, text, room_id) == raw
    except (Error, ValueError):  # no base64, or marks in the text
        return None
    return (binary, text) if is_same and len(binary) <= UNIT * UNITS_MAX else None


def _ids(references: bytes) -> list[bytes]:
    """Return the ids of a list, without `$`. `_assembled` shows whether it was such a list."""
    return references[2:-1].split(b'","$') if references else []


def _are_standard(ids: list[bytes]) -> bool:
    joined = b"".join(ids)
    return b"+" in joined or b"/" in joined


def _usual_signature(signatures: bytes, sender: bytes) -> tuple[bytes, bytes]:
    """Return (part, signature in base64) if only the sender's server has signed, with one key."""
    start = b'"%b":{"ed25519:' % sender.partition(b":")[2]
    if signatures.startswith(start) and signatures[-91:-88] == b'":"':
        return _USUAL + signatures[len(start) : -91], signatures[-88:-2]
    return signatures, b""


def _binary(ids: list[bytes], kept: bytes, signature: bytes) -> bytes:
    """Return ids, hash and signature without base64.

    Each id is padded with one character, so that all are decoded in one call.
    """
    if kept:
        ids.append(kept)
    joined = a2b_base64(b"A".join([*ids, b""]).translate(_TO_STANDARD))
    pieces = [joined[at : at + UNIT] for at in range(0, len(joined), UNIT + 1)]
    if signature:
        pieces.append(a2b_base64(signature + b"=="))
    return b"".join(pieces)


def _assembled(binary: bytes, text: bytes, room_id: str) -> bytes:
    """Return the event; compute its content hash if it is not kept."""
    content, between, before_room, sender, signed, last = text[2:].split(_SEPARATOR)
    auth_ids, prev_ids = text[0] & ~HASH_KEPT, text[1] & ~STANDARD_IDS
    to_text = _TO_STANDARD if text[1] & STANDARD_IDS else _TO_URL_SAFE
    count = auth_ids + prev_ids + content.count(_CONTENT_ID)
    ids = [
        _base64(binary[at : at + UNIT])[:43].translate(to_text)
        for at in range(0, UNIT * count, UNIT)
    ]
    if count > auth_ids + prev_ids:
        content = _with_ids(content.split(_CONTENT_ID), ids[auth_ids + prev_ids :])
    at, kept = UNIT * count, b""
    if text[0] & HASH_KEPT:
        at, kept = at + UNIT, _base64(binary[at : at + UNIT])[:43]
    if signed[:1] == _USUAL:
        signed = b'"%b":{"ed25519:%b":"%b"}' % (
            sender.partition(b":")[2],
            signed[1:],
            _base64(binary[at:])[:86],
        )
    before = b'{"auth_events":[%b],"content":%b' % (_listed(ids[:auth_ids]), content)
    after = b'%b"prev_events":[%b],%b"room_id":"%b","sender":"%b",' % (
        between,
        _listed(ids[auth_ids : auth_ids + prev_ids]),
        before_room,
        room_id.encode(),
        sender,
    )
    if not kept:
        covered = b"%b%b%b}" % (before, after, last.partition(b',"unsigned":{')[0])
        kept = _base64(sha256(covered).digest())[:43]
    return b'%b"hashes":{"sha256":"%b"},%b"signatures":{%b},%b}' % (
        before,
        kept,
        after,
        signed,
        last,
    )


def _listed(ids: list[bytes]) -> bytes:
    return b'"$%b"' % b'","$'.join(ids) if ids else b""


def _with_ids(pieces: list[bytes], ids: list[bytes]) -> bytes:
    """Return the pieces of a content with its event ids between them."""
    whole = [b""] * (2 * len(ids) + 1)
    whole[::2] = pieces
    whole[1::2] = [b'"$%b"' % one for one in ids]
    return b"".join(whole)


def _base64(data: bytes) -> bytes:
    return b2a_base64(data, newline=False)
