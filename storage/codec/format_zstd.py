"""Format 0xC1: a frame of zstd with a trained dictionary, after a checksum of the bytes.

    1 byte     0xC1
    3 bytes    the number of the dictionary
    4 bytes    CRC-32 of the event id and the decoded bytes
    the rest   the frame, without the magic number that all frames have in common

The checksum covers the decoded bytes, so that it also notices another dictionary. It starts with
the event id, so that the bytes of one event are never taken for those of another.
"""

from typing import Final
from zlib import crc32

from storage.codec.dictionaries import Dictionary

FORMAT: Final = b"\xc1"
HEADER_BYTES: Final = 4
CHECKSUM_BYTES: Final = 4
BODY: Final = HEADER_BYTES + CHECKSUM_BYTES
"""Where the body of a stored form begins."""
DECODED_MAX: Final = 1 << 21
"""No event is that long. A damaged frame must not allocate more."""

_SHORT: Final = frozenset((0x20, 0x60))
"""The first byte of frames that claim less than 66 kB: one segment, its length in 1 or 2 bytes."""
_LONG: Final = {0xA0: slice(1, 5), 0x80: slice(2, 6)}
"""Where others have their length. The compressor writes no other frames (RFC 8878, 3.1.1.1)."""


def encode(raw: bytes, event_id: str, dictionary: Dictionary) -> bytes:
    """Return the stored form."""
    return b"".join((FORMAT, dictionary.key, checksum(raw, event_id), dictionary.compress(raw)))


def decode(dictionary: Dictionary, stored: bytes, event_id: str | None, _room_id: str) -> bytes:
    """Return the bytes; raise ValueError or ZstdError if they are not those that were encoded.

    ``event_id`` None: they are not compared with their checksum.
    """
    raw = decompressed(stored[BODY:], dictionary)
    if event_id is not None and checksum(raw, event_id) != stored[HEADER_BYTES:BODY]:
        raise ValueError("the checksum of the bytes is wrong")
    return raw


def checksum(raw: bytes, event_id: str) -> bytes:
    return crc32(raw, crc32(event_id.encode())).to_bytes(CHECKSUM_BYTES, "little")


def claims_more(stored: bytes, at: int, length: int) -> bool:
    """Return whether the frame at ``at`` claims more data than that, or is none. `IndexError`."""
    first = stored[at]
    if first == 0x20:
        return stored[at + 1] > length
    # RFC 8878, 3.1.1.1.4
    return first != 0x60 or stored[at + 1] + 256 * stored[at + 2] + 256 > length


def decompressed(frame: bytes, dictionary: Dictionary) -> bytes:
    """Return the data of a frame; raise ValueError if it claims to be too long."""
    if frame[0] not in _SHORT:
        length = _LONG.get(frame[0])
        if length is None or int.from_bytes(frame[length], "little") > DECODED_MAX:
            raise ValueError("the length of the frame is wrong")
    return dictionary.decompress(frame)
