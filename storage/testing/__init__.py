"""Realistic signed rooms for tests, benchmarks and demonstrations: seeded, with identical bytes.

`RoomBuilder` builds a room by hand in a few lines. `stream_room` and `generate_room` make rooms of
a `Shape`, from a direct chat to a million events. `deliver_*` deliver a built room to a store late,
shuffled or with a gap. All servers are under ``.test`` and all users are numbers.
"""

from storage.testing.assembly import (
    KEY_ID,
    EventOptions,
    Reference,
    signing_key,
    verify_key,
    verify_keys,
)
from storage.testing.builder import RoomBuilder
from storage.testing.delivery import deliver_late, deliver_shuffled, deliver_with_gap, respell
from storage.testing.generate import RoomStream, build_room, generate_room, stream_room
from storage.testing.model import (
    BuiltEvent,
    Expected,
    GeneratedEvent,
    GeneratedRoom,
    Origin,
    State,
    ndjson_line,
    write_ndjson,
)
from storage.testing.world import ODD_SOME, SHAPES, Odd, Shape

__all__ = [
    "KEY_ID",
    "ODD_SOME",
    "SHAPES",
    "BuiltEvent",
    "EventOptions",
    "Expected",
    "GeneratedEvent",
    "GeneratedRoom",
    "Odd",
    "Origin",
    "Reference",
    "RoomBuilder",
    "RoomStream",
    "Shape",
    "State",
    "build_room",
    "deliver_late",
    "deliver_shuffled",
    "deliver_with_gap",
    "generate_room",
    "ndjson_line",
    "respell",
    "signing_key",
    "stream_room",
    "verify_key",
    "verify_keys",
    "write_ndjson",
]
