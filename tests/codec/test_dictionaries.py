import hashlib
import re

import pytest
import zstandard

from storage.codec import Dictionary, decode, encode, register, shipped_dictionary, train
from tests.codec.stored import length, room_events

SHIPPED_SHA256 = "4ca0ec71fb359db1fb90ad1cea4619c86880d04733ec3ff5d272c5edb90b2c53"


def test_the_shipped_dictionary_never_changes() -> None:
    """Rows of deployments name it: without its bytes they would be unreadable."""
    shipped = shipped_dictionary()
    assert hashlib.sha256(shipped.data).hexdigest() == SHIPPED_SHA256
    assert f"{shipped.id:06x}" == SHIPPED_SHA256[:6]


def test_the_shipped_dictionary_has_no_event_ids() -> None:
    """They never occur twice, and would take the place of text that does."""
    assert not re.search(rb"\$[A-Za-z0-9_-]{43}", shipped_dictionary().data)


def test_training_is_repeatable_and_helps() -> None:
    events = room_events("join_leave_storm", 600, "11")
    texts = [(raw, own.room_id) for raw, own in events]
    data = train(texts, size=4_096)
    assert data == train(texts, size=4_096)
    trained = Dictionary(data)
    after, before = [
        sum(length(encode(raw, *own, one)) for raw, own in events)
        for one in (trained, shipped_dictionary())
    ]
    assert after < before
    raw, own = events[-1]
    register(trained)
    assert decode(encode(raw, *own, trained), *own) == raw


def test_too_few_events_cannot_be_trained_on() -> None:
    with pytest.raises(zstandard.ZstdError):
        train((raw, own.room_id) for raw, own in room_events("small_chat", 3, "11"))


def test_bytes_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(zstandard.ZstdError):
        Dictionary(b"no dictionary")
