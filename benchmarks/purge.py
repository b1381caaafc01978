"""A purge of 90 % of a room during appends and syncs: their delays, its speed, and what remains.

One process appends 200 messages a second to the room, and syncs 50 times a second. It first does so
alone; then another process purges meanwhile. ``--events`` sets the size of the room (100,000; the
full size is 1,000,000). The room is filled in batches first, unsigned, as signatures do not matter
here. At the end the store is verified, vacuumed, and written to again.
"""

import asyncio
import gc
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import storage
from benchmarks.harness import Bench, note
from storage import Config, Store
from storage.database.connection import Database
from storage.maintenance.purge import purge_history
from storage.maintenance.verify import verify
from storage.testing import SHAPES, GeneratedEvent, RoomStream, Shape, stream_room

EVENTS: Final = 100_000
QUICK_EVENTS: Final = 4_000
SHARE: Final = 0.9
APPENDS_PER_S: Final = 200
SYNCS_PER_S: Final = 50
ALONE_S: Final = 60
PURGED_PER_S: Final = 2_700
"""About: the load runs as long without the purge as with it, so that both have rare slow steps."""

BESIDE_S_MAX: Final = 900
BATCH: Final = 500
OUTCOMES: Final = {"stored", "soft_failed", "rejected", "missing_parents"}
"""Parents are missing for forks of purged history: its server would be queried for the state."""

SERVER: Final = "s1.test"
CONFIG: Final = Config(statement_timeout_ms=600_000)
"""Verification reads the whole room."""


@dataclass(slots=True)
class Longest:
    """An observer that keeps the longest statement."""

    seconds: float = 0.0
    statement: str = ""
    count: int = 0

    def before(self, statement: str) -> None:
        """See `storage.database.connection.Observer`."""

    def after(self, statement: str, seconds: float) -> None:
        self.count += 1
        if seconds > self.seconds:
            self.seconds, self.statement = seconds, statement


@dataclass(slots=True)
class Waits:
    """The durations of appends and syncs, in seconds."""

    appends: list[float] = field(default_factory=list)
    syncs: list[float] = field(default_factory=list)


def _purge_process(dsn: str, room_id: str, event_id: str, pipe: Pipe) -> None:
    """Purge in another process, and send the results."""
    pipe.send(asyncio.run(_purge(dsn, room_id, event_id)))


async def _purge(dsn: str, room_id: str, event_id: str) -> dict[str, Any]:
    longest = Longest()
    start = time.perf_counter()
    async with await Database.open(dsn, config=Config(), observer=longest) as database:
        purged = await purge_history(
            database, room_id, server_name=SERVER, before_event_id=event_id, local=True
        )
    seconds = time.perf_counter() - start
    job = purged.job
    assert job is not None
    counts = {
        "deleted": job.deleted_count,
        "set_aside": job.set_aside_count,
        "swept": job.swept_count,
        "groups": job.state_group_count,
    }
    first_line = " ".join(longest.statement.split())[:100]
    return {
        "seconds": seconds,
        "longest_ms": longest.seconds * 1000,
        "longest": first_line,
        "statements": longest.count,
    } | counts


async def _fill(store: Store, events: Sequence[GeneratedEvent], version: str) -> None:
    for start in range(0, len(events), BATCH):
        await store.append(
            [event.pdu for event in events[start : start + BATCH]], room_version=version
        )


