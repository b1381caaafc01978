"""/sync on a large database and on a tenth of it: 10 changed rooms, nothing new, and initial.

Growth with the user's rooms: users with 10, 1,000 and all rooms. Growth with members: the changed
rooms have ten members, or are the largest. Growth with events: the two databases. Before each sync
a hundred rooms get a message each, unless the user has all of them; the user's ten come last.
"""

import random
from collections.abc import Sequence
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
from benchmarks.crowd import EVERYWHERE, FEW, HUNDRED, MANY, MEMBERS_MIN
from benchmarks.harness import Bench
from storage.store.catalogue import QueryArguments

CHANGED: Final = 10
OTHERS: Final = 90


async def run(bench: Bench) -> None:
    """Measure all syncs."""
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
        await ask_all(bench, both, asked)
        await _look(bench, both[0])
        bench.results["throughput"] = await _throughput(bench, both[0])


async def _token(side: AskedEngine, user: str) -> str:
    """Return the token of a client that is up to date."""
    return (await side.store.sync(user, rooms_limit=1, timeline_limit=1)).next_batch


def _rooms(side: AskedEngine, user: str, number: int, *, small: bool) -> Sequence[int]:
    """Return ten of the user's rooms, others each round; the largest, or rooms of ten members."""
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
        # last, and alone: an append leaves CPU caches that slow the next query
        await side.say(mine)

        async def question() -> None:
            answer = await side.store.sync(user, since=since)
            if len(answer.join) != len(mine):
                raise AssertionError(f"{len(answer.join)} rooms, not {len(mine)}")

        return question

    return prepare


def _nothing(tokens: dict[tuple[str, str], str]) -> Prepare:
    """Return the preparation of syncs without news; ``tokens``: of earlier syncs of users.

    So such a sync follows another one of its kind, as on a server.
    """

    async def prepare(side: AskedEngine, number: int) -> Question:
        user = (MANY, EVERYWHERE, FEW)[number % 3]
        since = tokens[side.name, user] = tokens.get((side.name, user)) or await _token(side, user)
        return lambda: side.store.sync(user, since=since)

    return prepare


async def _nothing_of_theirs(side: AskedEngine, number: int) -> Question:
    """Prepare a sync without news for the user, although the streams have advanced."""
    since = await _token(side, FEW)
    others = [room for room in range(side.crowd.rooms) if not side.crowd.has(room, FEW)]
    await side.say(random.Random(number).sample(others, min(OTHERS, len(others))))
    return lambda: side.store.sync(FEW, since=since)


def _initial(user: str, rooms_limit: int | None) -> Prepare:
    async def prepare(side: AskedEngine, _number: int) -> Question:  # the same in every round
        return lambda: side.store.sync(user, timeline_limit=20, rooms_limit=rooms_limit)

    return prepare


async def _look(bench: Bench, side: AskedEngine) -> None:
    """Record Postgres' work for these."""
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
            QueryArguments(user=user, since=since),
        )
    given["initial, 100 rooms, 20 events each"] = (
        "initial-sync",
        QueryArguments(user=HUNDRED, limit=20),
    )
    await look_at(bench, side, given)


async def _throughput(bench: Bench, side: AskedEngine) -> dict[str, Any]:
    """Measure a hundred clients of one user in 1,000 rooms: ten changed rooms, and none."""
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
