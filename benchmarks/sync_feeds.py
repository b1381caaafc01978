"""Two ways to find a user's changed rooms: a process' cache, and a list per user.

The list is written with each event. Both run on one database, together with the statement that
reads all rooms of the user. Reads: users with 10, 1,000 and 10,000 rooms. Writes: messages to rooms
of 10 to 50,000 local members. On a busy machine, ratios of CPU time (Python and Postgres) are the
most reliable.
"""

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import storage
from benchmarks import feed
from benchmarks.asking import AnswerCost, AskedEngine, TaskStatements, measured, told
from benchmarks.crowd import EVERYWHERE, FEW, MANY, SERVER, VERSION, Crowd, Pen
from benchmarks.harness import Bench, show
from storage import Store, Sync
from storage.config import Config
from storage.errors import ResyncNeeded
from storage.queries.sync import SyncMemory, SyncRequest, has_no_changes, no_changes, sync
from storage.queries.sync.changed_rooms import events_of
from storage.streams.caches import Cache

CHANGED: Final = 10
OTHERS: Final = 90
TOGETHER: Final = 1_000
LENGTH: Final = 1_000  # of a list
WARM: Final = 8

SQL_WAL: Final = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
SQL_SIZE: Final = (
    "SELECT count(*) AS rows, pg_total_relation_size('sync_feed') AS bytes FROM sync_feed"
)


class FeedSizeRow(NamedTuple):
    """The lists of all users together."""

    rows: int
    bytes: int


class Halls(NamedTuple):
    """Rooms with a given number of local members, in addition to those of one member or three."""

    crowd: Crowd
    sizes: Sequence[int]

    def of(self, size: int) -> int:
        """Return the index of the room of this size."""
        return self.crowd.rooms + self.sizes.index(size)


async def run(bench: Bench) -> None:
    """Measure all of it."""
    rooms, sizes = bench.size(10_000, 200), (10, 100, 1_000, 10_000, 50_000)
    halls = Halls(Crowd(rooms, 0, 1), sizes[: bench.size(5, 3)])
    counted = TaskStatements(task=asyncio.current_task())
    async with bench.database() as dsn:
        config = Config(statement_timeout_ms=600_000)
        async with storage.open(dsn, server_name=SERVER, observer=counted, config=config) as store:
            await _fill(store, halls)
            async with store.database.connection() as conn:
                await conn.execute("VACUUM ANALYZE")
            gc.collect()
            gc.freeze()
            side = AskedEngine("one", halls.crowd, store, counted)
            bench.results["writes"] = await _writes(bench, side, halls)
            bench.results["reads"] = await _reads(bench, side)
    bench.write()
    _tables(bench)


# ------------------------------------------------------------------------------------------------
# the database


def _events(halls: Halls) -> Iterator[bytes]:
    """Yield the events of 10,000 rooms.

    One user is in all of them, another in a thousand, and a third in ten.
    """
    for number in range(halls.crowd.rooms + len(halls.sizes)):
        pen = Pen.of(number)
        yield from pen.begun(EVERYWHERE)
        if number >= halls.crowd.rooms:
            yield from (
                pen.join(f"@u{one}:{SERVER}")
                for one in range(halls.sizes[number - halls.crowd.rooms] - 1)
            )
        else:
            yield from (pen.join(user) for user in (MANY, FEW) if halls.crowd.has(number, user))


async def _fill(store: Store, halls: Halls) -> None:
    pdus = _events(halls)
    while batch := list(islice(pdus, TOGETHER)):
        results = await store.append(batch, room_version=VERSION)
        if {result.outcome for result in results} != {"stored"}:
            raise RuntimeError(f"not stored: {results[:3]}")


# ------------------------------------------------------------------------------------------------
# the writes


