"""Pages of 100 events: as `store.messages` returns them, with aggregations, and for clients.

The calls take turns. A fifth of the events have a reaction, an edit, a thread or a redaction. The
reader has sent a tenth of the events.

"Today's" page is the second call: `store.messages` with aggregations, and a dict of each event with
its ``m.relations`` by `Aggregations.bundle`. A server that makes ``unsigned`` itself starts from
it. It has the same events and aggregations as the third call, but no other key of ``unsigned``. The
last call names a device, so the transactions of the reader's own events are looked up, too.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import storage
from benchmarks.harness import Bench, Trips, percentiles, show
from storage import Page, Store
from storage.ids import RoomId
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
LIMIT: Final = 100
MESSAGES: Final = 400

Call = Callable[[], Awaitable[Any]]


async def run(bench: Bench) -> None:
    """Measure each call in turns, and compare it with the page that has its aggregations."""
    room = _room()
    reader = room.user(2, SERVER)
    trips = Trips()
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, observer=trips) as store,
    ):
        trips.opened()
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            await conn.execute("VACUUM ANALYZE")
        calls = _calls(store, room.room_id, reader)
        found = await _in_turns(calls, trips, bench.size(300, 3))
    bench.results.update(events=LIMIT, calls=found)
    rows = [
        [name, one["ms"]["p50"], one["ms"]["p95"], one["of_today"], one["statements"]]
        for name, one in found.items()
    ]
    heads = ["call", "p50 ms", "p95 ms", "of the second", "statements"]
    show(f"A page of {LIMIT} events", heads, rows)
    bench.write()


def _room() -> RoomBuilder:
    room = RoomBuilder("11", seed=1, sign=False)
    admin, reader = room.user(1, SERVER), room.user(2, SERVER)
    room.start(admin)
    room.join(reader)
    for number in range(MESSAGES):
        event = room.message(admin, f"message {number}")
        if number % 20 == 0:
            room.react(reader, event)
        elif number % 20 == 5:
            room.edit(admin, event, "better")
        elif number % 20 == 10:
            room.threaded(reader, event, "reply")
        elif number % 20 == 15:
            room.redact(admin, event)
    return room


def _calls(store: Store, room_id: RoomId, reader: str) -> dict[str, Call]:
    async def page(*, aggregations: bool) -> Page:
        found = await store.messages(room_id, reader, limit=LIMIT, aggregations=aggregations)
        assert len(found.chunk) == LIMIT
        return found

    async def today() -> None:
        for event in (await page(aggregations=True)).chunk:
            shown = dict(event.json)
            if event.relations is not None:
                shown["unsigned"] = {
                    "m.relations": event.relations.bundle(lambda one: dict(one.json))
                }

    async def for_clients(device_id: str | None = None) -> None:
        events = (await page(aggregations=False)).chunk
        shown = await store.client_events(reader, events, device_id=device_id)
        assert len(shown) == LIMIT

    return {
        "messages": lambda: page(aggregations=False),
        "messages, with aggregations": today,
        "messages, then client_events": for_clients,
        "the same for a device": lambda: for_clients("DEVICE"),
    }


async def _in_turns(calls: dict[str, Call], trips: Trips, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    statements = dict.fromkeys(calls, 0)
    for number in range(rounds + 1):
        for name, call in calls.items():
            before, start = trips.count, time.perf_counter()
            await call()
            if number:  # the first round fills the caches
                times[name].append(time.perf_counter() - start)
                statements[name] += trips.count - before
    medians = {name: percentiles(one, factor=1000) for name, one in times.items()}
    base = medians["messages, with aggregations"]["p50"]
    return {
        name: {
            "ms": one,
            "of_today": round(one["p50"] / base, 2),
            "statements": statements[name] / rounds,
        }
        for name, one in medians.items()
    }
