"""Shared parts of the read benchmarks: two databases, one ten times the other, queried in turn.

Every round queries something else, so that no result repeats. Postgres is warm, and the store
caches nothing between queries. Other load affects the clock, so CPU time is measured as well: of
this process, and of the backends by Linux' /proc. The ratio is of the medians of both together.
"""

import asyncio
import contextlib
import gc
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import storage
from benchmarks.crowd import EVERYWHERE, SERVER, VERSION, Crowd, Pen, build, room_id
from benchmarks.harness import Bench, percentiles, stored
from storage import Store
from storage.config import Config
from storage.database.explained import QueryPlan
from storage.ids import RoomId
from storage.store.catalogue import QueryArguments, prepared

LARGE: Final = (Crowd(10_000, 5_000_000, 50_000), Crowd(1_000, 500_000, 5_000))
SMALL: Final = (Crowd(80, 8_000, 200), Crowd(40, 4_000, 100))
# rounds before the measurement: by then Postgres has chosen generic plans
WARM: Final = 8
CLIENTS: Final = 100
TIME_MS: Final = 1_800_000_000_000
SQL_BACKENDS: Final = """
SELECT pid
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend'
"""

Question = Callable[[], Awaitable[object]]


@dataclass(slots=True)
class TaskStatements:
    """An observer that counts the statements of one task, without BEGIN and COMMIT."""

    count: int = 0
    task: "asyncio.Task[Any] | None" = None

    def before(self, statement: str) -> None:
        if asyncio.current_task() is self.task and not statement.startswith(("BEGIN", "COMMIT")):
            self.count += 1

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""


@dataclass(slots=True)
class AskedEngine:
    """One of the two databases, opened."""

    name: str
    crowd: Crowd
    store: Store
    statements: TaskStatements
    backends: list[Path] = field(default_factory=list)
    pens: dict[int, Pen] = field(default_factory=dict)

    async def watch(self) -> None:
        """Find the backends."""
        async with self.store.database.connection() as conn:
            self.backends = [
                Path(f"/proc/{pid}/schedstat") for pid in await conn.fetchvals(SQL_BACKENDS)
            ]

    def postgres_seconds(self) -> float:
        """Return the CPU time of the backends so far."""
        total = 0
        for path in self.backends:
            with contextlib.suppress(OSError):
                total += int(path.read_text().split()[0])
        return total / 1e9

    async def say(self, rooms: Iterable[int]) -> None:
        """Append a message to each of these rooms."""
        pdus = []
        for number in rooms:
            pen = self.pens.get(number) or await self._pen(number)
            auth = [
                pen.auth[key]
                for key in (
                    ("m.room.create", ""),
                    ("m.room.power_levels", ""),
                    ("m.room.member", EVERYWHERE),
                )
            ]
            content = ('{"body":"something new","msgtype":"m.text"}', "{}")
            pdus.append(
                pen.write(EVERYWHERE, "m.room.message", auth, content, ts=TIME_MS + pen.depth)[1]
            )
        await stored(self.store, pdus, room_version=VERSION)

    async def _pen(self, number: int) -> Pen:
        """Return a pen at the end of a room."""
        room = RoomId(room_id(number))
        [tip] = await self.store.forward_extremities(room)
        last = await self.store.event(tip)
        assert last is not None
        keys = [("m.room.create", ""), ("m.room.power_levels", ""), ("m.room.member", EVERYWHERE)]
        state = await self.store.state_after(tip, keys=keys)
        self.pens[number] = Pen(
            number, room, tip, last.depth, {key: str(value) for key, value in state.items()}
        )
        return self.pens[number]

    async def plans(self, name: str, given: QueryArguments) -> list[QueryPlan]:
        """Return the plans of a query (storage.store.catalogue), when it is warm."""
        plans: list[QueryPlan] = []
        for _ in range(2):
            async with self.store.database.transaction(
                isolation="repeatable_read", readonly=True
            ) as conn:
                plans = await (await prepared(self.store.database, conn, name, given)).plans()
        return plans


Prepare = Callable[[AskedEngine, int], Awaitable[Question]]
"""Prepares the query of a round, on one side."""


@asynccontextmanager
async def sides(bench: Bench) -> AsyncIterator[tuple[AskedEngine, AskedEngine]]:
    """Yield the large database and the small one; build the missing ones."""
    async with sides_of(bench, SMALL if bench.quick else LARGE) as both:
        yield both


