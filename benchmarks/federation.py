"""Requests of other servers for a room of 5,000 members, on a large database and a tenth of it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

from benchmarks.asking import (
    CLIENTS,
    AskedEngine,
    Question,
    in_turn,
    sides,
    table,
    throughput,
    touched,
)
from benchmarks.harness import Bench, show
from benchmarks.messages import Places
from storage.ids import EventId
from storage.store.catalogue import QueryArguments

BACKFILLED: Final = 100
MISSED: Final = 20
TARGETS: Final = {
    "backfill of 100": 4.0,
    "missing events, 20": 1.5,
    "state ids": 15.0,
    "auth chain of the state": 8.0,
}

Prepare = Callable[[AskedEngine, int], Awaitable[Question]]


async def run(bench: Bench) -> None:
    """Measure all requests."""
    async with sides(bench) as both:
        places = {side.name: await Places(side).walk() for side in both}
        states = {
            side.name: set((await side.store.current_state(places[side.name].room)).values())
            for side in both
        }
        rounds = bench.size(300, 10)
        asked = _questions(places, states)
        for name, prepare in asked.items():
            large = name in {"state ids", "auth chain of the state"}
            bench.results[name] = await in_turn(
                both, prepare, max(rounds // 4 if large else rounds, 5)
            )
        await _look(bench, both[0], places[both[0].name])
        bench.results["throughput"] = await _throughput(bench, both[0], places[both[0].name])
        bench.write()
        table("federation", both, {name: bench.results[name] for name in asked}, TARGETS)
    told = bench.results["throughput"]
    rows = [["backfill of 100", told["per_second"], told["ms"]["p50"], told["ms"]["p99"]]]
    show(f"{CLIENTS} clients", ["", "per second", "p50 ms", "p99"], rows)


def _questions(places: dict[str, Places], states: dict[str, set[EventId]]) -> dict[str, Prepare]:
    def event(side: AskedEngine, number: int) -> EventId:
        found = places[side.name].events
        return found[(number * 37) % (len(found) - BACKFILLED)]

    async def backfill(side: AskedEngine, number: int) -> Question:
        at, start = places[side.name], event(side, number)
        return lambda: side.store.backfill(at.room, [start], BACKFILLED, server_name=at.server)

    async def missing(side: AskedEngine, number: int) -> Question:
        at, latest = places[side.name], event(side, number)
        return lambda: side.store.missing_events(
            at.room, [], [latest], limit=MISSED, server_name=at.server
        )

    async def state_ids(side: AskedEngine, number: int) -> Question:
        return lambda: side.store.state_ids(event(side, number))

    async def event_auth(side: AskedEngine, number: int) -> Question:
        return lambda: side.store.event_auth(event(side, number))

    async def chain(side: AskedEngine, _number: int) -> Question:  # the same in every round
        return lambda: side.store.auth_chain_ids(states[side.name])

    async def whole(side: AskedEngine, number: int) -> Question:
        return lambda: side.store.state_before(event(side, number))

    return {
        "backfill of 100": backfill,
        "missing events, 20": missing,
        "state ids": state_ids,
        "event auth": event_auth,
        "auth chain of the state": chain,
        "the whole state before": whole,
    }


async def _look(bench: Bench, side: AskedEngine, places: Places) -> None:
    mine = QueryArguments(
        room=places.room,
        event=places.events[0],
        server=places.server,
    )
    given = {
        "backfill of 100": ("backfill", replace(mine, limit=BACKFILLED)),
        "missing events, 20": ("missing-events", replace(mine, limit=MISSED)),
        "state ids": ("state-ids", mine),
        "event auth": ("event-auth", mine),
        "the whole state before": ("state-at", mine),
    }
    for name, (question, told) in given.items():
        bench.results[name]["looked_at"] = touched(await side.plans(question, told))


async def _throughput(bench: Bench, side: AskedEngine, places: Places) -> dict[str, Any]:
    async def once(number: int) -> object:
        start = places.events[number % (len(places.events) - BACKFILLED)]
        return await side.store.backfill(
            places.room, [start], BACKFILLED, server_name=places.server
        )

    return await throughput(once, bench.size(20, 2))
