"""Events with their columns, for the tests of this folder."""

from typing import Any, NamedTuple

from storage.codec import decode, encode, shipped_dictionary
from storage.event import parse
from storage.testing import SHAPES, generate_room
from tests.event.building import encoded, signed_pdu

DICTIONARY = shipped_dictionary()
FORMS = {0xC1: 1, 0xC2: 2}


class Own(NamedTuple):
    """The values that decoding needs besides the stored form."""

    event_id: str
    room_id: str


def columns_of(raw: bytes, version: str) -> Own:
    event = parse(raw, version)
    return Own(event.event_id, event.room_id)


def form_of(stored: Any) -> int:
    return FORMS.get(stored[0], 0)


def length(stored: Any) -> int:
    return len(stored)


def restored(raw: bytes, own: Own) -> int:
    """Encode, decode and compare; return 0 for plain bytes, 1 for zstd, 2 for the compact form."""
    stored = encode(raw, *own, DICTIONARY)
    assert decode(stored, *own) == raw
    return form_of(stored)


def room_events(shape: str, count: int, version: str) -> list[tuple[bytes, Own]]:
    """Signed events of a generated room."""
    room = generate_room(SHAPES[shape], count, seed=3, version=version)
    return [(event.pdu, columns_of(event.pdu, version)) for event in room.events]


def unusual(version: str = "11", **changes: Any) -> tuple[bytes, Own]:
    """A signed event in other bytes than canonical JSON."""
    raw = encoded(signed_pdu(version, **changes))
    return raw, columns_of(raw, version)
