"""Event bytes and their stored form, pure: formats and the dictionaries of zstd.

No I/O, except that the shipped dictionary is read from the package.

Read in this order: codec, format_zstd, format_compact, dictionaries, training.
"""

from storage.codec.codec import (
    MissingDictionary,
    StoredBytes,
    decode,
    decode_recent,
    encode,
    headers_of,
    is_plain,
    plain,
    register,
    remember,
    unknown_dictionaries,
)
from storage.codec.dictionaries import Dictionary, shipped_dictionary
from storage.codec.training import train

__all__ = [
    "Dictionary",
    "MissingDictionary",
    "StoredBytes",
    "decode",
    "decode_recent",
    "encode",
    "headers_of",
    "is_plain",
    "plain",
    "register",
    "remember",
    "shipped_dictionary",
    "train",
    "unknown_dictionaries",
]
