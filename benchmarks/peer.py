"""A comparison with Synapse: the same signed events, in turn on one Postgres, in two processes.

  python -m benchmarks peer [--quick] [--events N]

Synapse is used as published: its schema in a separate database, its defaults, its caches, and its
own entry points (benchmarks/peers/). On first use its environment is created in the user's cache
folder. benchmarks/peers/writes.py and reads.py describe the comparison, and what is not comparable.
The side that begins alternates between rounds; ratios are of the two halves of a round.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import asyncpg

import storage
from benchmarks.harness import Bench, note
from benchmarks.peers import limits, merges, reads, whole, writes, young
from benchmarks.peers.process import synapse

SERVER: Final = "s1.test"
ROUNDS: Final = 3


async def run(bench: Bench, *, alone: bool = False) -> None:
    """Measure everything; `alone`: without the peer, to check that this side works."""
    events = bench.events or bench.size(600, 60)
    async with both(bench, alone=alone) as sides:
        if sides.peer:
            bench.results["peer"] = await sides.peer.ask("versions")
        note("storing other rooms")
        await reads.store_others(sides, bench.size(reads.OTHERS, 5))
        for scenario in writes.scenarios(bench):
            note(scenario.name)
            bench.results.setdefault("writes", {})[scenario.name] = await writes.measure(
                sides, scenario, events, bench.size(ROUNDS, 2)
            )
            bench.write()
        for scenario in young.scenarios(bench):
            note(scenario.name)
            bench.results["writes"][scenario.name] = await young.measure(
                bench, sides.raw, scenario, bench.size(ROUNDS, 2), alone=alone
            )
            bench.write()
        if sides.peer:
            await _reads(bench, sides)


async def _reads(bench: Bench, sides: writes.Sides) -> None:
    """Measure whole rooms, bare statements on the same server, queries, a merge, and a storm last.

    The storm comes last because it is not read.
    """
    note("storing rooms to read")
    world = reads.build(bench)
    bench.results["disk"] = await reads.store(sides, world)
    bench.results["limits"] = await limits.measured(
        sides.raw,
        [pdu for room in (world.hall, *world.small) for pdu in room.pdus],
        bench.size(1_000, 200),
    )
    bench.write()
    rounds, told = bench.size(6, 3), bench.results.setdefault("reads", {})
    for name, prepare in reads.questions().items():
        note(name)
        told[name] = await reads.measure(sides, world, prepare, rounds)
        bench.write()
    told["storing an event that merges two branches"] = await merges.merges(
        sides, world, rounds // 2
    )
    bench.write()
    bench.results["disk"] |= await store_storm(bench, sides)
    bench.write()


async def store_storm(bench: Bench, sides: writes.Sides) -> dict[str, Any]:
    """Store joins and leaves of one room on both sides; return the disk usage."""
    note("a storm of joins and leaves")
    return {"joins and leaves": await whole.store(sides, [whole.storm(bench.size(3_000, 100))])}


@asynccontextmanager
async def both(bench: Bench, *, alone: bool = False) -> AsyncIterator[writes.Sides]:
    """Open both engines on separate databases, and a third database for bare statements."""
    async with AsyncExitStack() as stack:
        dsn, raw_dsn = [await stack.enter_async_context(bench.database()) for _ in range(2)]
        counts = writes.StatementCounts()
        store = await stack.enter_async_context(
            storage.open(dsn, server_name=SERVER, observer=counts)
        )
        counts.opened()
        peer = None if alone else await stack.enter_async_context(synapse(bench.server.dsn, SERVER))
        pool = await stack.enter_async_context(asyncpg.create_pool(raw_dsn, min_size=1, max_size=8))
        await pool.execute(limits.RAW_TABLE)
        looks = await writes.connect({"ours": dsn} | ({"synapse": peer.dsn} if peer else {}))
        for look in looks.values():
            stack.push_async_callback(look.close)
        yield writes.Sides(bench, store, counts, peer, pool, looks)
