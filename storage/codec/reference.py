r"""Format 0xA1: a reference to the stored form of an event, which is in a pack of the archive.

    1 byte     0xA1
    4 bytes    the number of the pack
    4 bytes    offset of the record in the pack
    3 bytes    length of the stored form

A single flipped bit turns 0xA1 into no other format. `storage.database.archived_bytes` replaces
references by what they refer to, before anybody decodes. `storage.codec.pack` has the records.

    Reference(7, 8, 270).to_bytes()  # a1 00000007 00000008 00010e
"""

import struct
from typing import Any, Final, NamedTuple, Self

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
        """Return the value that stands for the bytes."""
        lost = cls(reference.to_bytes())
        lost.reason, lost.pack, lost.url = reason, reference.pack, url
        return lost
