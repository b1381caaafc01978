"""Train a dictionary on events of a deployment."""

import re
from collections.abc import Iterable
from typing import Final

from zstandard import train_dictionary

from storage.codec.format_compact import remaining_text

DICTIONARY_BYTES: Final = 16_384
TRAINING_LEVEL: Final = 3
WHOLE_EACH: Final = 16

_BASE64: Final = re.compile(rb"[A-Za-z0-9_+/-]{43,}")


def train(events: Iterable[tuple[bytes, str]], *, size: int = DICTIONARY_BYTES) -> bytes:
    """Return a dictionary for these events, each as (bytes, room id).

    The same events give the same dictionary. It is trained on what the compact format leaves to
    compress: without ids, hashes and signatures, which never occur twice. One event in `WHOLE_EACH`
    has all keys, for events that have no compact form. Raise zstandard.ZstdError where the events
    are too few.
    """
    texts: list[bytes | bytearray | memoryview[int]] = [
        remaining_text(raw, room_id) if number % WHOLE_EACH else _BASE64.sub(b"", raw)
        for number, (raw, room_id) in enumerate(events)
    ]
    return train_dictionary(size, texts, level=TRAINING_LEVEL).as_bytes()
