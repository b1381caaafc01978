"""The caches of a writer: their bytes for each room, and the time of a full garbage collection.

Small rooms of 12 events, two thirds of them state, are appended one after the other, and no row of
theirs is dropped. The first rooms fill the caches that do not grow with rooms (state groups, bytes
of events), and are not counted.
"""

import gc
import time
from statistics import median
from typing import Final

import psutil

import storage
from benchmarks.harness import Bench
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
STATE_EVENTS: Final = 8
EVENTS: Final = 12  # of each room
COLLECTIONS: Final = 7
CACHE_MB: Final = 2_400  # for the events of all these rooms


async def run(bench: Bench) -> None:
    """Append rooms, and compare the process before and after."""
    first, counted = bench.size(1_000, 50), bench.size(9_000, 100)
    config = storage.Config(cache_mb=CACHE_MB)
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, config=config) as store,
    ):
        await _append(store, range(first))
        before = _measured()
        await _append(store, range(first, first + counted))
        after = _measured()
    bench.results["small rooms"] = {
        "rooms": counted,
        "kb_per_room": round((after["bytes"] - before["bytes"]) / counted / 1_000, 1),
        "objects_per_room": round((after["objects"] - before["objects"]) / counted, 1),
        "full_collection_ms": round(after["collection_ms"], 1),
        "full_collection_before_ms": round(before["collection_ms"], 1),
    }


async def _append(store: storage.Store, seeds: range) -> None:
    for seed in seeds:
        await store.append(_room(seed))


def _room(seed: int) -> list[bytes]:
    room = RoomBuilder("11", seed=seed, servers=["s1.test", "s2.test"])
    admin = room.user(1)
    room.start(admin)
    user = 2
    while len(room.events) < STATE_EVENTS:
        room.join(room.user(user))
        user += 1
    for at in range(EVENTS - len(room.events)):
        room.message(admin, f"message {at}")
    return room.pdus


def _measured() -> dict[str, float]:
    """Return the memory of the process, its objects, and how long a full collection takes."""
    gc.collect()
    took = []
    for _ in range(COLLECTIONS):
        start = time.process_time()
        gc.collect()
        took.append((time.process_time() - start) * 1_000)
    return {
        "bytes": psutil.Process().memory_info().rss,
        "objects": len(gc.get_objects()),
        "collection_ms": median(took),
    }
