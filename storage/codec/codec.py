"""Encode and decode the bytes of an event, in a form that names itself.

The first byte of `events.json` is the format:

* `{` or white space: the bytes themselves, as received or censored.
* 0xC1 and 0xC2: `format_zstd` and `format_compact`. 3 bytes name the dictionary.
* 0xA1: `reference`, to one of the above in the archive. A reader never sees it, as a connection
  replaces it (`storage.database.archived_bytes`).

Any other byte is damage. A single flipped bit never turns one format into another.

Decoding needs the event id and the room id, which each reader has, and the dictionary. Dictionaries
are known by their contents, so one registry serves all databases of a process.
"""

import struct
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, NewType, Self

from zstandard import ZstdError

from storage.codec import format_compact, format_zstd
from storage.codec.dictionaries import Dictionary, shipped_dictionary
from storage.codec.format_zstd import HEADER_BYTES
from storage.errors import StorageCorrupt

# --------------------------------------------------------------------------------------------------
# Format 0xA1: a reference to the stored form of an event, which is in a pack of the archive.
#
#     1 byte     0xA1
#     4 bytes    the number of the pack
#     4 bytes    offset of the record in the pack
#     3 bytes    length of the stored form
#
# A single flipped bit turns 0xA1 into no other format. `storage.database.archived_bytes` replaces
# references by what they refer to, before anybody decodes. `storage.codec.pack` has the records.
#
#     Reference(7, 8, 270).to_bytes()  # a1 00000007 00000008 00010e

FORMAT: Final = b"\xa1"
REFERENCE_BYTES: Final = 12
LENGTH_MAX: Final = (1 << 24) - 1

_NUMBERS: Final = struct.Struct(">II")
_LENGTH_BYTES: Final = 3


class Reference(NamedTuple):
    """Where the stored form of an event is. ``length``: without the checksum of the record."""

    pack: int
    offset: int
    length: int

    def to_bytes(self) -> bytes:
        """Return what `events.json` holds."""
        numbers = _NUMBERS.pack(self.pack, self.offset)
        return b"".join((FORMAT, numbers, self.length.to_bytes(_LENGTH_BYTES)))

    @classmethod
    def parse(cls, stored: Any) -> Self | None:
        """Return the reference in a value of `events.json`; None: it is no reference."""
        if len(stored) != REFERENCE_BYTES or stored[:1] != FORMAT:
            return None
        pack, offset = _NUMBERS.unpack_from(stored, 1)
        return cls(pack, offset, int.from_bytes(stored[-_LENGTH_BYTES:]))


class LostBytes(bytes):
    """A reference whose bytes could not be found. `decode` raises its ``reason``."""

    reason: str
    pack: int
    url: str | None

    @classmethod
    def of(cls, reference: Reference, reason: str, url: str | None) -> Self:
        lost = cls(reference.to_bytes())
        lost.reason, lost.pack, lost.url = reason, reference.pack, url
        return lost


StoredBytes = NewType("StoredBytes", object)
"""A value of `events.json`: bytes that only `decode` can read. To a type checker they are none."""

CACHE_ENTRIES: Final = 8_192
CACHED_BYTES_MAX: Final = 2_048
"""Longer events are not cached: they could fill the memory."""

LONG: Final = 4_096
"""Longer events may hold thousands of lists, so their values are counted before they are served."""

_ZSTD: Final = format_zstd.FORMAT
_COMPACT: Final = format_compact.FORMAT
_REFERENCE: Final = FORMAT

_PLAIN: Final = frozenset((b"{", b" ", b"\t", b"\r", b"\n"))

Reader = Callable[[bytes, str | None, str], bytes]

_remembered: Final[dict[StoredBytes, bytes]] = {}
"""The bytes that `remember` passes to the cache."""

_readers: Final[dict[bytes, Reader]] = {}
"""By the four bytes of the header."""


class MissingDictionary(StorageCorrupt):
    """A stored form names a dictionary that is not registered: load it, then decode again."""


def register(dictionary: Dictionary) -> None:
    """Decode rows that name this dictionary from now on."""
    _readers[_ZSTD + dictionary.key] = partial(format_zstd.decode, dictionary)
    _readers[_COMPACT + dictionary.key] = partial(format_compact.decode, dictionary)


def encode(raw: bytes, event_id: str, room_id: str, dictionary: Dictionary | None) -> StoredBytes:
    """Return the shortest stored form of the bytes; without a dictionary the bytes themselves.

    It is the compact one, unless an event is written so that it has none, or gets longer.
    """
    if dictionary is None:
        return plain(raw)
    stored = format_compact.encode(raw, event_id, room_id, dictionary)
    if stored is None:
        stored = format_zstd.encode(raw, event_id, dictionary)
    return StoredBytes(raw if len(stored) >= len(raw) and raw[:1] in _PLAIN else stored)


def plain(raw: bytes) -> StoredBytes:
    """Return the bytes themselves as a stored form; raise ValueError if they cannot be one."""
    if raw[:1] not in _PLAIN:
        raise ValueError("bytes that do not begin like JSON have no plain stored form")
    return StoredBytes(raw)


