r"""Format 0xC2: an event of canonical JSON without its room id and what a hash gives.

    1 byte     0xC2
    3 bytes    the number of the dictionary
    4 bytes    CRC-32 of the event id and the decoded bytes
    1 byte     the number of auth_events, plus 128 if ids are in standard base64 (version 3)
    1 byte     the number of prev_events, plus 128 if the content hash is kept
    1 byte     n, the units of 32 bytes that follow
    32 n       ids of auth_events, prev_events and in the content, the content hash if it is kept,
               then the last signature (64 bytes): all without base64
    the rest   a frame (`format_zstd`) of the parts that remain, as text

The text has four parts, between \x01: from the content to the hashes; keys from the hashes to
prev_events; the middle; keys after the signatures. The middle has three parts, between \x02: keys
from prev_events to room_id; the sender; the version of the signing key, with other signatures
before it. A fourth is the server that signed first, if it is not the one of the sender::

    {"auth_events":[…],"content":{…},"depth":7,"hashes":{"sha256":"…"},"origin_server_ts":1,
                              └──── content ──┘                        └─ between ──────────┘
    "prev_events":[…],"room_id":"…","sender":"@a:b","signatures":{"b":{"ed25519:1":"…"}},
                     └──────────────────── middle ──────────────────────────────┘
    "type":"m.room.message"}
    └──────── last ───────┘

JSON has no control characters but white space, so they are free for marks. \x03 in the content is
an event id.

The content hash is left out where the bytes give it. It is kept where it is wrong, as in the
canonical JSON of a redacted event.

Events of one room and sender have the same auth events and the same middle. So both are looked up
in a cache by their bytes, in either direction.

`encode` returns None for an event of any other form: parents in the form of room versions 1 and 2,
the create event of version 12, other bytes than canonical JSON. It assembles the event again, as
decoding does, and compares it. So a form that it does not foresee cannot lose anything.
"""

from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final, TypeAlias

from storage.codec.dictionaries import Dictionary
from storage.codec.format_zstd import BODY, HEADER_BYTES, checksum, decompressed

if TYPE_CHECKING:
    from _hashlib import HASH

FORMAT: Final = b"\xc2"
UNIT: Final = 32
IDS_MAX: Final = 127
FLAG: Final = 128
CACHE_ENTRIES: Final = 4_096
CACHED_BYTES_MAX: Final = 1_024
"""Longer lists of auth events and middles have no compact form: they would fill the caches."""

_START: Final = BODY + 3
_PART: Final = b"\x01"
_MIDDLE_PART: Final = b"\x02"
_CONTENT_ID: Final = b"\x03"

_AUTH: Final = b'{"auth_events":['
_CONTENT: Final = b'],"content":'
_HASH: Final = b'"hashes":{"sha256":"'
_HASH_END: Final = b'"},'
_HASH_CHARS: Final = 43
_HASHES_CHARS: Final = len(_HASH) + _HASH_CHARS + len(_HASH_END)
_PREV: Final = b'"prev_events":['
_LIST_END: Final = b"],"
_SENDER: Final = b'","sender":"'
_SIGNATURES: Final = b'"signatures":{"'
_KEY: Final = b'":{"ed25519:'
_SIGNATURE: Final = b'":"'
_SIGNATURE_CHARS: Final = 86
_SIGNATURES_END: Final = b'"}},'
_UNSIGNED: Final = b',"unsigned":{'
_AUTH_CHARS: Final = len(_AUTH)
_CONTENT_CHARS: Final = len(_CONTENT)
_PREV_CHARS: Final = len(_PREV)
_END_CHARS: Final = len(_SIGNATURES_END)
_ID_START: Final = b'"$'
_ID_END: Final = b'"'
_QUOTED_ID_CHARS: Final = len(b'"$"') + _HASH_CHARS
"""The length of a list of one id."""

_TO_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_TO_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")


_Taken: TypeAlias = tuple[bytes, bytes, bytes]
"""An event without what the columns and hashes give: the counts, what is binary, and the text."""


def encode(raw: bytes, event_id: str, room_id: str, dictionary: Dictionary) -> bytes | None:
    """Return the stored form, or None for bytes that have none."""
    taken = _taken_apart(raw, room_id)
    if taken is None:
        return None
    counts, binary, text = taken
    return b"".join((
        FORMAT, dictionary.key, checksum(raw, event_id), counts, binary, dictionary.compress(text)
    ))  # fmt: skip


