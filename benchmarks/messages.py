"""Pages of history, context, and event by time, on a large database and a tenth of it.

Pages begin at positions all over a room: the hall (the busiest one), or a quiet room of ten
members.
"""

import random
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
from benchmarks.crowd import DEPTH_MS, FIRST_MS, MANY, MEMBERS_MIN, STEP_MS, room_id
from benchmarks.harness import Bench
from storage.ids import EventId, RoomId, server_name_of
from storage.store.catalogue import QueryArguments

PAGE: Final = 100
PLACES: Final = 15  # pages of the hall that are read to find positions


class Places:
    """Positions in the hall at which pages can begin, and its events, found by paging back."""

    def __init__(self, side: AskedEngine) -> None:
        self.side = side
        self.room = RoomId(room_id(side.crowd.hall))
        members = side.crowd.members(side.crowd.hall)
        self.user = members[0]
        # a server that has a user there
        self.server = next(server_name_of(name) for name in members if name.startswith("@r"))
        self.tokens: list[str] = []
        self.events: list[EventId] = []

    async def walk(self) -> "Places":
        """Page back from the end, some pages, or to the beginning."""
        token = None
        for _ in range(PLACES):
            page = await self.side.store.messages(self.room, self.user, from_=token, limit=PAGE)
            self.events += [event.event_id for event in page.chunk]
            if page.end is None:
                break
            token = page.end
            self.tokens.append(token)
        return self


async def run(bench: Bench) -> None:
    """Measure all queries."""
    async with sides(bench) as both:
        places = {side.name: await Places(side).walk() for side in both}
        rounds = bench.size(300, 10)
        asked = _questions(places, rounds)
        await ask_all(bench, both, asked)
        await _look(bench, both[0], places[both[0].name])
        bench.results["throughput"] = await _throughput(bench, both[0], places[both[0].name])


def _questions(places: dict[str, Places], rounds: int) -> dict[str, tuple[Prepare, int]]:
    async def page(side: AskedEngine, number: int, direction: Any) -> Question:
        at = places[side.name]
        token = at.tokens[(number * 7) % len(at.tokens)]
        return lambda: side.store.messages(
            at.room, at.user, from_=token, direction=direction, limit=PAGE
        )

    async def backwards(side: AskedEngine, number: int) -> Question:
        return await page(side, number, "b")

    async def forwards(side: AskedEngine, number: int) -> Question:
        return await page(side, number, "f")

    async def end(side: AskedEngine, _number: int) -> Question:  # the same in every round
        return lambda: side.store.messages(
            places[side.name].room, places[side.name].user, limit=PAGE
        )

    async def quiet(side: AskedEngine, number: int) -> Question:
        room = RoomId(room_id(_quiet(side, number)))
        return lambda: side.store.messages(room, MANY, limit=PAGE)

    async def around(side: AskedEngine, number: int) -> Question:
        at = places[side.name]
        event = at.events[(number * 37) % len(at.events)]
        return lambda: side.store.context(event, at.user, limit=20)

    async def around_quiet(side: AskedEngine, number: int) -> Question:
        page = await side.store.messages(RoomId(room_id(_quiet(side, number))), MANY, limit=30)
        return lambda: side.store.context(page.chunk[-1].event_id, MANY, limit=20)

    async def nearest(side: AskedEngine, number: int) -> Question:
        time_ms = FIRST_MS + DEPTH_MS + random.Random(number).randrange(side.crowd.events * STEP_MS)
        return lambda: side.store.event_near(
            places[side.name].room, places[side.name].user, time_ms, "b"
        )

    return {
        "hall, the end, 100": (end, rounds),
        "hall, backwards, 100": (backwards, rounds),
        "hall, forwards, 100": (forwards, rounds),
        "quiet room, the end, 100": (quiet, rounds),
        "context, hall, 20 and the state of 5,000": (around, rounds // 6),
        "context, quiet room, 20": (around_quiet, rounds),
        "event nearest to a time": (nearest, rounds),
    }


def _quiet(side: AskedEngine, number: int) -> int:
    """Return a room of ten members, another each round."""
    rooms = [room for room in side.crowd.rooms_of(MANY) if side.crowd.size(room) == MEMBERS_MIN]
    return random.Random(number).choice(rooms)


async def _look(bench: Bench, side: AskedEngine, places: Places) -> None:
    mine = QueryArguments(room=places.room, user=places.user, limit=PAGE)
    given = {
        "hall, the end, 100": ("messages", mine),
        "hall, forwards, 100": ("messages-forwards", mine),
        "quiet room, the end, 100": (
            "messages",
            replace(mine, room=room_id(_quiet(side, 0)), user=MANY),
        ),
        "context, hall, 20 and the state of 5,000": (
            "context",
            replace(mine, event=places.events[0], limit=20),
        ),
        "event nearest to a time": (
            "event-before",
            replace(mine, timestamp=FIRST_MS + DEPTH_MS + side.crowd.events * STEP_MS // 2),
        ),
    }
    await look_at(bench, side, given)


async def _throughput(bench: Bench, side: AskedEngine, places: Places) -> dict[str, Any]:
    async def once(number: int) -> object:
        token = places.tokens[number % len(places.tokens)]
        return await side.store.messages(places.room, places.user, from_=token, limit=PAGE)

    return await throughput(once, bench.size(20, 2))
