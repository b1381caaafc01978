"""Facts of the homeserver: publish and read those of a defined stream, and pages of the outbox.

Each round publishes a fact and sets a receipt, in turns: both write one row and a position. The
stream then has many keys, and readers ask for the last facts. The outbox is read of a room with
many servers and local users, where each page has messages of one audience.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import storage
from benchmarks.harness import Bench, percentiles, show, spread
from storage import EventId, Store, UserId
from storage.streams.defined_streams import DefinedStream
from storage.testing import RoomBuilder

SERVER: Final = "s1.test"
WARM: Final = 50
CONCURRENT: Final = 20
PAGE: Final = 100
NEWS: Final = 50  # facts since the token of a reader
FILL: Final = """
INSERT INTO published_facts (stream_id, published_ts, writer_nid, stream_name, key, value, wakes)
SELECT nextval('published_facts_stream'), (extract(epoch FROM clock_timestamp()) * 1000)::bigint, 1,
    'presence', '@user' || n || ':s1.test', '{"presence":"online"}', '{}'
FROM generate_series(1, $1::int) AS n
"""

Way = Callable[[int], Awaitable[Any]]


async def run(bench: Bench) -> None:
    """Measure publishing, reading and the outbox, in one database."""
    async with bench.database() as dsn, storage.open(dsn, server_name=SERVER) as store:
        room = await _filled_room(bench, store)
        stream = await store.define_stream("presence")
        rounds = bench.size(2_000, 50)
        ways: dict[str, Way] = {
            "publish": lambda number: _publish(stream, number),
            "set a receipt": lambda number: _read(store, room, number),
        }
        bench.results = await _in_turns(ways, rounds)
        bench.results["publish at once"] = await _at_once(bench, stream)
        bench.results |= await _reads(bench, store, stream)
        bench.results |= await _outbox(bench, store, room)
    bench.write()
    _show(bench)


async def _publish(stream: DefinedStream, number: int) -> int:
    key = f"@user{number % 500}:s1.test"
    return await stream.publish(key, {"presence": "online"}, wakes=["!room0:s1.test"])


async def _read(store: Store, room: RoomBuilder, number: int) -> int:
    """Read on in the room, as the next user at its end."""
    turn, place = divmod(number, len(room.events))
    user, event = UserId(room.user(1 + turn)), EventId(room.events[place].event_id)
    return await store.receipts.set(room.room_id, "m.read", user, event, {})


async def _filled_room(bench: Bench, store: Store) -> RoomBuilder:
    """Store a room with many servers, many local users, and messages of one of these."""
    room = RoomBuilder("11", sign=False, servers=(SERVER,))
    room.start(room.user(1), join_rule="public")
    for number in range(2, bench.size(2_000, 20)):
        room.join(f"@user{number}:s1.test")
        room.join(f"@user{number}:server{number}.test")
    for number in range(bench.size(2_000, 200)):
        room.message(room.user(1), f"message {number}")
    pdus = room.pdus
    for start in range(0, len(pdus), 500):
        await store.append(pdus[start : start + 500], room_version=room.version)
    return room


async def _in_turns(ways: dict[str, Way], rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM + rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            await way(number)
            seconds[name].append(time.perf_counter() - start)
    return {name: {"ms": percentiles(found[WARM:], factor=1e3)} for name, found in seconds.items()}


async def _at_once(bench: Bench, stream: DefinedStream) -> dict[str, Any]:
    """Publish from several tasks: the writes of a stream follow one another in a process."""
    each, rates = bench.size(100, 5), []
    for _ in range(bench.size(5, 1)):

        async def several() -> None:
            for number in range(each):
                await _publish(stream, number)

        start = time.perf_counter()
        await asyncio.gather(*(several() for _ in range(CONCURRENT)))
        rates.append(CONCURRENT * each / (time.perf_counter() - start))
    return {"facts_per_second": spread(rates)}


async def _reads(bench: Bench, store: Store, stream: DefinedStream) -> dict[str, Any]:
    """Read the last facts, all or those of some keys, among many."""
    async with store.database.transaction() as conn:
        await conn.execute(FILL, bench.size(100_000, 1_000))
    await store.database.run(lambda conn: conn.execute("ANALYZE published_facts"))
    for number in range(NEWS):
        last = await _publish(stream, number)
    keys = [f"@user{number}:s1.test" for number in range(40)]
    ways: dict[str, Way] = {
        f"read the last {NEWS} of many facts": lambda _: stream.rows(last - NEWS),
        "the same of 40 keys": lambda _: stream.rows(last - NEWS, keys=keys),
    }
    return await _in_turns(ways, bench.size(1_000, 20))


async def _outbox(bench: Bench, store: Store, room: RoomBuilder) -> dict[str, Any]:
    end = store.streams["events"].linear()
    messages = await store.events([event.event_id for event in room.events[-PAGE:]])
    after = min(one.stream_ordering or end for one in messages.values()) - 1
    page = await store.outbox(after, PAGE)
    if len(page) != PAGE:
        raise RuntimeError(f"the page has {len(page)} events")
    ways: dict[str, Way] = {
        f"a page of {PAGE} of the outbox": lambda _: store.outbox(after, PAGE),
        "one event of it": lambda _: store.outbox(page.upto - 1, PAGE),
        "an empty page": lambda _: store.outbox(end, PAGE),
    }
    measured = await _in_turns(ways, bench.size(200, 10))
    for one in measured.values():
        one["servers"] = len(page[-1].servers)
    return measured


def _show(bench: Bench) -> None:
    rows = [
        [name, one["ms"]["p50"], one["ms"]["p99"], one.get("servers", "")]
        for name, one in bench.results.items()
        if "ms" in one
    ]
    show("the homeserver's own facts", ["one at a time", "p50 ms", "p99 ms", "servers"], rows)
    rate = bench.results["publish at once"]["facts_per_second"]["median"]
    show("publish", ["by", "facts/s"], [[f"{CONCURRENT} tasks of a process", f"{rate:,.0f}"]])
