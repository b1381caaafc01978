r"""Encode and decode the bytes of an event, in a form that names itself.

The first byte of `events.json` is the format:

* `{` or white space: the bytes themselves, as received or censored.
* 0xC1 and 0xC2: `format_zstd` and `format_compact`. The id of the dictionary follows in 3 bytes,
  then the body of the format.

Any other byte is damage. A single flipped bit never turns one format into another.

Decoding needs the event id and the room id, which each reader has, and the dictionary. Dictionaries
are known by their contents, so one registry serves all databases of a process.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from zstandard import ZstdError

from storage.codec import format_compact, format_zstd
from storage.codec.dictionaries import Dictionary, shipped_dictionary
from storage.errors import StorageCorrupt

FORMATS: Final = (format_zstd.FORMAT, format_compact.FORMAT)
HEADER_BYTES: Final = 4

_PLAIN: Final = frozenset((b"{", b" ", b"\t", b"\r", b"\n"))
_BRACE: Final = ord("{")

Reader = Callable[[bytes, str, str], bytes]

_readers: Final[dict[bytes, Reader]] = {}
"""By the four bytes of the header."""


class MissingDictionary(StorageCorrupt):
    """A stored form names a dictionary that is not registered: load it, then decode again."""


def register(dictionary: Dictionary) -> None:
    """Decode rows that name this dictionary from now on."""
    _readers[bytes([format_zstd.FORMAT]) + dictionary.key] = partial(_zstd, dictionary)
    _readers[bytes([format_compact.FORMAT]) + dictionary.key] = partial(_compact, dictionary)


def encode(raw: bytes, event_id: str, room_id: str, dictionary: Dictionary) -> bytes:
    """Return the shortest stored form of the bytes.

    It is the compact one, unless an event is written so that it has none, or gets longer.
    """
    form, body = (
        format_compact.FORMAT,
        format_compact.encode(raw, event_id, room_id, dictionary),
    )
    if body is None:
        form, body = format_zstd.FORMAT, format_zstd.encode(raw, event_id, dictionary)
    if HEADER_BYTES + len(body) >= len(raw) and raw[:1] in _PLAIN:
        return raw
    return b"%c%b%b" % (form, dictionary.key, body)


def decode(stored: bytes, event_id: str, room_id: str) -> bytes:
    """Return the bytes of an event.

    Raise `MissingDictionary` if its dictionary is not registered. Raise `StorageCorrupt` if the
    stored form is damaged, or belongs to another event or dictionary.
    """
    if stored[:1] in _PLAIN:
        return stored
    try:
        return _readers[stored[:HEADER_BYTES]](stored, event_id, room_id)
    except KeyError:
        raise _unknown(stored, event_id) from None
    except (ZstdError, ValueError, IndexError) as error:
        raise StorageCorrupt(
            f"the stored bytes of an event cannot be decoded: {error}", event_id=event_id
        ) from error


def is_plain(stored: bytes) -> bool:
    """Return whether these are the bytes themselves."""
    return stored[:1] in _PLAIN


def require_dictionary(stored: bytes, event_id: str) -> None:
    """Raise `MissingDictionary` if `decode` would, without decoding."""
    if stored[:1] != b"{" and stored[:1] not in _PLAIN and stored[:HEADER_BYTES] not in _readers:
        raise _unknown(stored, event_id)


def _unknown(stored: bytes, event_id: str) -> StorageCorrupt:
    if len(stored) > HEADER_BYTES and stored[0] in FORMATS:
        return MissingDictionary(
            "the dictionary of an event's bytes is not stored",
            event_id=event_id,
            dictionary_id=int.from_bytes(stored[1:HEADER_BYTES]),
        )
    return StorageCorrupt("the stored bytes of an event have no known format", event_id=event_id)


def _zstd(dictionary: Dictionary, stored: bytes, event_id: str, _: str) -> bytes:
    return format_zstd.decode(stored[HEADER_BYTES:], event_id, dictionary)


def _compact(dictionary: Dictionary, stored: bytes, event_id: str, room_id: str) -> bytes:
    return format_compact.decode(stored[HEADER_BYTES:], event_id, room_id, dictionary)


register(shipped_dictionary())
