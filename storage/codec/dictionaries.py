"""Dictionaries of zstd: bytes that events have in common, which the compressor refers to.

A dictionary is immutable, and its id comes from its bytes. The shipped one was trained on generated
events of common types, for the days before a deployment trains its own. It never changes: rows name
it by its digest, so a better one gets another file.
"""

import threading
from binascii import a2b_base64
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from zstandard import (
    DICT_TYPE_FULLDICT,
    FORMAT_ZSTD1_MAGICLESS,
    ZstdCompressionDict,
    ZstdCompressionParameters,
    ZstdCompressor,
    ZstdDecompressor,
)

LEVEL: Final = 2
KEY_BYTES: Final = 3
SHIPPED_FILE: Final = Path(__file__).with_name("first_dictionary.b64")


class _Contexts(threading.local):
    """A compressor and a decompressor per thread: a context serves one call at a time."""

    def __init__(self, dictionary: ZstdCompressionDict, level: int) -> None:
        parameters = ZstdCompressionParameters.from_level(
            level, format=FORMAT_ZSTD1_MAGICLESS, write_checksum=False, write_dict_id=False
        )
        self.compress = ZstdCompressor(compression_params=parameters, dict_data=dictionary).compress
        self.decompress = ZstdDecompressor(
            dict_data=dictionary, format=FORMAT_ZSTD1_MAGICLESS
        ).decompress


class Dictionary:
    """A dictionary, digested once for all events that use it."""

    __slots__ = ("_contexts", "data", "key")

    def __init__(self, data: bytes, *, level: int = LEVEL) -> None:
        """Digest the dictionary; raise zstandard.ZstdError if the bytes are none."""
        self.data: bytes = data
        self.key: bytes = sha256(data).digest()[:KEY_BYTES]
        digested = ZstdCompressionDict(data, dict_type=DICT_TYPE_FULLDICT)
        digested.precompute_compress(level=level)
        self._contexts = _Contexts(digested, level)

    @property
    def id(self) -> int:
        """Return the number that stored forms name the dictionary by."""
        return int.from_bytes(self.key)

    def compress(self, data: bytes) -> bytes:
        """Return a frame of zstd without magic number, checksum and the dictionary's id."""
        return self._contexts.compress(data)

    def decompress(self, frame: bytes) -> bytes:
        """Return what `compress` got; raise zstandard.ZstdError if the frame is damaged."""
        # by position, which takes a third less time: no limit of the size, one frame, nothing more
        return self._contexts.decompress(frame, 0, False, False)


@cache
def shipped_dictionary() -> Dictionary:
    """Return the dictionary of the first day."""
    return Dictionary(a2b_base64(SHIPPED_FILE.read_bytes()))
