"""Fixtures for all tests: a real Postgres, a fresh database in 30 ms, a connection that rolls back.

They also fail a test on stray exceptions.

Which Postgres: STORAGE_DSN (a server where databases may be created), else
STORAGE_TEST_POSTGRES=debian (the programs in /usr/lib/postgresql/15/bin), else the embedded one.
There is one server per session, shared by the workers of xdist; fsync is off.

STORAGE_TEST_MIGRATIONS: the migrations of a later release. The tests run their "pre" steps and
check that this release works on the result.

* `dsn`: the test's own migrated database, made from a template and dropped afterwards.
  That takes 20 + 6 ms in memory; file_copy costs two checkpoints.
  `database`: a `Database` on it. Use it for commits, locks, several connections.
* `conn`: a connection in a transaction that is rolled back. Use it for everything else.
* `empty_dsn`: the test's own database without any table.
"""

import asyncio
import gc
import hashlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import asyncpg
import hypothesis  # also before `gc.freeze`: trio's plugin looks for referrers
import pytest

from storage.config import Config
from storage.database import Connection, Database
from storage.database import migrate as schema_check
from storage.database.embedded import EmbeddedPostgres
from storage.database.migrate import MigrationOptions, migrate, migrate_before, scripts_directory
from storage.testing import builder
from tests.long_run import long_ones, long_run
from tests.memory_disk import cluster_folder, remove_abandoned
from tests.oracle.example_databases import ExampleDatabases
from tests.postgres import chosen_binaries, with_database

SERVER_CONFIG = Config(
    embedded_fsync=False, embedded_shared_buffers_mb=128, embedded_connections_max=200
)

os.environ.setdefault("STORAGE_PREPARE_AHEAD", "false")
"""Most tests close their store before that pays; tests/database/test_prepared.py is about it."""

hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

_numbers = itertools.count(1)


# --------------------------------------------------------------------------------------------------
# the server


