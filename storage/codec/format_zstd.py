"""Format 0xC1: a frame of zstd with a trained dictionary, after a checksum of the bytes.

    4 bytes    CRC-32 of the event id and the decoded bytes
    the rest   the frame, without the magic number that all frames have in common

The checksum covers the decoded bytes, so that it also notices another dictionary. It starts with
the event id, so that the bytes of one event are never taken for those of another.
"""

from typing import Final
from zlib import crc32

from zstandard import frame_content_size

from storage.codec.dictionaries import Dictionary

FORMAT: Final = 0xC1
MAGIC: Final = b"\x28\xb5\x2f\xfd"
CHECKSUM_BYTES: Final = 4
DECODED_MAX: Final = 1 << 21
"""No event is that long. A damaged frame must not allocate more."""


def encode(raw: bytes, event_id: str, dictionary: Dictionary) -> bytes:
    """Return the stored form."""
    return checksum(raw, event_id) + compressed(raw, dictionary)


def decode(stored: bytes, event_id: str, dictionary: Dictionary) -> bytes:
    """Return the bytes; raise ValueError or ZstdError if they are not those that were encoded."""
    raw = decompressed(stored[CHECKSUM_BYTES:], dictionary)
    if checksum(raw, event_id) != stored[:CHECKSUM_BYTES]:
        raise ValueError("the checksum of the bytes is wrong")
    return raw


def checksum(raw: bytes, event_id: str) -> bytes:
    """Return the checksum of the bytes of this event."""
    return crc32(raw, crc32(event_id.encode())).to_bytes(CHECKSUM_BYTES, "little")


def compressed(data: bytes, dictionary: Dictionary) -> bytes:
    """Return a frame without its magic number."""
    return dictionary.compress(data)[len(MAGIC) :]


def decompressed(frame: bytes, dictionary: Dictionary) -> bytes:
    """Return the data of a frame without its magic number."""
    whole = MAGIC + frame
    if not 0 <= frame_content_size(whole) <= DECODED_MAX:
        raise ValueError("the length of the frame is wrong")
    return dictionary.decompress(whole)