def decode(stored: StoredBytes, event_id: str, room_id: str) -> bytes:
    """Return the bytes of an event.

    Raise `MissingDictionary` if its dictionary is not registered. Raise `StorageCorrupt` if the
    stored form is damaged, or belongs to another event or dictionary.
    """
    data: Any = stored
    if data[:1] in _PLAIN:
        return data  # type: ignore[no-any-return]
    try:
        return _readers[data[:HEADER_BYTES]](data, event_id, room_id)
    except KeyError:
        raise _unknown(data, event_id) from None
    except (ZstdError, ValueError, IndexError) as error:
        raise StorageCorrupt(
            f"the stored bytes of an event cannot be decoded: {error}", event_id=event_id
        ) from error


def decode_unnamed(stored: StoredBytes, room_id: str) -> bytes:
    """Return the bytes of an event whose id is not known, without comparing the checksum.

    The caller finds the id in them, and decodes again with it. Raise `StorageCorrupt`.
    """
    data: Any = stored
    if data[:1] in _PLAIN:
        return data  # type: ignore[no-any-return]
    try:
        return _readers[data[:HEADER_BYTES]](data, None, room_id)
    except KeyError:
        raise _unknown(data, "") from None
    except (ZstdError, ValueError, IndexError) as error:
        raise StorageCorrupt(
            f"the stored bytes of an event cannot be decoded: {error}", room_id=room_id
        ) from error


def decode_recent(stored: StoredBytes, event_id: str, room_id: str) -> bytes:
    """Do the same for an event that is often read again: recent results are cached.

    A new event is sent to all members of its room. Use `decode` to read many events once.
    """
    data: Any = stored
    if data[:1] in _PLAIN:
        return data  # type: ignore[no-any-return]
    try:
        return _recent(stored, event_id, room_id)
    except _TooLongError as long:
        return long.raw


def remember(stored: StoredBytes, event_id: str, room_id: str, raw: bytes) -> None:
    """Cache the bytes of an event that was just encoded: `decode_recent` need not decode them."""
    if len(raw) <= CACHED_BYTES_MAX and not is_plain(stored):
        _remembered[stored] = raw
        _recent(stored, event_id, room_id)
        _remembered.pop(stored, None)  # it was cached before


class _TooLongError(Exception):
    """Carries bytes past the cache, which keeps no exceptions."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


@lru_cache(CACHE_ENTRIES)
def _recent(stored: StoredBytes, event_id: str, room_id: str) -> bytes:
    raw = _remembered.pop(stored, None) or decode(stored, event_id, room_id)
    if len(raw) > CACHED_BYTES_MAX:
        raise _TooLongError(raw)
    return raw


def is_long(stored: StoredBytes) -> bool:
    """Return whether the bytes of an event are longer than `LONG`, or damaged, without decoding.

    A frame says how long its data are. In the compact form these lack only what is short.
    """
    data: Any = stored
    try:
        if data[0] == _COMPACT[0]:
            return format_zstd.claims_more(data, format_compact.frame_at(data), LONG)
        if data[0] == _ZSTD[0]:
            return format_zstd.claims_more(data, format_zstd.BODY, LONG)
    except IndexError:  # so few bytes are left that they are no stored form
        return True
    return len(data) > LONG


def is_plain(stored: StoredBytes) -> bool:
    """Return whether these are the bytes themselves."""
    data: Any = stored
    return data[:1] in _PLAIN


def headers_of(dictionary: Dictionary) -> list[bytes]:
    """Return the first four bytes of all forms that use this dictionary."""
    return [_ZSTD + dictionary.key, _COMPACT + dictionary.key]


def unknown_headers(column: Iterable[Any]) -> set[bytes]:
    """Return the headers of a column that `decode` has no dictionary for, with those of plain text.

    A column has stored forms and None.
    """
    return {stored[:HEADER_BYTES] for stored in column if stored is not None}.difference(_readers)


def has_references(headers: Iterable[bytes]) -> bool:
    """Return whether some of these headers are those of references to the archive."""
    return any(header[:1] == _REFERENCE for header in headers)


def dictionaries_of(headers: Iterable[bytes]) -> set[int]:
    """Return the ids of the dictionaries that these headers name. One that is damaged has none."""
    return {int.from_bytes(header[1:]) for header in headers if header[:1] in (_ZSTD, _COMPACT)}


def _unknown(data: bytes, event_id: str) -> StorageCorrupt:
    if isinstance(data, LostBytes):
        reason = f"the bytes of an archived event are lost: {data.reason}"
        return StorageCorrupt(reason, event_id=event_id, pack=data.pack, url=data.url)
    if len(data) > HEADER_BYTES and data[:1] in (_ZSTD, _COMPACT):
        return MissingDictionary(
            "the dictionary of an event's bytes is not stored, or is damaged",
            event_id=event_id,
            dictionary_id=int.from_bytes(data[1:HEADER_BYTES]),
        )
    return StorageCorrupt("the stored bytes of an event have no known format", event_id=event_id)


register(shipped_dictionary())