def _session_folder(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this session share."""
    base = factory.getbasetemp()
    return base.parent if hasattr(config, "workerinput") else base


@pytest.fixture(scope="session")
def server_dsn(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The maintenance database of the server under test."""
    given = os.environ.get("STORAGE_DSN")
    if given:
        yield given
        return
    server = EmbeddedPostgres(
        cluster_folder(_session_folder(pytestconfig, tmp_path_factory)),
        config=SERVER_CONFIG,
        binaries=chosen_binaries(),
    )
    yield server.start()
    server.stop()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Free the memory that a killed session left occupied."""
    if not hasattr(session.config, "workerinput"):
        remove_abandoned()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the cluster when all workers are done: pytest keeps its folders for 3 sessions."""
    if not hasattr(session.config, "workerinput"):
        base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        shutil.rmtree(cluster_folder(base), ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# the databases


@pytest.fixture(scope="session")
def template_name(server_dsn: str) -> str:
    """Return the template database's name; it is made once per server and set of migrations."""
    return asyncio.run(_make_template(server_dsn))


async def _make_template(server_dsn: str) -> str:
    newer = os.environ.get("STORAGE_TEST_MIGRATIONS")
    folder = Path(newer) if newer else scripts_directory()
    scripts = sorted(path for path in folder.rglob("*") if path.suffix in {".py", ".sql"})
    scripts += [
        Path(schema_check.__file__).with_name(name) for name in ("schema.sql", "grants.sql")
    ]
    name = (
        "storage_test_"
        + hashlib.sha256(b"".join(path.read_bytes() for path in scripts)).hexdigest()[:16]
    )
    connection = await asyncpg.connect(server_dsn)
    try:
        await connection.execute("SELECT pg_advisory_lock(hashtext('storage_test_template'))")
        if not await connection.fetchval(
            "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name
        ):
            await connection.execute(f"DROP DATABASE IF EXISTS {name}_new")
            await connection.execute(
                f"CREATE DATABASE {name}_new TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'"
            )
            await migrate(with_database(server_dsn, f"{name}_new"))
            if newer:
                await migrate_before(
                    with_database(server_dsn, f"{name}_new"), how=MigrationOptions(scripts=folder)
                )
            await connection.execute(f"ALTER DATABASE {name}_new RENAME TO {name}")
    finally:
        await connection.close()
    return name


@asynccontextmanager
async def _fresh_database(server_dsn: str, template: str, worker_id: str) -> AsyncIterator[str]:
    name = f"storage_test_{os.getpid()}_{worker_id}_{next(_numbers)}"
    connection = await asyncpg.connect(server_dsn)
    try:
        await connection.execute(
            f"CREATE DATABASE {name} TEMPLATE {template} ENCODING 'UTF8' "
            "LOCALE 'C' STRATEGY wal_log"
        )
        try:
            yield with_database(server_dsn, name)
        finally:
            await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


@pytest.fixture
def databases(server_dsn: str, template_name: str, worker_id: str) -> ExampleDatabases:
    """A fresh database for each example of a state machine."""
    return ExampleDatabases(lambda: _fresh_database(server_dsn, template_name, worker_id))


@pytest.fixture
async def dsn(server_dsn: str, template_name: str, worker_id: str) -> AsyncIterator[str]:
    """A migrated database of the test's own."""
    async with _fresh_database(server_dsn, template_name, worker_id) as fresh:
        yield fresh


@pytest.fixture
async def another_dsn(server_dsn: str, template_name: str, worker_id: str) -> AsyncIterator[str]:
    """A second migrated database of the test's own."""
    async with _fresh_database(server_dsn, template_name, worker_id) as fresh:
        yield fresh


@pytest.fixture
async def empty_dsn(server_dsn: str, worker_id: str) -> AsyncIterator[str]:
    """A database of the test's own without any table."""
    async with _fresh_database(server_dsn, "template0", worker_id) as fresh:
        yield fresh


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    """A `Database` on `dsn`."""
    async with await Database.open(dsn) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_dsn(server_dsn: str, template_name: str, worker_id: str) -> Iterator[str]:
    """One migrated database per worker that nobody writes to for good."""
    with asyncio.Runner() as runner:
        databases = AsyncExitStack()
        yield runner.run(
            databases.enter_async_context(
                _fresh_database(server_dsn, template_name, f"{worker_id}_shared")
            )
        )
        runner.run(databases.aclose())


@pytest.fixture
async def conn(shared_dsn: str) -> AsyncIterator[Connection]:
    """A connection in a transaction that is rolled back at the end."""
    driver = await asyncpg.connect(shared_dsn)
    try:
        await driver.execute("BEGIN")
        yield Connection(driver)
        await driver.execute("ROLLBACK")
    finally:
        await driver.close()


# --------------------------------------------------------------------------------------------------
# long tests, and names of cases


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long_tests.txt."""
    long = set(long_ones(item.nodeid for item in items))
    for item in items:
        if item.nodeid in long:
            item.add_marker(long_run)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by a digest where its value is text that a command line cannot repeat.

    `make mutants` runs tests by their names.
    """
    if not isinstance(val, (str, bytes)) or (
        isinstance(val, str) and re.fullmatch(r"[\w.@$!#:/+ -]*", val, re.ASCII) and len(val) < 80
    ):
        return None
    written = val.encode("utf-8", "surrogatepass") if isinstance(val, str) else val
    return hashlib.sha256(written).hexdigest()[:8]


# --------------------------------------------------------------------------------------------------
# stray exceptions


class _Stray(logging.Handler):
    """Collects what is reported of tasks and callbacks that nobody looked at."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True, scope="module")
def freeze_before_module() -> None:
    """Take all objects so far out of the collections after each test, which cost little then.

    These are imported modules, reports of tests, and what lasts for the session.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_rooms_in_each_test() -> None:
    """A builder without a seed makes the same room, whichever tests ran before."""
    builder._unseeded = itertools.count()


@pytest.fixture(autouse=True)
def no_stray_exceptions(request: pytest.FixtureRequest) -> Iterator[None]:
    """An exception that ends in a task, where nobody awaits it, fails the test.

    A page of the documentation (`page_dsn`) has event loops of its own. Without a collection after
    it, what it leaves behind would fail a later test.
    """
    stray = _Stray()
    loggers = [logging.getLogger(name) for name in ("asyncio", "storage.store.open")]
    for logger in loggers:
        logger.addHandler(stray)
    try:
        yield
        if request.node.get_closest_marker("asyncio") or "page_dsn" in request.fixturenames:
            gc.collect()
    finally:
        for logger in loggers:
            logger.removeHandler(stray)
    if stray.messages:
        pytest.fail("stray exception:\n" + "\n".join(stray.messages))