async def _writes(bench: Bench, side: AskedEngine, halls: Halls) -> dict[str, Any]:
    """Measure a message without and with lists, by the size of the room; trim the lists."""
    results: dict[str, Any] = {}
    for size in halls.sizes:
        rounds = bench.size(max(3, min(100, 300_000 // size)), 3)
        results[str(size)] = {"plain": await _say(side, halls.of(size), rounds)}
    async with side.store.database.connection() as conn:
        await conn.execute(feed.SQL_CREATE)
    for size in halls.sizes:
        rounds = bench.size(max(3, min(100, 300_000 // size)), 3)
        results[str(size)]["listed"] = await _say(side, halls.of(size), rounds)
        results[str(size)]["trimmed"] = await _trim(side, halls.of(size), rounds)
    return results


async def _say(side: AskedEngine, room: int, rounds: int) -> dict[str, Any]:
    taken, wal = [], 0
    async with side.store.database.connection() as conn:
        for number in range(3 + rounds):
            before = await conn.fetchval(SQL_WAL)
            one = await measured(side, lambda: side.say([room]))
            if number >= 3:
                taken.append(one)
                wal += int(await conn.fetchval(SQL_WAL) - before)
        listed = await conn.fetchval("SELECT to_regclass('sync_feed') IS NOT NULL")
        size = await conn.fetchrow(SQL_SIZE, row=FeedSizeRow) if listed else None
    table = {} if size is None else {"bytes_a_row": round(size.bytes / max(size.rows, 1))}
    return told(taken) | {"wal_bytes": wal // rounds} | table


async def _trim(side: AskedEngine, room: int, rounds: int) -> dict[str, Any]:
    """Return the cost of dropping as many rows as one message writes."""
    gone: list[int] = []

    async def trim() -> None:
        async with side.store.database.connection() as conn:
            gone.append(await conn.fetchval(feed.SQL_TRIM, f"!crowd{room}:{SERVER}", 0))

    one = await measured(side, trim)
    return {
        "rows": gone[0] // (3 + rounds),
        "cpu_ms": round((one.python + one.postgres) * 1_000 / (3 + rounds), 3),
    }


# ------------------------------------------------------------------------------------------------
# the reads

Way = Callable[[AskedEngine, SyncRequest], Awaitable[Sync]]


async def _look_at_all(side: AskedEngine, asked: SyncRequest) -> Sync:
    async with side.store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await sync(conn, asked)


async def _remember(side: AskedEngine, asked: SyncRequest) -> Sync:
    return await _by(side, asked, side.store.memory)


async def _cold(side: AskedEngine, asked: SyncRequest) -> Sync:
    """Sync as for the first time in the process, but with the rooms' last changes known."""
    streams, caches = side.store.streams, side.store.caches
    empty = SyncMemory(
        lambda name: streams[name].positions(),
        Cache("rooms_of", 1_000_000),
        caches.room_changes,
        caches.state_changes,
    )
    return await _by(side, asked, empty)


async def _listed(side: AskedEngine, asked: SyncRequest) -> Sync:
    assert asked.since is not None
    memory = feed.FeedMemory(side.store, events_of(asked.since))
    async with side.store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await sync(conn, asked, memory=memory)


async def _listed_quiet(side: AskedEngine, asked: SyncRequest) -> Sync:
    """Sync where nothing is known to be new: the best case."""
    assert asked.since is not None
    async with side.store.database.connection() as conn:
        found = await no_changes(conn, asked, feed.FeedMemory(side.store, events_of(asked.since)))
    assert found is not None
    return found[0]


async def _by(side: AskedEngine, asked: SyncRequest, memory: SyncMemory) -> Sync:
    database = side.store.database
    if has_no_changes(asked, memory):
        async with database.connection() as conn:
            if found := await no_changes(conn, asked, memory):
                return found[0]
    async with database.transaction(isolation="repeatable_read", readonly=True) as conn:
        return await sync(conn, asked, memory=memory)


WAYS: Final[dict[str, Way]] = {
    "all rooms": _look_at_all,
    "remembered": _remember,
    "remembered, cold": _cold,
    "list": _listed,
}


async def _reads(bench: Bench, side: AskedEngine) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for user in (FEW, MANY, EVERYWHERE):
        rooms = side.crowd.rooms_of(user)
        name = f"{len(rooms):,} rooms"
        results[f"{name}, {CHANGED} changed"] = await _asked(bench, side, user, CHANGED, WAYS)
        results[f"{name}, others changed"] = await _asked(
            bench, side, user, 0, WAYS | {"list": _listed_quiet}, others=user != EVERYWHERE
        )
    await _behind(side)
    for most in (100, 1_000):
        async with side.store.database.connection() as conn:
            await conn.execute("TRUNCATE sync_feed_large")
            await conn.execute(feed.SQL_LARGE, most)
        some = {"list": _listed}
        results[
            f"1,000 rooms, {CHANGED} changed, lists of rooms up to {most} members"
        ] = await _asked(bench, side, MANY, CHANGED, some)
    return results


async def _asked(
    bench: Bench,
    side: AskedEngine,
    user: str,
    changed: int,
    ways: Mapping[str, Way],
    *,
    others: bool = True,
) -> dict[str, Any]:
    """Change ten rooms of the user and ninety others each round; compare all results."""
    taken: dict[str, list[AnswerCost]] = {name: [] for name in ways}
    rooms = side.crowd.rooms_of(user)
    strangers = [number for number in range(side.crowd.rooms) if not side.crowd.has(number, user)]
    for number in range(WARM + bench.size(100, 5)):
        if number == WARM // 2:
            await _analyse(side)
        rng = random.Random(number)
        since = (await side.store.sync(user, rooms_limit=1, timeline_limit=1)).next_batch
        if others and strangers:
            await side.say(rng.sample(strangers, min(OTHERS, len(strangers))))
        if changed:
            await side.say(rng.sample(rooms, min(changed, len(rooms))))
        asked = _question(side, user, since)
        await _remember(side, asked)  # after a change, each way then has warm caches
        answers = []
        for name, way in ways.items():
            one, answer = await _answered(side, way, asked)
            answers.append(answer)
            if number >= WARM:
                taken[name].append(one)
        if any(answer != answers[0] for answer in answers) or len(answers[0].join) != min(
            changed, len(rooms)
        ):
            raise AssertionError(f"{user}: the answers differ")
    return {name: told(rounds) for name, rounds in taken.items()}


async def _analyse(side: AskedEngine) -> None:
    """Analyse the lists, so that their statement is planned for their current content."""
    async with side.store.database.connection() as conn:
        await conn.execute("VACUUM ANALYZE sync_feed")


async def _answered(side: AskedEngine, way: Way, asked: SyncRequest) -> tuple[AnswerCost, Sync]:
    answers: list[Sync] = []

    async def ask() -> None:
        answers.append(await way(side, asked))

    return await measured(side, ask), answers[0]


def _question(side: AskedEngine, user: str, since: str) -> SyncRequest:
    return SyncRequest.of(
        user,
        since,
        timeline_limit=10,
        rooms_limit=None,
        full_state=False,
        server_name=SERVER,
        deployment=side.store.deployment_id,
        config=side.store.database.config,
    )


async def _behind(side: AskedEngine) -> None:
    """Check that a client below the floor of its list gets `ResyncNeeded`."""
    since = (await side.store.sync(FEW, rooms_limit=1, timeline_limit=1)).next_batch
    room = side.crowd.rooms_of(FEW)[0]
    for _ in range(3):
        await side.say([room])
    async with side.store.database.connection() as conn:
        await conn.fetchval(feed.SQL_TRIM, f"!crowd{room}:{SERVER}", 1)
    try:
        await _listed(side, _question(side, FEW, since))
    except ResyncNeeded:
        return
    raise AssertionError("a client that fell behind its list got a result")


# ------------------------------------------------------------------------------------------------
# the tables


def _tables(bench: Bench) -> None:
    rows = []
    for size, one in bench.results["writes"].items():
        plain, listed, trimmed = one["plain"], one["listed"], one["trimmed"]
        works = [plain["cpu_ms"]["p50"], listed["cpu_ms"]["p50"], trimmed["cpu_ms"]]
        wal = [plain["wal_bytes"], listed["wal_bytes"], listed["bytes_a_row"]]
        rows.append(
            [
                size,
                plain["ms"]["p50"],
                listed["ms"]["p50"],
                *works,
                round((works[1] + works[2]) / works[0], 1),
                *wal,
            ]
        )
    columns = (
        "local members|ms|with lists|CPU ms|with lists|trimming|times"
        "|WAL bytes|with lists|bytes a row"
    )
    show("a message", columns.split("|"), rows)
    rows = [
        [
            name,
            way,
            *(one["ms"][key] for key in ("p50", "p99")),
            one["cpu_ms"]["p50"],
            one["python_ms"],
            one["postgres_ms"],
            one["statements"],
        ]
        for name, ways in bench.results["reads"].items()
        for way, one in ways.items()
    ]
    show(
        "a sync", ["", "way", "p50 ms", "p99", "CPU p50", "Python", "Postgres", "statements"], rows
    )
