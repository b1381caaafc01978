"""Train a dictionary on events of a deployment.

A dictionary is stored for ever, as rows may refer to it, and no redaction reaches it. So it must
not have what people wrote. Of messages, names and topics it has single words that occur in several
rooms, in random order. The other letters are shuffled word by word, because their frequencies also
matter: they are the start of how zstd encodes single bytes.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from zstandard import train_dictionary

from storage.codec.format_compact import remaining_text

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
    given = list(events)
    common = common_words(given) if are_private else _NO_WORDS
    hidden = _hiding(common) if are_private else None
    texts: list[bytes | bytearray | memoryview[int]] = [
        _text(raw, room_id, is_whole=number % WHOLE_EACH == 0, hidden=hidden)
        for number, (raw, room_id) in enumerate(given)
    ]
    return train_dictionary(size, texts, level=TRAINING_LEVEL).as_bytes()


def common_words(events: Sequence[Sample]) -> frozenset[bytes]:
    """Return the words that occur in the texts of `COMMON_ROOMS` rooms."""
    rooms: dict[bytes, set[str]] = defaultdict(set)
    for raw, room_id in events:
        for text in _TEXTS.finditer(raw):
            for word in _WORDS.findall(text[2]):
                rooms[word].add(room_id)
    return frozenset(word for word, found in rooms.items() if len(found) >= COMMON_ROOMS)


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

    def hidden(found: re.Match[bytes]) -> bytes:
        words = _WORDS.findall(found[2])
        rng.shuffle(words)
        return found[1] + b" ".join(
            word if word in common else bytes(rng.sample(word, len(word))) for word in words
        )

    return hidden
