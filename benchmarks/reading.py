"""Parse, hash and encode an event: the time of it all, and of the libraries in it, which are C.

    python -m benchmarks reading

The first row is what an append does with received bytes. The second calls only the libraries for
the same results, without a check: one read, two canonical encodings, two SHA-256, one compression.
A native step that does everything in one pass, in no time of its own, saves their difference at
most. There is no database.
"""

import time
from collections.abc import Callable
from hashlib import sha256
from typing import Final

import orjson

from benchmarks.codec_events import RealEvent, real_shaped
from benchmarks.harness import Bench, show, spread
from storage.codec import Dictionary, encode, register, shipped_dictionary
from storage.event import parse

SHAPES_READ: Final = ("small_chat", "big_room", "join_leave_storm")
VERSION: Final = "11"
ROUNDS: Final = 15

Work = Callable[[list[RealEvent], Dictionary], None]


async def run(bench: Bench) -> None:
    """Measure each kind of room, both ways in turns."""
    dictionary = shipped_dictionary()
    register(dictionary)
    for shape in SHAPES_READ:
        events = list(real_shaped(shape, bench.size(2_000, 200), seed=9_000))
        assert all(parse(one.raw, VERSION).event_id == one.event_id for one in events)
        whole, libraries = [], []
        for _ in range(bench.size(ROUNDS, 3)):
            whole.append(_us(_whole, events, dictionary))
            libraries.append(_us(_libraries, events, dictionary))
        bench.results[shape] = {"whole us": spread(whole), "libraries us": spread(libraries)}
    bench.write()
    show(
        "Parse, hash and encode an event (processor time, us, median)",
        ["", "as an append does", "the libraries alone", "a native step saves at most"],
        [
            [
                shape,
                one["whole us"]["median"],
                one["libraries us"]["median"],
                round(one["whole us"]["median"] - one["libraries us"]["median"], 1),
            ]
            for shape, one in bench.results.items()
        ],
    )


def _whole(events: list[RealEvent], dictionary: Dictionary) -> None:
    for one in events:
        event = parse(one.raw, VERSION)
        encode(event.raw, event.event_id, event.room_id, dictionary)


def _libraries(events: list[RealEvent], dictionary: Dictionary) -> None:
    for one in events:
        value = orjson.loads(one.raw)
        sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()
        sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()
        dictionary.compress(one.raw)


def _us(work: Work, events: list[RealEvent], dictionary: Dictionary) -> float:
    begun = time.process_time()
    work(events, dictionary)
    return (time.process_time() - begun) / len(events) * 1e6
