"""Forks with old parents: the cost of the next append after 10, 100, 1,000, 10,000 of them.

Three ways leave forward extremities behind: messages on one old state, messages on every past state
of the room, and invites of new users, none of which supersedes the others. Up to 100, the same runs
without a limit of extremities.
"""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Trips, percentiles, show, spent
from storage import Store
from storage.testing import RoomBuilder

FORKS: Final = (10, 100, 1_000, 10_000)
UNLIMITED_MAX: Final = 100
# appends, one after another, up to each of those numbers; the others come in batches
TIMED: Final = 10
BATCH: Final = 100
MEMBERS: Final = 100
OLD_STATES: Final = 50

Forks = Callable[[RoomBuilder], Iterator[bytes]]


def one_state(room: RoomBuilder) -> Iterator[bytes]:
    """Yield messages with the same old parent."""
    root = room.events[-OLD_STATES]
    while True:
        yield room.at(root).message(room.user(2), f"fork {len(room.events)}").pdu


def old_states(room: RoomBuilder) -> Iterator[bytes]:
    """Yield messages on past states in turn."""
    roots = room.events[-OLD_STATES:-1]
    while True:
        for root in roots:
            yield room.at(root).message(room.user(2), f"fork {len(room.events)}").pdu


def invites(room: RoomBuilder) -> Iterator[bytes]:
    """Yield invites, each of another user."""
    root = room.events[-1]
    while True:
        yield room.at(root).invite(room.user(2), f"@guest{len(room.events)}:s9.test").pdu


WAYS: Final[dict[str, Forks]] = {
    "messages on one state": one_state,
    "messages on 49 states": old_states,
    "invites": invites,
}


async def run(bench: Bench) -> None:
    """Measure each way, with the limit and without."""
    most = bench.size(FORKS[-1], 100)
    for name, forks in WAYS.items():
        bench.results[name] = await _measure(
            bench, forks, most, limit=storage.Config().forward_extremities_max
        )
        bench.results[f"{name}, no limit"] = await _measure(
            bench, forks, min(most, UNLIMITED_MAX), limit=1_000_000_000
        )
    bench.write()
    _show(bench)


def _room() -> RoomBuilder:
    room = RoomBuilder("11", seed=1, sign=False, checked=False, exact=False)
    room.start(room.user(1), join_rule="public")
    for number in range(2, MEMBERS + 1):
        room.join(room.user(number))
    for number in range(OLD_STATES):
        room.topic(room.user(1), f"topic {number}")
    return room


async def _measure(bench: Bench, forks: Forks, most: int, *, limit: int) -> dict[str, Any]:
    room = _room()
    trips = Trips()
    config = storage.Config(forward_extremities_max=limit)
    told: dict[str, Any] = {}
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name="s1.test", config=config, observer=trips) as store,
    ):
        trips.opened()
        await _append(store, room.pdus)
        pdus = forks(room)
        done = 0
        for count in FORKS:
            if count > most:
                break
            while batch := list(islice(pdus, min(BATCH, count - TIMED - done))):
                await _append(store, batch)
                done += len(batch)
            told[str(count)] = await _timed(bench, store, trips, list(islice(pdus, TIMED)))
            told[str(count)]["extremities"] = len(await store.forward_extremities(room.room_id))
            done = count
    return told


async def _timed(bench: Bench, store: Store, trips: Trips, pdus: list[bytes]) -> dict[str, Any]:
    trips.count = 0
    latencies = []
    with spent(bench.server) as took:
        for pdu in pdus:
            start = time.perf_counter()
            await _append(store, [pdu])
            latencies.append(time.perf_counter() - start)
    return {
        "ms": percentiles(latencies, factor=1e3),
        "python_ms": round(took.python / len(pdus) * 1e3, 2),
        "postgres_ms": round(took.backends / len(pdus) * 1e3, 2),
        "statements": trips.count / len(pdus),
    }


async def _append(store: Store, pdus: list[bytes]) -> None:
    results = await store.append(pdus)
    if any(result.outcome != "stored" for result in results):
        raise RuntimeError(
            f"not stored: {[result for result in results if result.outcome != 'stored'][:3]}"
        )


def _show(bench: Bench) -> None:
    columns = [
        "forks",
        "after",
        "extremities",
        "p50 ms",
        "Python CPU ms",
        "Postgres CPU ms",
        "statements",
    ]
    rows = [
        [
            name,
            count,
            one["extremities"],
            one["ms"]["p50"],
            one["python_ms"],
            one["postgres_ms"],
            one["statements"],
        ]
        for name, told in bench.results.items()
        for count, one in told.items()
    ]
    show("one append after many forks", columns, rows)