class Load:
    """Appends and syncs at their rates, by independent clients; delays count from the due time."""

    def __init__(
        self, store: Store, events: Sequence[GeneratedEvent], version: str, users: Sequence[str]
    ) -> None:
        self._store = store
        self._events = iter(events)
        self._version = version
        self._users = users
        self._tokens: dict[str, str] = {}
        self.waits = Waits()
        self.ended = False

    async def prepare(self) -> None:
        """Sync once for every user."""
        for user in self._users:
            self._tokens[user] = (await self._store.sync(user)).next_batch

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the load for the duration of the block."""
        stop = asyncio.Event()
        tasks = [asyncio.create_task(self._appends(stop)), asyncio.create_task(self._syncs(stop))]
        yield
        stop.set()
        await asyncio.gather(*tasks)

    async def _appends(self, stop: asyncio.Event) -> None:
        due = time.perf_counter()
        async with asyncio.TaskGroup() as under_way:
            while not stop.is_set():
                event = next(self._events, None)
                if event is None:
                    self.ended = True
                    return
                under_way.create_task(self._append(event, due))
                due += 1 / APPENDS_PER_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _append(self, event: GeneratedEvent, due: float) -> None:
        [result] = await self._store.append([event.pdu], room_version=self._version)
        assert result.outcome in OUTCOMES, result
        self.waits.appends.append(time.perf_counter() - due)

    async def _syncs(self, stop: asyncio.Event) -> None:
        due, at = time.perf_counter(), 0
        while not stop.is_set():
            user = self._users[at % len(self._users)]
            answer = await self._store.sync(user, since=self._tokens[user])
            self._tokens[user] = answer.next_batch
            self.waits.syncs.append(time.perf_counter() - due)
            at += 1
            due = max(due + 1 / SYNCS_PER_S, time.perf_counter() - 1)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


def _told(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
        "max_ms": ordered[-1] * 1000,
    }


async def _size(store: Store) -> int:
    async with store.database.connection() as conn:
        return int(await conn.fetchval("SELECT pg_database_size(current_database())"))


async def _vacuum(store: Store) -> None:
    async with store.database.connection() as conn:
        await conn.execute("VACUUM")


@dataclass(frozen=True, slots=True)
class PurgeScene:
    """A room that is stored, the event before which 90 % of it are, and its later events."""

    room: RoomStream
    point: str
    live: Sequence[GeneratedEvent]


async def _stored(store: Store, room: RoomStream, count: int) -> PurgeScene:
    source, point = iter(room), ""
    start = time.perf_counter()
    for at in range(0, count, BATCH):
        events = list(islice(source, min(BATCH, count - at)))
        if at <= count * SHARE:
            point = events[0].event_id
        await _fill(store, events, room.room_version)
    note(f"{count} events stored in {time.perf_counter() - start:.0f} s")
    return PurgeScene(room, point, list(source))


async def _loaded(store: Store, scene: PurgeScene) -> Load:
    async with store.database.connection() as conn:
        users: list[str] = await conn.fetchvals(
            """
            SELECT p.name FROM memberships m JOIN principals p USING (principal_nid)
            WHERE m.membership = 5 ORDER BY 1 LIMIT 20
            """
        )
        await conn.execute("VACUUM ANALYZE")
    load = Load(store, scene.live, scene.room.room_version, users)
    await load.prepare()
    return load


def _settled() -> None:
    """Freeze existing objects, so that both halves of the load begin with an idle collector."""
    gc.collect()
    gc.freeze()


async def _purged_beside(load: Load, dsn: str, scene: PurgeScene) -> dict[str, Any]:
    """Return the results of the other process' purge."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (dsn, scene.room.room_id, scene.point, theirs)
    process = multiprocessing.get_context("spawn").Process(target=_purge_process, args=arguments)
    async with load.running():
        process.start()
        theirs.close()  # so that the end of the other process ends the wait
        done: dict[str, Any] = await asyncio.to_thread(ours.recv)
    await asyncio.to_thread(process.join)
    return done


def quiet(shape: Shape) -> Shape:
    """Return the shape without changes of the history visibility.

    It has five hundred of them in a million events. Each concerns thousands of invited users and
    takes a second by the end. These would be the slowest hundredth of all delays, with a purge or
    without. A real room has a handful.
    """
    return shape.replaced(
        mix={action: share for action, share in shape.mix.items() if action != "visibility"}
    )


async def run(bench: Bench) -> None:
    count = bench.events or bench.size(EVENTS, QUICK_EVENTS)
    alone_s = bench.size(max(ALONE_S, round(count * SHARE / PURGED_PER_S)), 4)
    beside = APPENDS_PER_S * bench.size(BESIDE_S_MAX, 60)
    shape = quiet(SHAPES["small_chat"])
    room = stream_room(
        shape, count + APPENDS_PER_S * alone_s + min(beside, count), seed=12, sign=False
    )
    async with (
        bench.database() as dsn,
        storage.open(dsn, server_name=SERVER, config=CONFIG) as store,
    ):
        scene = await _stored(store, room, count)
        load = await _loaded(store, scene)
        sizes = [await _size(store)]
        _settled()
        async with load.running():
            await asyncio.sleep(alone_s)
        _settled()
        alone, load.waits = load.waits, Waits()
        done = await _purged_beside(load, dsn, scene)
        sizes.append(await _size(store))
        bench.results = {
            "events": count,
            "purge": done,
            "waits": _waits(alone, load.waits),
            "load_ended": load.ended,
        }
        start = time.perf_counter()
        found = [str(finding) async for finding in verify(store.database, server_name=SERVER)]
        note(f"verified in {time.perf_counter() - start:.0f} s: {len(found)} findings {found[:3]}")
        await _vacuum(store)
        await _fill(
            store, list(stream_room(shape, count // 5, seed=13, sign=False)), room.room_version
        )
        sizes.append(await _size(store))
    bench.results |= {"sizes": sizes, "findings": len(found)}


def _waits(without: Waits, beside: Waits) -> dict[str, dict[str, dict[str, float]]]:
    """Return percentiles of both halves."""
    halves = {"without": without, "with": beside}
    return {
        name: {"appends": _told(waits.appends), "syncs": _told(waits.syncs)}
        for name, waits in halves.items()
    }
