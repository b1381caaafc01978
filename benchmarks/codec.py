"""Stored forms of event bytes: bytes per event, and CPU time to encode and to decode one event.

    python -m benchmarks codec

Events of five kinds of rooms, with names of the usual length (`codec_events`). Each kind is
measured with the shipped dictionary, and with one that is trained on other rooms of the same kind.
The shipped one knows whole texts of these generated rooms, so it is often better here.
There is no database.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from benchmarks.codec_events import SHAPES_USED, RealEvent, real_shaped
from benchmarks.harness import Bench, show
from storage.codec import (
    Dictionary,
    StoredBytes,
    decode,
    encode,
    register,
    shipped_dictionary,
    train,
)
from storage.codec.format_zstd import decode as decode_zstd
from storage.codec.format_zstd import encode as encode_zstd

ROOMS: Final = 16
"""Training keeps words that occur in eight rooms."""
ROUNDS: Final = 5
AUTH_SEPARATORS: Final = b'","$'


async def run(bench: Bench) -> None:
    """Measure each kind of room."""
    count = bench.size(2_000, 200)
    for shape in SHAPES_USED:
        events = _rooms(shape, count, seed=9_000)
        texts = ((one.raw, one.room_id) for one in _rooms(shape, count, seed=100))
        trained = Dictionary(train(texts))
        bench.results[shape] = {
            "events": len(events),
            "raw bytes": _mean([len(one.raw) for one in events]),
            "ids of auth events, bytes": _mean([_auth_bytes(one.raw) for one in events]),
            "shipped": _measured(events, shipped_dictionary()),
            "trained": _measured(events, trained),
        }
    bench.write()
    show(
        "Stored forms (bytes per event; processor time of the best rounds, us)",
        ["", "dictionary", "raw", "zstd", "in", "out", "compact", "in", "out"],
        [
            [shape, name, f"{kind['raw bytes']:,}", *(f"{one:,}" for one in kind[name].values())]
            for shape, kind in bench.results.items()
            for name in ("shipped", "trained")
        ],
    )


def _rooms(shape: str, count: int, *, seed: int) -> list[RealEvent]:
    return [
        event
        for room in range(ROOMS)
        for event in real_shaped(shape, count // ROOMS, seed=seed + room)
    ]


def _measured(events: Sequence[RealEvent], dictionary: Dictionary) -> dict[str, Any]:
    """Measure both formats; the compact one falls back as it does in a store."""
    register(dictionary)
    frames = [encode_zstd(one.raw, one.event_id, dictionary) for one in events]
    stored = [encode(*one, dictionary) for one in events]
    assert _decoded(stored, events) == [event.raw for event in events]
    return {
        "zstd, bytes": _mean([len(one) for one in frames]),
        "zstd, in us": _us(
            lambda: [encode_zstd(one.raw, one.event_id, dictionary) for one in events]
        ),
        "zstd, out us": _us(
            lambda: [
                decode_zstd(dictionary, frame, one.event_id, one.room_id)
                for frame, one in zip(frames, events, strict=True)
            ]
        ),
        "compact, bytes": _mean([len(cast("bytes", one)) for one in stored]),
        "compact, in us": _us(lambda: [encode(*one, dictionary) for one in events]),
        "compact, out us": _us(lambda: _decoded(stored, events)),
    }


def _decoded(stored: Sequence[StoredBytes], events: Sequence[RealEvent]) -> list[bytes]:
    return [
        decode(one, event.event_id, event.room_id)
        for one, event in zip(stored, events, strict=True)
    ]


def _us(work: Callable[[], Sequence[object]]) -> float:
    """Return the processor time of one event in the best round."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        count = len(work())
        best = min(best, (time.process_time() - begun) / count)
    return round(best * 1e6, 1)


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 1)


def _auth_bytes(raw: bytes) -> int:
    """Return the bytes of the ids of auth events in the compact form."""
    listed = raw[: raw.index(b"]")]
    return 32 * (listed.count(AUTH_SEPARATORS) + (b'["$' in listed))
