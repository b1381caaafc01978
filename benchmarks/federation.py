"""Requests of other servers for a room of 5,000 members, on a large database and a tenth of it."""

from dataclasses import replace
from typing import Any, Final

from benchmarks.asking import (
    AskedEngine,
    Prepare,
    Question,
    ask_all,
    look_at,
    sides,
    throughput,
)
from benchmarks.harness import Bench
from benchmarks.messages import Places
from storage.ids import EventId
from storage.store.catalogue import QueryArguments

BACKFILLED: Final = 100
MISSED: Final = 20


async def run(bench: Bench) -> None:
    """Measure all requests."""
    async with sides(bench) as both:
        places = {side.name: await Places(side).walk() for side in both}
        states = {
            side.name: set((await side.store.current_state(places[side.name].room)).values())
            for side in both
        }
        rounds = bench.size(300, 10)
        asked = _questions(places, states, rounds)
        await ask_all(bench, both, asked)
        await _look(bench, both[0], places[both[0].name])
        bench.results["throughput"] = await _throughput(bench, both[0], places[both[0].name])


def _questions(
    places: dict[str, Places], states: dict[str, set[EventId]], rounds: int
) -> dict[str, tuple[Prepare, int]]:
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
        "backfill of 100": (backfill, rounds),
        "missing events, 20": (missing, rounds),
        "state ids": (state_ids, rounds // 4),
        "event auth": (event_auth, rounds),
        "auth chain of the state": (chain, rounds // 4),
        "the whole state before": (whole, rounds),
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
    await look_at(bench, side, given)


async def _throughput(bench: Bench, side: AskedEngine, places: Places) -> dict[str, Any]:
    async def once(number: int) -> object:
        start = places.events[number % (len(places.events) - BACKFILLED)]
        return await side.store.backfill(
            places.room, [start], BACKFILLED, server_name=places.server
        )

    return await throughput(once, bench.size(20, 2))
