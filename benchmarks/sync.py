"""/sync on a large database and on one a tenth of it: with 10 changed rooms, with nothing new, from the beginning.

Growth with the user's rooms: users with 10, 1,000 and all rooms. With members: the changed rooms have ten members, or are the largest. With
events: the two databases. Before each sync a hundred rooms get a message each, where the user has not all of them; the user's ten come last.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
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
from benchmarks.crowd import EVERYWHERE, FEW, HUNDRED, MANY, MEMBERS_MIN
from benchmarks.harness import Bench, show
from storage.queries.catalogue import QueryArguments

CHANGED: Final = 10
OTHERS: Final = 90
TARGETS: Final = {
    "1,000 rooms, 10 changed": 3.0,
    "nothing new": 0.3,
    "initial, 100 rooms, 20 events each": 40.0,
}

Prepare = Callable[[AskedEngine, int], Awaitable[Question]]


async def run(bench: Bench) -> None:
    """All of it."""
    async with sides(bench) as both:
        rounds = bench.size(300, 10)
        asked: dict[str, tuple[Prepare, int]] = {
            "1,000 rooms, 10 changed": (_changed(MANY, small=True), rounds),
            "1,000 rooms, 10 changed, the largest": (_changed(MANY, small=False), rounds),
            "10 rooms, all changed": (_changed(FEW, small=False), rounds // 3),
            "all rooms, 10 changed": (_changed(EVERYWHERE, small=True), rounds // 6),
            "nothing new": (_nothing({}), rounds),
            "nothing new, others have": (_nothing_of_theirs, rounds),
            "initial, 100 rooms, 20 events each": (_initial(HUNDRED, None), rounds // 6),
            "initial, 20 of 1,000 rooms, 20 events each": (_initial(MANY, 20), rounds // 6),
        }
        for name, (prepare, times) in asked.items():
            bench.results[name] = await in_turn(both, prepare, max(times, 5))
        await _look(bench, both[0])
        bench.results["throughput"] = await _throughput(bench, both[0])
        bench.write()
        table("sync", both, {name: bench.results[name] for name in asked}, TARGETS)
    told = bench.results["throughput"]
    show(
        f"{CLIENTS} clients",
        ["", "per second", "p50 ms", "p99"],
        [[n, o["per_second"], o["ms"]["p50"], o["ms"]["p99"]] for n, o in told.items()],
    )


async def _token(side: AskedEngine, user: str) -> str:
    """Where a client is that has seen everything."""
    return (await side.store.sync(user, rooms_limit=1, timeline_limit=1)).next_batch


def _rooms(side: AskedEngine, user: str, number: int, *, small: bool) -> Sequence[int]:
    """Ten of the user's rooms, others each round; the largest ones, or ones of ten members."""
    rooms = side.crowd.rooms_of(user)
    if small:
        rooms = [room for room in rooms if side.crowd.size(room) == MEMBERS_MIN]
        return random.Random(number).sample(rooms, min(CHANGED, len(rooms)))
    return rooms[:CHANGED]


def _changed(user: str, *, small: bool) -> Prepare:
    async def prepare(side: AskedEngine, number: int) -> Question:
        since = await _token(side, user)
        mine = _rooms(side, user, number, small=small)
        others = [room for room in range(side.crowd.rooms) if not side.crowd.has(room, user)]
        await side.say(random.Random(number).sample(others, min(OTHERS, len(others))))
        await side.say(
            mine
        )  # last, and alone: what an append leaves in the processor's caches costs what comes after it

        async def question() -> None:
            answer = await side.store.sync(user, since=since)
            if len(answer.join) != len(mine):
                raise AssertionError(f"{len(answer.join)} rooms, not {len(mine)}")

        return question

    return prepare


def _nothing(tokens: dict[tuple[str, str], str]) -> Prepare:
    """``tokens`` of those who have asked before.

    So what comes before such a question is another one of its kind, as on a server.
    """

    async def prepare(side: AskedEngine, number: int) -> Question:
        user = (MANY, EVERYWHERE, FEW)[number % 3]
        since = tokens[side.name, user] = tokens.get((side.name, user)) or await _token(side, user)
        return lambda: side.store.sync(user, since=since)

    return prepare


async def _nothing_of_theirs(side: AskedEngine, number: int) -> Question:
    """The user is told that there is nothing, though the streams have moved."""
    since = await _token(side, FEW)
    others = [room for room in range(side.crowd.rooms) if not side.crowd.has(room, FEW)]
    await side.say(random.Random(number).sample(others, min(OTHERS, len(others))))
    return lambda: side.store.sync(FEW, since=since)


def _initial(user: str, rooms_limit: int | None) -> Prepare:
    async def prepare(side: AskedEngine, _number: int) -> Question:  # the same every round
        return lambda: side.store.sync(user, timeline_limit=20, rooms_limit=rooms_limit)

    return prepare


async def _look(bench: Bench, side: AskedEngine) -> None:
    """What Postgres does for these."""
    given: dict[str, Any] = {}
    for name, user, small in (
        ("1,000 rooms, 10 changed", MANY, True),
        ("1,000 rooms, 10 changed, the largest", MANY, False),
        ("all rooms, 10 changed", EVERYWHERE, True),
    ):
        since = await _token(side, user)
        await side.say(_rooms(side, user, 0, small=small))
        given[name] = (
            "sync",
            QueryArguments(user=user, since=since, deployment=side.store.deployment_id),
        )
    given["initial, 100 rooms, 20 events each"] = (
        "initial-sync",
        QueryArguments(user=HUNDRED, limit=20, deployment=side.store.deployment_id),
    )
    for name, (question, told) in given.items():
        bench.results[name]["looked_at"] = touched(await side.plans(question, told))


async def _throughput(bench: Bench, side: AskedEngine) -> dict[str, Any]:
    """A hundred clients of one user in 1,000 rooms, of which ten have changed for each; and of one who is told nothing."""
    since = await _token(side, MANY)
    await side.say(_rooms(side, MANY, 1, small=True))
    now = await _token(side, MANY)
    return {
        "1,000 rooms, 10 changed": await throughput(
            lambda _: side.store.sync(MANY, since=since), bench.size(20, 2)
        ),
        "nothing new": await throughput(
            lambda _: side.store.sync(MANY, since=now), bench.size(100, 2)
        ),
    }
