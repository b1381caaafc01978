"""`send` of a local user, against `append` of an event that is ready: signed before, off the clock.

Each round has one event of each way, in turns, each in a room of its own with the same members.
`send` builds, signs and authorises its event. With a transaction it also stores the request. Last
come repeated requests that the process does not know: of a device that is new to it, as after a
restart, and of one that has sent others to it, while another process got these.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Trips, percentiles
from storage import Store
from storage.ids import RoomId
from storage.persist import AppendResult
from storage.testing import RoomBuilder, signing_key

SERVER: Final = "s1.test"
MEMBERS: Final = 50
WARM: Final = 100  # rounds before the measurement
TEXT: Final = {"msgtype": "m.text", "body": "a message of the usual length, as people write them"}

Way = Callable[[int], Awaitable[AppendResult]]


async def run(bench: Bench) -> None:
    """Measure all ways in turns."""
    rounds = bench.size(3_000, 50)
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(
            dsn, server_name=SERVER, signing_key=signing_key(SERVER), observer=trips
        ) as store,
    ):
        trips.opened()
        ways = await _ways(store, rounds + WARM)
        for number in range(WARM):
            for way in ways.values():
                await way(number)
        measured = await _measured(trips, ways, rounds)
        for name, knows in (("after a restart", False), ("at another process", True)):
            one = await _repeated(bench, store, trips, knows_device=knows)
            measured[f"repeated request {name}"] = one
    append = measured["append of a ready event"]["ms"]["p50"]
    for one in measured.values():
        one["ratio to append"] = round(one["ms"]["p50"] / append, 2)
    bench.results = measured


async def _ways(store: Store, count: int) -> dict[str, Way]:
    """Return each way, with a room of its own."""
    ready = _room(1)
    start = len(ready.pdus)
    for _ in range(count):
        ready.message(ready.user(1), TEXT["body"])
    pdus = ready.pdus
    rooms = [_room(seed) for seed in (2, 3)]
    for room in (pdus[:start], *(one.pdus for one in rooms)):
        await store.append(room)
    sender = rooms[0].user(1)

    async def append(number: int) -> AppendResult:
        [result] = await store.append([pdus[start + number]])
        return result

    async def send(_: int) -> AppendResult:
        return await store.send(rooms[0].room_id, sender, "m.room.message", TEXT)

    async def send_once(number: int) -> AppendResult:
        return await _send_once(store, rooms[1].room_id, sender, number)

    return {
        "append of a ready event": append,
        "send": send,
        "send with a transaction": send_once,
    }


def _room(seed: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, servers=(SERVER,))
    room.start(room.user(1), join_rule="public")
    for number in range(2, MEMBERS + 1):
        room.join(room.user(number))
    return room


async def _send_once(store: Store, room_id: RoomId, sender: str, number: int) -> AppendResult:
    transaction = "DEVICE", f"m{number}"
    return await store.send(room_id, sender, "m.room.message", TEXT, transaction=transaction)


async def _measured(trips: Trips, ways: dict[str, Way], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    python = dict.fromkeys(ways, 0.0)
    statements = dict.fromkeys(ways, 0)
    for number in range(WARM, WARM + rounds):
        for name, way in ways.items():
            before, start, busy = trips.count, time.perf_counter(), time.process_time()
            result = await way(number)
            seconds[name].append(time.perf_counter() - start)
            python[name] += time.process_time() - busy
            statements[name] += trips.count - before
            if result.outcome != "stored":
                raise RuntimeError(f"{name}: {result}")
    return {
        name: {
            "ms": percentiles(seconds[name], factor=1e3),
            "python_ms": round(python[name] / rounds * 1e3, 3),
            "statements": round(statements[name] / rounds, 2),
        }
        for name in ways
    }


async def _repeated(
    bench: Bench, store: Store, trips: Trips, *, knows_device: bool
) -> dict[str, Any]:
    """Measure requests that are stored, while the caches of the process do not have them."""
    sender = "@again:" + SERVER
    room_id = await store.create_room(sender)
    count = bench.size(1_000, 20)
    for number in range(count):
        await _send_once(store, room_id, sender, number)
    caches = store.writer.caches
    caches.transactions.clear()
    if not knows_device:
        caches.devices.clear()
    seconds = []
    trips.count = 0
    busy = time.process_time()
    for number in range(count):
        start = time.perf_counter()
        result = await _send_once(store, room_id, sender, number)
        seconds.append(time.perf_counter() - start)
        if result.outcome != "duplicate":
            raise RuntimeError(str(result))
    return {
        "ms": percentiles(seconds, factor=1e3),
        "python_ms": round((time.process_time() - busy) / count * 1e3, 3),
        "statements": round(trips.count / count, 2),
    }
