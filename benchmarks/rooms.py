"""Descriptions of rooms, by their number, and the children of a space.

Each room has everything that `store.rooms` returns. The space has each room as a child.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Trips, percentiles, show
from storage import Store
from storage.ids import RoomId
from storage.testing import RoomBuilder

ROOMS: Final = 1_000
QUICK_ROOMS: Final = 20
SERVER: Final = "s1.test"
CONTENTS: Final[dict[str, dict[str, Any]]] = {
    "m.room.topic": {"topic": "Food, and what grows. " * 5},
    "m.room.avatar": {"url": "mxc://s1.test/avatar"},
    "m.room.canonical_alias": {"alias": "#kitchen:s1.test"},
    "m.room.guest_access": {"guest_access": "can_join"},
    "m.room.encryption": {"algorithm": "m.megolm.v1.aes-sha2"},
}


async def run(bench: Bench) -> None:
    """Measure 1, 20 and all rooms, and the space."""
    trips, count = Trips(), bench.size(ROOMS, QUICK_ROOMS)
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, observer=trips) as store,
    ):
        trips.opened()
        ids = [await _room(store, seed) for seed in range(count)]
        space = await _space(store, ids)
        async with store.database.connection() as conn:
            await conn.execute("VACUUM ANALYZE")
        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            f"rooms, {size}": lambda size=size: store.rooms(ids[:size])  # type: ignore[misc]
            for size in sorted({1, 20, count})
        }
        calls[f"space_children, {count}"] = lambda: store.space_children(space)
        rounds = bench.size(50, 3)
        found = {name: await _timed(call, trips, rounds) for name, call in calls.items()}
    bench.results.update(rooms=count, calls=found)
    rows = [
        [name, one["ms"]["p50"], one["ms"]["p95"], one["statements"]] for name, one in found.items()
    ]
    show("Descriptions of rooms", ["call", "p50 ms", "p95 ms", "statements"], rows)
    bench.write()


async def _room(store: Store, seed: int) -> RoomId:
    room = RoomBuilder("11", seed=seed, sign=False)
    admin = room.user(1, SERVER)
    room.start(admin, name=f"room {seed}")
    for type_, content in CONTENTS.items():
        room.state_event(admin, type_, content)
    await store.append(room.pdus)
    return room.room_id


async def _space(store: Store, room_ids: list[RoomId]) -> RoomId:
    space = RoomBuilder("11", seed=len(room_ids), sign=False)
    admin = space.user(1, SERVER)
    space.start(admin, content={"type": "m.space"})
    for room_id in room_ids:
        space.state_event(admin, "m.space.child", {"via": [SERVER]}, room_id)
    await store.append(space.pdus)
    return space.room_id


async def _timed(call: Callable[[], Awaitable[Any]], trips: Trips, rounds: int) -> dict[str, Any]:
    await call()
    before, times = trips.count, []
    for _ in range(rounds):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return {
        "ms": percentiles(times, factor=1000),
        "statements": (trips.count - before) / rounds,
    }
