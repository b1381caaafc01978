"""Storing events: one at a time, in batches, in one room and in many, in turn and concurrently.

Events are live ones of small chats, generated and signed before; signatures are not checked here.
The limit is a bare durable insert of the same bytes, on the same server, with as many clients.
"""

import asyncio
import gc
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import asyncpg

import storage
from benchmarks.harness import Bench, Spent, Trips, append_timed, percentiles, spent, spread
from benchmarks.peers import limits
from storage.testing import SHAPES, generate_room

BASE_EVENTS: Final = 60  # per room, stored before the measurement: creation and first members
SEED: Final = 7_000


@dataclass(frozen=True, slots=True)
class AppendScenario:
    """Clients that append batches, each after its last result; batches take rooms in turn."""

    name: str
    rooms: int
    batch: int
    clients: int
    events: int
    """Per round."""


SCENARIOS: Final = (
    AppendScenario("one room, 1", 1, 1, 1, 500),
    AppendScenario("one room, 10", 1, 10, 1, 2_000),
    AppendScenario("one room, 100", 1, 100, 1, 5_000),
    AppendScenario("50 rooms, 1", 50, 1, 1, 500),
    AppendScenario("50 rooms, 10", 50, 10, 1, 2_000),
    AppendScenario("50 rooms, 100", 50, 100, 1, 5_000),
    AppendScenario("8 rooms at once, 1", 8, 1, 8, 2_400),
    AppendScenario("50 rooms at once, 1", 50, 1, 50, 5_000),
)

Batch = list[bytes]


class AppendRound(NamedTuple):
    """One round: its cost, and the latencies of its batches in seconds."""

    events: int
    batches: int
    spent: Spent
    latencies: list[float]
    trips: int
    wal_bytes: int
    limit: float
    """Events per second of the bare insert."""


async def run(bench: Bench) -> None:
    for scenario in SCENARIOS:
        rounds = bench.size(5, 2)
        events = (
            scenario.events
            if not bench.quick
            else max(scenario.events // 25, scenario.batch * scenario.clients * 2)
        )
        base, clients = _input(scenario, rounds * events)
        if bench.profile:
            await _profile(bench, scenario, base, clients)
            continue
        bench.results[scenario.name] = _told(scenario, await _measure(bench, base, clients, rounds))


def _input(scenario: AppendScenario, events: int) -> tuple[list[Batch], list[list[Batch]]]:
    """Return the events stored before, and the batches of each client."""
    each = -(-events // scenario.rooms)
    rooms = [
        generate_room(SHAPES["small_chat"], BASE_EVENTS + each, seed=SEED + number).pdus
        for number in range(scenario.rooms)
    ]
    base = [room[:BASE_EVENTS] for room in rooms]
    rest = [room[BASE_EVENTS:] for room in rooms]
    clients = []
    for client in range(scenario.clients):
        in_turn = [
            pdu for row in zip(*rest[client :: scenario.clients], strict=True) for pdu in row
        ]
        clients.append(
            [in_turn[at : at + scenario.batch] for at in range(0, len(in_turn), scenario.batch)]
        )
    return base, clients


async def _measure(
    bench: Bench, base: list[Batch], clients: list[list[Batch]], rounds: int
) -> list[AppendRound]:
    """Alternate rounds of the store and of the limit, so that other load affects both."""
    trips = Trips()
    async with (
        bench.database() as dsn,
        bench.database() as raw_dsn,
        storage.open(dsn, server_name="s1.test", observer=trips) as store,
        asyncpg.create_pool(raw_dsn, min_size=len(clients), max_size=len(clients)) as pool,
    ):
        trips.opened()
        await pool.execute(limits.RAW_TABLE)
        for batch in base:
            await store.append(batch)
        gc.collect()
        gc.freeze()  # the collector then handles only the store's objects
        measured = []
        for number in range(rounds):
            parts = [_share(batches, number, rounds) for batches in clients]
            measured.append(
                await _round(bench, store, trips, parts, await limits.bare_inserts(pool, parts))
            )
        gc.unfreeze()
        return measured


async def _round(
    bench: Bench, store: storage.Store, trips: Trips, parts: list[list[Batch]], limit: float
) -> AppendRound:
    wal = await _wal(store)
    latencies: list[float] = []
    trips.count = 0
    with spent(bench.server) as took:
        await asyncio.gather(*(append_timed(store, batches, latencies) for batches in parts))
    count = trips.count
    events = sum(len(batch) for batches in parts for batch in batches)
    return AppendRound(
        events, len(latencies), took, latencies, count, await _wal(store) - wal, limit
    )


def _share(batches: list[Batch], number: int, rounds: int) -> list[Batch]:
    size = len(batches) // rounds
    return batches[number * size : (number + 1) * size]


async def _wal(store: storage.Store) -> int:
    async with store.database.connection() as conn:
        return int(await conn.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


async def _profile(
    bench: Bench, scenario: AppendScenario, base: list[Batch], clients: list[list[Batch]]
) -> None:
    async with bench.database() as dsn, storage.open(dsn, server_name="s1.test") as store:
        for batch in base:
            await store.append(batch)
        events = sum(len(batch) for batches in clients for batch in batches)
        with bench.profiled(scenario.name, events):
            await asyncio.gather(*(append_timed(store, batches, []) for batches in clients))


def _told(scenario: AppendScenario, rounds: list[AppendRound]) -> dict[str, Any]:
    rates = [one.events / one.spent.clock for one in rounds]
    events, batches = sum(one.events for one in rounds), sum(one.batches for one in rounds)

    def per_event(part: str) -> dict[str, float]:
        return spread([getattr(one.spent, part) / one.events * 1e6 for one in rounds])

    return asdict(scenario) | {
        "rounds": len(rounds),
        "events_per_second": spread(rates),
        "batch_ms": percentiles(
            [latency for one in rounds for latency in one.latencies], factor=1_000
        ),
        "python_us_per_event": per_event("python"),
        "postgres_us_per_event": per_event("backends"),
        "postgres_background_us_per_event": per_event("background"),
        "round_trips_per_batch": round(sum(one.trips for one in rounds) / batches, 2),
        "wal_bytes_per_event": round(sum(one.wal_bytes for one in rounds) / events),
        "limit_events_per_second": spread([one.limit for one in rounds]),
        "limit_ratio": spread(
            [one.limit / rate for one, rate in zip(rounds, rates, strict=True)], digits=2
        ),
    }
