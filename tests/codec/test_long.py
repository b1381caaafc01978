"""Whether the bytes of an event are long is read from their stored form."""

import pytest

from storage.codec import StoredBytes, encode, is_long, plain, shipped_dictionary
from storage.codec.codec import LONG
from storage.testing import RoomBuilder

ADMIN = "@a:s1.test"


@pytest.mark.parametrize("version", ["1", "11"], ids=["zstd", "compact"])
def test_a_long_event_is_known_by_its_frame(version: str) -> None:
    room = RoomBuilder(version, seed=1, sign=False)
    room.start(ADMIN)
    dictionary = shipped_dictionary()
    for size in (1, 200, 300, 1_000, LONG - 2_000, LONG + 2_000, 20_000, 60_000):
        event = room.message(ADMIN, "x" * size)
        stored = encode(event.pdu, event.event_id, room.room_id, dictionary)
        assert len(bytes(stored)) < 1_500  # type: ignore[call-overload]
        assert is_long(stored) == (len(event.pdu) > LONG), size
        assert is_long(plain(event.pdu)) == (len(event.pdu) > LONG)


@pytest.mark.parametrize("form", [b"\xc1", b"\xc2", b"\xc1abc1234", b"\xc2abc1234\x01\x01\x02"])
def test_damaged_bytes_are_long(form: bytes) -> None:
    assert is_long(StoredBytes(form))
