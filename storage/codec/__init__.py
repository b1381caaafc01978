"""Event bytes and their stored form, pure: formats, the dictionaries of zstd, packs of the archive.

No I/O, except that the shipped dictionary is read from the package.

Read in this order: codec, format_zstd, format_compact, dictionaries, training, reference, pack.
"""

from storage.codec.codec import (
    REFERENCE_BYTES,
    LostBytes,
    MissingDictionary,
    Reference,
    StoredBytes,
    decode,
    decode_recent,
    decode_unnamed,
    dictionaries_of,
    encode,
    has_references,
    headers_of,
    is_long,
    is_plain,
    plain,
    register,
    remember,
    unknown_headers,
)
from storage.codec.dictionaries import Dictionary, shipped_dictionary
from storage.codec.pack import train

__all__ = [
    "REFERENCE_BYTES",
    "Dictionary",
    "LostBytes",
    "MissingDictionary",
    "Reference",
    "StoredBytes",
    "decode",
    "decode_recent",
    "decode_unnamed",
    "dictionaries_of",
    "encode",
    "has_references",
    "headers_of",
    "is_long",
    "is_plain",
    "plain",
    "register",
    "remember",
    "shipped_dictionary",
    "train",
    "unknown_headers",
]
