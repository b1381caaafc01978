r"""The layout of a pack: the stored forms of many events in one file of the archive.

    8 bytes    RSPACK1\n
    records    each: CRC-32, 4 bytes, then the stored form
    index      JSON in zstd: [[room id, [[event id, offset, length], …]], …]
    4 bytes    the length of the index
    32 bytes   SHA-256 of the index and its length
    8 bytes    RSPACKE\n

The checksum of a record covers its reference, too: with a wrong reference, no record of the file
fits. A record is removed by zeros in its place, so the offsets of others never change. The index
keeps its entry, which has no content of the event.

A pack can be read without the database: the index has what decoding needs, but for dictionaries.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any, Final, NamedTuple
from zlib import crc32

import orjson
from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError, train_dictionary

from storage.codec.codec import LENGTH_MAX, Reference
from storage.codec.format_compact import remaining_text

START: Final = b"RSPACK1\n"
END: Final = b"RSPACKE\n"
CHECKSUM_BYTES: Final = 4
TRAILER_BYTES: Final = 4 + 32 + len(END)
INDEX_MAX: Final = 1 << 30
LEVEL: Final = 3


class PackEntry(NamedTuple):
    """A line of the index; the room id is needed to decode."""

    room_id: str
    event_id: str
    offset: int
    length: int

    def reference(self, pack: int) -> Reference:
        return Reference(pack, self.offset, self.length)


class PackBuilder:
    """The bytes of a pack, in memory."""

    def __init__(self, pack: int) -> None:
        self.pack = pack
        self.entries: list[PackEntry] = []
        self.size: int = len(START)
        self._parts = [START]

    def add(self, room_id: str, event_id: str, stored: Any) -> Reference:
        """Append a stored form; raise ValueError if it is too long for a reference."""
        if len(stored) > LENGTH_MAX:
            raise ValueError("the stored form of an event is too long for the archive")
        entry = PackEntry(room_id, event_id, self.size, len(stored))
        reference = entry.reference(self.pack)
        self._parts += (_checksum(reference, stored), stored)
        self.entries.append(entry)
        self.size += CHECKSUM_BYTES + len(stored)
        return reference

    def finished(self) -> bytes:
        """Return the whole file."""
        rooms = [
            [room_id, [list(entry[1:]) for entry in entries]]
            for room_id, entries in groupby(self.entries, key=lambda entry: entry.room_id)
        ]
        index = ZstdCompressor(level=LEVEL).compress(orjson.dumps(rooms))
        index += len(index).to_bytes(4)
        return b"".join((*self._parts, index, sha256(index).digest(), END))


def record_range(reference: Reference) -> tuple[int, int]:
    """Return where the record of a reference begins and ends."""
    return reference.offset, reference.offset + CHECKSUM_BYTES + reference.length


def stored_form(reference: Reference, record: bytes) -> bytes:
    """Return the stored form in a record; raise ValueError if the record is another one."""
    checksum, stored = record[:CHECKSUM_BYTES], record[CHECKSUM_BYTES:]
    if len(stored) != reference.length:
        raise ValueError("the pack is cut off")
    if checksum != _checksum(reference, stored):
        removed = not any(record)
        raise ValueError("the bytes were removed" if removed else "the checksum is wrong")
    return stored


def index_length(tail: bytes) -> int:
    """Return the length of the index by the end of a pack; raise ValueError if it is none."""
    if len(tail) < TRAILER_BYTES or tail[-len(END) :] != END:
        raise ValueError("the end of the pack is missing")
    length = int.from_bytes(tail[-TRAILER_BYTES:][:4])
    if length > INDEX_MAX:
        raise ValueError("the length of the index is wrong")
    return length


def parse_index(tail: bytes) -> list[PackEntry]:
    """Return the entries; ``tail`` is a pack from its index on. Raise ValueError for damage."""
    length = index_length(tail)
    tail = tail[-(length + TRAILER_BYTES) :]
    index, digest = tail[: length + 4], tail[length + 4 :][:32]
    if sha256(index).digest() != digest:
        raise ValueError("the checksum of the index is wrong")
    try:
        rooms = orjson.loads(ZstdDecompressor().decompress(index[:length]))
    except (ZstdError, orjson.JSONDecodeError) as error:
        raise ValueError(f"the index cannot be read: {error}") from error
    return list(_entries(rooms))


def damaged_entries(pack: int, data: bytes, entries: Iterable[PackEntry]) -> list[PackEntry]:
    """Return the entries whose record is damaged; one that was removed is not."""
    return [entry for entry in entries if not _is_sound(pack, data, entry)]


def _is_sound(pack: int, data: bytes, entry: PackEntry) -> bool:
    reference = entry.reference(pack)
    start, end = record_range(reference)
    record = data[start:end]
    return not any(record) or (
        len(record) == end - start and record[:CHECKSUM_BYTES] == _checksum(reference, record[4:])
    )


def _entries(rooms: Any) -> Iterator[PackEntry]:
    for room_id, events in rooms:
        for event_id, offset, length in events:
            yield PackEntry(room_id, event_id, offset, length)


def _checksum(reference: Reference, stored: bytes) -> bytes:
    return crc32(stored, crc32(reference.to_bytes())).to_bytes(CHECKSUM_BYTES)


# --------------------------------------------------------------------------------------------------
# Train a dictionary on events of a deployment.
#
# A dictionary is stored for ever, as rows may refer to it, and no redaction reaches it. So it must
# not have what people wrote. Of messages, names and topics it has single words that occur in
# several rooms, in random order. The other letters are shuffled word by word, because their
# frequencies also matter: they are the start of how zstd encodes single bytes.

DICTIONARY_BYTES: Final = 16_384
TRAINING_LEVEL: Final = 3
WHOLE_EACH: Final = 16
COMMON_ROOMS: Final = 8
"""A word stays if it occurs in so many rooms of the sample."""

Sample = tuple[bytes, str]
"""The bytes of an event, and its room id."""

_BASE64: Final = re.compile(rb"[A-Za-z0-9_+/-]{43,}")
_TEXTS: Final = re.compile(
    rb'("(?:body|displayname|filename|formatted_body|geo_uri|name|reason|topic)":")((?:[^"\\]|\\.)*)'
)
_WORDS: Final = re.compile(rb"[\w\x80-\xff]+")
_NO_WORDS: Final[frozenset[bytes]] = frozenset()


def train(
    events: Iterable[Sample], *, size: int = DICTIONARY_BYTES, are_private: bool = True
) -> bytes:
    """Return a dictionary for these events.

    The same events give the same dictionary. It is trained on what the compact format leaves to
    compress: without ids, hashes and signatures, which never occur twice. One event in `WHOLE_EACH`
    has all keys, for events that have no compact form. ``are_private`` False keeps the texts, which
    nobody wrote. Raise zstandard.ZstdError where the events are too few.
    """
    samples = list(events)
    common = common_words(samples) if are_private else _NO_WORDS
    hidden = _hiding(common) if are_private else None
    texts: list[bytes | bytearray | memoryview[int]] = [
        _text(raw, room_id, is_whole=number % WHOLE_EACH == 0, hidden=hidden)
        for number, (raw, room_id) in enumerate(samples)
    ]
    return train_dictionary(size, texts, level=TRAINING_LEVEL).as_bytes()


def common_words(events: Sequence[Sample]) -> frozenset[bytes]:
    """Return the words that occur in the texts of `COMMON_ROOMS` rooms."""
    rooms: dict[bytes, set[str]] = defaultdict(set)
    for raw, room_id in events:
        for text in _TEXTS.finditer(raw):
            for word in _WORDS.findall(text[2]):
                rooms[word].add(room_id)
    return frozenset(word for word, word_rooms in rooms.items() if len(word_rooms) >= COMMON_ROOMS)


def _text(
    raw: bytes,
    room_id: str,
    *,
    is_whole: bool,
    hidden: Callable[[re.Match[bytes]], bytes] | None,
) -> bytes:
    text = _BASE64.sub(b"", raw) if is_whole else remaining_text(raw, room_id)
    return text if hidden is None else _TEXTS.sub(hidden, text)


def _hiding(common: frozenset[bytes]) -> Callable[[re.Match[bytes]], bytes]:
    """Return what `_TEXTS` is replaced by: its words in random order, most of them shuffled."""
    rng = random.Random(1)  # noqa: S311  # no secret: nothing can be put in order again

    def hidden(matched: re.Match[bytes]) -> bytes:
        words = _WORDS.findall(matched[2])
        rng.shuffle(words)
        return matched[1] + b" ".join(
            word if word in common else bytes(rng.sample(word, len(word))) for word in words
        )

    return hidden