@asynccontextmanager
async def sides_of(
    bench: Bench, crowds: Sequence[Crowd]
) -> AsyncIterator[tuple[AskedEngine, AskedEngine]]:
    """Yield the databases of these crowds; build the missing ones."""
    async with AsyncExitStack() as stack:
        opened = []
        for crowd in crowds:
            dsn = await bench.kept_database(crowd.name, _builder(crowd))
            counted = TaskStatements(task=asyncio.current_task())
            store = await stack.enter_async_context(
                storage.open(
                    dsn,
                    server_name=SERVER,
                    observer=counted,
                    config=Config(statement_timeout_ms=600_000),
                )
            )
            opened.append(AskedEngine(f"{crowd.events:,} events", crowd, store, counted))
        gc.collect()
        gc.freeze()
        yield opened[0], opened[1]


def _builder(crowd: Crowd) -> Callable[[str], Awaitable[None]]:
    return lambda dsn: build(dsn, crowd)


async def ask_all(
    bench: Bench, both: Sequence[AskedEngine], asked: Mapping[str, tuple[Prepare, int]]
) -> None:
    """Measure queries by name, each with its number of rounds."""
    for name, (prepare, rounds) in asked.items():
        bench.results[name] = await in_turn(both, prepare, max(rounds, 5))


async def look_at(
    bench: Bench, side: AskedEngine, given: Mapping[str, tuple[str, QueryArguments]]
) -> None:
    """Add to results what Postgres reads for them, by the catalogue's query for each."""
    for name, (question, arguments) in given.items():
        bench.results[name]["looked_at"] = touched(await side.plans(question, arguments))


async def in_turn(both: Sequence[AskedEngine], prepare: Prepare, rounds: int) -> dict[str, Any]:
    """Return milliseconds, Python's part of them, and statements, on each side.

    ``prepare`` makes the query of a round; it is not timed.
    """
    taken: dict[str, list[AnswerCost]] = {side.name: [] for side in both}
    for number in range(WARM + rounds):
        for side in both:
            one = await measured(side, await prepare(side, number))
            if number >= WARM:
                taken[side.name].append(one)
    results: dict[str, Any] = {side.name: told(taken[side.name]) for side in both}
    works = [results[side.name]["cpu_ms"]["p50"] for side in both]
    return results | ({"ratio": round(works[0] / works[1], 2)} if len(both) == 2 else {})


class AnswerCost(NamedTuple):
    """The cost of one result: seconds on the clock, of this process, of Postgres; statements."""

    clock: float
    python: float
    postgres: float
    statements: int


async def measured(side: AskedEngine, question: Question) -> AnswerCost:
    """Run a query once, and measure it."""
    await side.watch()
    side.statements.count = 0
    postgres, python, begun = side.postgres_seconds(), time.process_time(), time.perf_counter()
    await question()
    took, python = time.perf_counter() - begun, time.process_time() - python
    return AnswerCost(took, python, side.postgres_seconds() - postgres, side.statements.count)


def told(taken: Sequence[AnswerCost]) -> dict[str, Any]:
    """Return milliseconds of the rounds (clock, CPU, both sides), and the most statements."""
    clock = [one.clock for one in taken]
    return {
        "ms": percentiles(clock, factor=1_000)
        | {"p10": round(sorted(clock)[len(clock) // 10] * 1_000, 3)},
        "cpu_ms": percentiles([one.python + one.postgres for one in taken], factor=1_000),
        "python_ms": round(statistics.median(one.python for one in taken) * 1_000, 3),
        "postgres_ms": round(statistics.median(one.postgres for one in taken) * 1_000, 3),
        "statements": max(one.statements for one in taken),
    }


def touched(plans: Sequence[QueryPlan]) -> dict[str, Any]:
    """Return the rows and pages that a query reads, and Postgres' own time, over its statements."""
    return {
        "statements": len(plans),
        "rows": sum(plan.rows for plan in plans),
        "pages": sum(plan.pages for plan in plans),
        "planning_ms": round(sum(plan.planning_ms for plan in plans), 2),
        "running_ms": round(sum(plan.execution_ms for plan in plans), 2),
        "sequential": sorted(set().union(*(plan.sequential for plan in plans))),
    }


async def throughput(ask_once: Callable[[int], Awaitable[object]], each: int) -> dict[str, Any]:
    """Run a hundred clients, each of which queries again after each result."""
    times: list[float] = []

    async def client(number: int) -> None:
        for turn in range(each):
            begun = time.perf_counter()
            await ask_once(number * each + turn)
            times.append(time.perf_counter() - begun)

    begun = time.perf_counter()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    took = time.perf_counter() - begun
    return {
        "clients": CLIENTS,
        "per_second": round(CLIENTS * each / took),
        "ms": percentiles(times, factor=1_000),
    }