def decode(dictionary: Dictionary, stored: bytes, event_id: str | None, room_id: str) -> bytes:
    """Return the bytes; raise ValueError or ZstdError if they are not those that were encoded.

    ``event_id`` None: they are not compared with their checksum.

    Raise IndexError if so few are stored that they cannot be an event.
    """
    end = frame_at(stored)
    text = decompressed(stored[end:], dictionary)
    raw = _assembled(stored[BODY:_START], stored[_START:end], text, room_id)
    if event_id is not None and checksum(raw, event_id) != stored[HEADER_BYTES:BODY]:
        raise ValueError("the checksum of the bytes is wrong")
    return raw


def frame_at(stored: bytes) -> int:
    """Return where the frame begins. `IndexError` if there is too little of it."""
    return _START + UNIT * stored[_START - 1]


def remaining_text(raw: bytes, room_id: str) -> bytes:
    """Return the text that is compressed, to train a dictionary on it."""
    taken = _taken_apart(raw, room_id)
    return raw if taken is None else taken[2]


def _taken_apart(raw: bytes, room_id: str) -> _Taken | None:
    content_at = raw.find(_CONTENT, 0, CACHED_BYTES_MAX)
    hash_at = raw.find(_HASH, content_at)
    prev_at = raw.find(_PREV, hash_at)
    middle_at = raw.find(_LIST_END, prev_at)
    signed_at = raw.find(_SIGNATURES_END, middle_at)
    signature_at = signed_at - _SIGNATURE_CHARS
    if content_at < 0 or not middle_at < signature_at < middle_at + CACHED_BYTES_MAX:
        return None
    ids, content = b"", raw[content_at + _CONTENT_CHARS : hash_at]
    try:
        auth = _auth_ids(raw[_AUTH_CHARS:content_at])
        prev = _ids(raw[prev_at + _PREV_CHARS : middle_at])
        if b"$" in content:  # one byte is found faster than two
            content, ids = _without_ids(content)
        middle = _middle_text(raw[middle_at:signature_at], room_id)
        last = raw[signed_at + _END_CHARS : -1]
        text = _PART.join((content, raw[hash_at + _HASHES_CHARS : prev_at], middle, last))
        signature = a2b_base64(raw[signature_at:signed_at] + b"==")
        binary = b"".join((auth, prev, ids, signature))
        counts = bytes((len(auth) // UNIT, len(prev) // UNIT, len(binary) // UNIT))
        if _assembled(counts, binary, text, room_id) == raw:
            return counts, binary, text
        kept = _id(raw[hash_at + len(_HASH) :][:_HASH_CHARS])
        return _unusual(raw, room_id, counts, (auth + prev + ids, kept, signature), text)
    except ValueError:  # no base64, or marks in the text, or too many ids
        return None


def _unusual(
    raw: bytes, room_id: str, counts: bytes, parts: tuple[bytes, bytes, bytes], text: bytes
) -> _Taken | None:
    """Return a form with standard base64, or with the content hash, or both. None: none is right.

    ``parts`` are the ids, the content hash and the signature.
    """
    if max(counts[:2]) > IDS_MAX:
        return None
    ids, kept, signature = parts
    for standard, has_hash in ((0, FLAG), (FLAG, 0), (FLAG, FLAG)):
        binary = b"".join((ids, kept if has_hash else b"", signature))
        flagged = bytes((counts[0] | standard, counts[1] | has_hash, len(binary) // UNIT))
        if _assembled(flagged, binary, text, room_id) == raw:
            return flagged, binary, text
    return None


def _assembled(counts: bytes, binary: bytes, text: bytes, room_id: str) -> bytes:
    """Return the event; compute its content hash if it is not kept."""
    auth_count, prev_count, _ = counts
    content, between, middle_text, last = text.split(_PART)
    alphabet = _TO_STANDARD if auth_count & FLAG else _TO_URL_SAFE
    auth_end = UNIT * (auth_count & IDS_MAX)
    head, hashed_head = _head(binary[:auth_end], alphabet)
    end = auth_end + UNIT * (prev_count & IDS_MAX)
    prev = _list(binary[auth_end:end], alphabet)
    if _CONTENT_ID in content:
        pieces = content.split(_CONTENT_ID)
        start, end = end, end + UNIT * (len(pieces) - 1)
        content = _with_ids(pieces, binary[start:end], alphabet)
    middle, signatures = _middle(middle_text, room_id)
    if prev_count & FLAG:
        start, end = end, end + UNIT
        kept = b2a_base64(binary[start:end], newline=False)
    else:
        unsigned_at = last.find(_UNSIGNED)
        covered = last if unsigned_at < 0 else last[:unsigned_at]
        hashed = hashed_head.copy()
        hashed.update(b"".join((content, between, _PREV, prev, middle, covered, b"}")))
        kept = b2a_base64(hashed.digest(), newline=False)
    signature = b2a_base64(binary[end:], newline=False)[:_SIGNATURE_CHARS]
    return b"".join((
        head, content, _HASH, kept[:_HASH_CHARS], _HASH_END, between, _PREV, prev,
        middle, signatures, signature, _SIGNATURES_END, last, b"}",
    ))  # fmt: skip


def _id(text: bytes) -> bytes:
    """Return an id, or a hash, without base64. `_assembled` shows whether it was one."""
    return a2b_base64(text.translate(_TO_STANDARD) + b"=")


def _ids(listed: bytes) -> bytes:
    """Return the ids of a list without base64. `_assembled` shows whether it was such a list."""
    if len(listed) == _QUOTED_ID_CHARS:
        return _id(listed[2:-1])
    if not listed:
        return b""
    # each is padded with one character, so that all are decoded in one call
    padded = b"A".join([*listed[2:-1].split(b'","$'), b""])
    joined = a2b_base64(padded.translate(_TO_STANDARD))
    return b"".join([joined[at : at + UNIT] for at in range(0, len(joined), UNIT + 1)])


def _without_ids(content: bytes) -> tuple[bytes, bytes]:
    """Return a content with marks for its event ids, and the ids. Other texts with `$` stay."""
    pieces, ids = [], []
    first, *others = content.split(_ID_START)
    for piece in others:
        if piece[_HASH_CHARS : _HASH_CHARS + 1] == _ID_END:
            ids.append(_id(piece[:_HASH_CHARS]))
            pieces.append(piece[_HASH_CHARS + 1 :])
        elif pieces:
            pieces[-1] += _ID_START + piece
        else:
            first += _ID_START + piece
    return _CONTENT_ID.join((first, *pieces)), b"".join(ids)


def _list(ids: bytes, alphabet: bytes) -> bytes:
    """Return a list of ids as JSON without brackets."""
    if len(ids) == UNIT:  # most lists have one
        return _quoted_id(ids, alphabet)
    return b",".join(_quoted(ids, alphabet))


def _quoted(ids: bytes, alphabet: bytes) -> list[bytes]:
    return [_quoted_id(ids[at : at + UNIT], alphabet) for at in range(0, len(ids), UNIT)]


def _quoted_id(id_hash: bytes, alphabet: bytes) -> bytes:
    return b'"$%b"' % b2a_base64(id_hash, newline=False)[:_HASH_CHARS].translate(alphabet)


def _with_ids(pieces: Sequence[bytes], ids: bytes, alphabet: bytes) -> bytes:
    """Return the pieces of a content with its event ids between them."""
    whole = [b""] * (2 * len(pieces) - 1)
    whole[::2] = pieces
    whole[1::2] = _quoted(ids, alphabet)
    return b"".join(whole)


_auth_ids = lru_cache(CACHE_ENTRIES)(_ids)


@lru_cache(CACHE_ENTRIES)
def _head(ids: bytes, alphabet: bytes) -> "tuple[bytes, HASH]":
    """Return an event up to its content, and a SHA-256 of these bytes, to be copied."""
    text = b"".join((_AUTH, _list(ids, alphabet), _CONTENT))
    return text, sha256(text)


@lru_cache(CACHE_ENTRIES)
def _middle_text(middle: bytes, room_id: str) -> bytes:
    """Return the text of a middle. `_assembled` shows whether it was one."""
    before_room, _, rest = middle.partition(b'"room_id":"%b%b' % (room_id.encode(), _SENDER))
    sender, _, rest = rest.partition(b'",' + _SIGNATURES)
    server, _, key = rest.partition(_KEY)
    parts = [before_room[len(_LIST_END) :], sender, key[: -len(_SIGNATURE)]]
    return _MIDDLE_PART.join(parts if server == _server_of(sender) else [*parts, server])


@lru_cache(CACHE_ENTRIES)
def _middle(text: bytes, room_id: str) -> tuple[bytes, bytes]:
    """Return the middle from its text: up to the signatures, and from there to the last one."""
    before_room, sender, key, *other = text.split(_MIDDLE_PART)
    covered = _LIST_END, before_room, b'"room_id":"', room_id.encode(), _SENDER, sender, b'",'
    server = other[0] if other else _server_of(sender)
    return b"".join(covered), b"".join((_SIGNATURES, server, _KEY, key, _SIGNATURE))


def _server_of(user_id: bytes) -> bytes:
    return user_id.partition(b":")[2]
