"""A damaged row is `StorageCorrupt` with the event id, never other bytes."""

import random
from typing import Any

import pytest

from storage.codec import (
    Dictionary,
    MissingDictionary,
    codec,
    decode,
    decode_recent,
    encode,
    register,
    remember,
    train,
)
from storage.errors import StorageCorrupt
from tests.codec.stored import DICTIONARY, Own, form_of, room_events, unusual

EVENTS = room_events("small_chat", 40, "11")
OTHER = Dictionary(
    train(((raw, own.room_id) for raw, own in room_events("small_chat", 400, "11")), size=4_096)
)
Case = tuple[bytes, Own, Any]


def cases() -> list[Case]:
    """One event in the compact form, one compressed whole."""
    chosen = [EVENTS[-1], unusual(content={"body": "hello " * 9})]
    found = [(raw, own, encode(raw, *own, DICTIONARY)) for raw, own in chosen]
    assert [form_of(stored) for *_, stored in found] == [2, 1]
    return found


both = pytest.mark.parametrize("case", cases(), ids=["compact", "zstd"])


def fails(stored: Any, own: Own, raw: bytes) -> bool:
    """Whether decoding fails as it has to; other bytes fail the test."""
    try:
        decoded = decode(stored, *own)
    except StorageCorrupt as error:
        return error.ids["event_id"] == own.event_id
    assert decoded == raw
    return False


@both
def test_every_flipped_bit_is_noticed(case: Case) -> None:
    raw, own, stored = case
    noticed = 0
    for bit in range(8 * len(stored)):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        noticed += fails(bytes(damaged), own, raw)
    # zstd has bits without a meaning: such a flip changes nothing
    assert noticed >= 8 * len(stored) - 8


@both
def test_a_shorter_or_longer_row_is_noticed(case: Case) -> None:
    raw, own, stored = case
    for length in range(len(stored)):
        assert fails(stored[:length], own, raw)
    assert fails(stored + b"\0", own, raw)


@both
def test_another_dictionary_is_noticed(case: Case) -> None:
    raw, own, stored = case
    register(OTHER)
    assert fails(stored[:1] + OTHER.key + stored[4:], own, raw)


def test_the_columns_of_another_row_are_noticed() -> None:
    raw, own, stored = cases()[0]
    assert fails(stored, own._replace(event_id="$" + "x" * 43), raw)
    assert fails(stored, own._replace(room_id="!other:s1.test"), raw)


@both
def test_a_dictionary_that_is_not_loaded_is_named(case: Case) -> None:
    _, own, stored = case
    with pytest.raises(MissingDictionary) as caught:
        decode(stored[:1] + b"\0\1\2" + stored[4:], *own)
    assert caught.value.ids == {"event_id": own.event_id, "dictionary_id": 0x102}


@pytest.mark.parametrize("length", [1 << 22, 1 << 62])
def test_a_frame_that_claims_to_be_huge_allocates_nothing(length: int) -> None:
    _, own, stored = cases()[1]
    frame = b"\xe0" + length.to_bytes(8, "little")  # a single segment, its length in 8 bytes
    assert fails(stored[:8] + frame + b"\1\0\0", own, b"")


def test_random_bytes_are_noticed() -> None:
    rng = random.Random(4)
    raw, own, stored = cases()[0]
    for _ in range(2_000):
        assert fails(stored[:4] + rng.randbytes(rng.randrange(200)), own, raw)


def test_recent_results_are_cached_and_damage_is_not() -> None:
    raw, own, stored = cases()[0]
    codec._recent.cache_clear()
    assert [decode_recent(stored, *own) for _ in range(3)] == [raw] * 3
    assert codec._recent.cache_info().hits == 2
    for damaged in (stored[:-1], stored[:30] + b"x" + stored[31:]):
        for _ in range(2):
            with pytest.raises(StorageCorrupt):
                decode_recent(damaged, *own)
    with pytest.raises(StorageCorrupt):
        decode_recent(stored, "$" + "x" * 43, own.room_id)
    with pytest.raises(StorageCorrupt):
        decode_recent(stored, own.event_id, "!other:s1.test")
    assert codec._recent.cache_info().currsize == 1


def test_long_events_are_not_cached() -> None:
    codec._recent.cache_clear()
    raw, own = unusual(content={"body": "a" * codec.CACHED_BYTES_MAX})
    stored: Any = encode(raw, *own, DICTIONARY)
    assert len(stored) < codec.CACHED_BYTES_MAX / 4
    assert decode_recent(stored, *own) == raw
    assert codec._recent.cache_info().currsize == 0


def test_what_was_just_encoded_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, own, stored = cases()[0]
    codec._recent.cache_clear()
    for _ in range(2):
        remember(stored, *own, raw)
    assert codec._remembered == {}
    long, long_own = unusual(content={"body": "a" * codec.CACHED_BYTES_MAX})
    remember(encode(long, *long_own, DICTIONARY), *long_own, long)
    assert codec._recent.cache_info().currsize == 1
    monkeypatch.setattr(codec, "decode", None)
    assert decode_recent(stored, *own) is raw
