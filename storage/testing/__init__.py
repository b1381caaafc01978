"""Realistic signed rooms for tests, benchmarks and demonstrations: seeded, synthetic, the same bytes every time.

`RoomBuilder` writes a room by hand in a few lines; `stream_room` and `generate_room` make rooms of a `Shape`, from a
direct chat to a million events; `deliver_*` bring a built room to a store late, shuffled or with a gap.
All servers lie under ``.test`` and all users are numbers.
"""

from storage.testing.assembly import How, Reference
from storage.testing.builder import RoomBuilder
from storage.testing.keys import KEY_ID, signing_key, verify_key, verify_keys
from storage.testing.model import BuiltEvent, Expected, GeneratedEvent, GeneratedRoom, Origin, State, ndjson_line, write_ndjson

__all__ = [
    "KEY_ID",
    "BuiltEvent",
    "Expected",
    "GeneratedEvent",
    "GeneratedRoom",
    "How",
    "Origin",
    "Reference",
    "RoomBuilder",
    "State",
    "ndjson_line",
    "signing_key",
    "verify_key",
    "verify_keys",
    "write_ndjson",
]
