"""PgBouncer between the engine and Postgres: pool_mode = session works, the others are refused.

Debian's package is enough; `.ci/run` installs it where it may. PgBouncer reaches Postgres through a
proxy of this process, because the socket of the tests is not for other accounts.
"""

import asyncio
import os
import pwd
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg
import pytest

import storage
from storage.config import Config
from storage.database import Database
from storage.database.deployment import grant
from storage.database.dsn import DsnServer
from storage.database.migrate import HEAD_REVISION, migrate
from storage.database.session import PINNED, POOLING, open_driver, pinned
from storage.database.translate import translate
from storage.errors import DatabaseUnavailable, InputError, InstanceNameTaken
from storage.ids import UserId
from storage.testing import RoomBuilder
from tests.cli.running import ROOT, room_storage_beside
from tests.maintenance.rooms import findings
from tests.postgres import with_database
from tests.replication.proxies import Proxy, unix_socket_of

PROGRAM: Final = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SERVER: Final = "s1.test"
ALICE: Final = UserId(f"@alice:{SERVER}")
IGNORED: Final = ",".join(("options", "lock_timeout", "statement_timeout", *pinned(Config())))
IDLE: Final = "idle_in_transaction_session_timeout"

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="PgBouncer is not installed: run .ci/run as root, or install it"
)


@asynccontextmanager
async def bouncer(dsn: str, pool_mode: str, **settings: object) -> AsyncIterator[str]:
    """The DSN of the same database through a PgBouncer of the test's own."""
    with tempfile.TemporaryDirectory(prefix="room-storage-pgbouncer-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        async with Proxy(unix_socket_of(dsn)) as proxy, Proxy(folder / ".s.PGSQL.6432") as front:
            lines = [
                "[databases]",
                f"* = host=127.0.0.1 port={proxy.port} user=postgres",
                "[pgbouncer]",
                "auth_type = any",
                "listen_port = 6432",
                f"unix_socket_dir = {folder}",
                f"pool_mode = {pool_mode}",
                "server_tls_sslmode = disable",
                *(f"{key} = {value}" for key, value in settings.items()),
            ]
            (folder / "pgbouncer.ini").write_text("\n".join(lines))
            account = []
            if os.geteuid() == 0:  # it does not run as root
                os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
                account = ["-u", "nobody"]
            process = await asyncio.create_subprocess_exec(
                str(PROGRAM), "-q", *account, str(folder / "pgbouncer.ini")
            )
            try:
                await answers(folder / ".s.PGSQL.6432")
                database = dsn.partition("/postgres?")[0].rpartition("/")[2].partition("?")[0]
                yield f"postgresql://postgres@127.0.0.1:{front.port}/{database}?sslmode=disable"
            finally:
                process.kill()
                await process.wait()


async def answers(path: Path) -> None:
    """PgBouncer listens."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(path)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return


# --------------------------------------------------------------------------------------------------
# pool_mode = session


@pytest.mark.parametrize("ignored", ["extra_float_digits", f"{IGNORED},{IDLE}"])
async def test_every_setting_holds_in_a_session(dsn: str, ignored: str) -> None:
    """Whether PgBouncer refuses settings at the start of a session, or drops them."""
    found: dict[str, str] = {}
    async with bouncer(dsn, "session", ignore_startup_parameters=ignored) as url:
        for _ in range(2):  # the second client gets the server process of the first
            async with await Database.open(url) as database, database.connection() as conn:
                found = {
                    name: await conn.fetchval("SELECT current_setting($1::text)", name)
                    for name in (*PINNED, "application_name", "statement_timeout", IDLE)
                }
                assert conn.backend_pid == await conn.fetchval("SELECT pg_backend_pid()")
        async with await Database.open(dsn) as database, database.connection() as conn:
            for name, value in found.items():
                assert await conn.fetchval("SELECT current_setting($1::text)", name) == value


async def test_a_store_works_in_sessions(dsn: str) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    room.message(ALICE, "hello")
    async with bouncer(dsn, "session") as url:
        async with storage.open(url, server_name=SERVER) as store:
            results = await store.append(room.pdus)
            assert {one.outcome for one in results} == {"stored"}
            [joined] = (await store.sync(ALICE)).join.values()
            assert joined.timeline.events[-1].content["body"] == "hello"
            assert await findings(store) == []
            with pytest.raises(InstanceNameTaken):
                async with storage.open(url, config=Config(enter_wait_ms=100)):
                    pass
        async with storage.open(url) as store:
            assert await store.rooms_of(ALICE) == [room.room_id]


async def test_a_process_that_vanished_leaves_its_name(dsn: str) -> None:
    """PgBouncer keeps its session with Postgres, and takes the name of the process from it."""
    async with bouncer(dsn, "session") as url, storage.open(url, server_name=SERVER) as store:
        store.database._pool.end_all()
        store.database._connect.server = DsnServer("postgresql://127.0.0.1:1/nowhere")
        async with storage.open(url, config=Config(enter_wait_ms=5_000)):
            pass


async def test_migrations_and_commands_work_in_sessions(empty_dsn: str) -> None:
    async with bouncer(empty_dsn, "session") as url:
        assert await migrate(url) == HEAD_REVISION
        assert await grant(url) == []
        done = await room_storage_beside("verify", "--json", "--dsn", url)
        assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------
# other modes


@pytest.mark.parametrize(
    "mode, settings",
    [
        ("transaction", {}),
        ("transaction", {"server_round_robin": 1}),
        ("transaction", {"default_pool_size": 1}),
        ("transaction", {"ignore_startup_parameters": f"{IGNORED},{IDLE}"}),
        ("transaction", {"min_pool_size": 5, "server_round_robin": 1}),
        ("statement", {}),
    ],
)
async def test_other_modes_are_refused_in_one_sentence(
    dsn: str, mode: str, settings: dict[str, object]
) -> None:
    async with bouncer(dsn, mode, **settings) as url:
        for _ in range(5):
            with pytest.raises(InputError) as caught:
                await Database.open(url)
            assert str(caught.value) == POOLING
        for call in (migrate, grant):
            with pytest.raises(InputError, match="pool_mode = session"):
                await call(url)
        done = await room_storage_beside("stats", "--dsn", url)
        assert (done.returncode, done.stderr) == (2, f"error: {POOLING}\n")


async def test_it_is_refused_while_others_use_the_pool(dsn: str) -> None:
    """Their transactions take and return server processes between any two statements of ours."""

    async def busy(url: str) -> None:
        driver = await asyncpg.connect(url, statement_cache_size=0)
        try:
            while True:
                await driver.execute("SELECT 1")
        finally:
            driver.terminate()

    async with (
        bouncer(dsn, "transaction", default_pool_size=3) as url,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(busy(url)) for _ in range(4)]
        for _ in range(20):
            with pytest.raises(InputError) as caught:
                await Database.open(url)
            assert str(caught.value) == POOLING
        for task in tasks:
            task.cancel()


async def test_sessions_need_a_pool_of_two(dsn: str) -> None:
    config = Config(pool_size_max=1, connect_timeout_ms=500)
    async with bouncer(dsn, "session", default_pool_size=1) as url:
        with pytest.raises(DatabaseUnavailable, match="no answer within the time limit"):
            await Database.open(url, config=config)


async def test_the_page_has_the_errors_that_are_printed(dsn: str, tmp_path: Path) -> None:
    printed: dict[str, int] = {}

    async def stats(url: str, **environ: str) -> None:
        done = await room_storage_beside("stats", "--dsn", url, given=b"", **environ)
        printed[done.stderr] = done.returncode

    quick = {"STORAGE_CONNECT_TIMEOUT_MS": "500"}
    async with bouncer(dsn, "session") as url:
        await stats(f"{url}&keepalives=1")
        await stats(with_database(url, "absent"))
    async with bouncer(dsn, "transaction") as url:
        await stats(url)
    async with bouncer(dsn, "session", max_client_conn=1) as url:
        await stats(url)
    async with bouncer(dsn, "session", default_pool_size=1) as url:
        await stats(url, **quick)
    async with bouncer(dsn, "session", default_pool_size=1, query_wait_timeout=1) as url:
        await stats(url)
    users = tmp_path / "users"
    users.write_text('"postgres" "secret"\n')
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    async with bouncer(dsn, "session", auth_type="scram-sha-256", auth_file=users) as url:
        await stats(url)
    page = (ROOT / "docs/how-to/pgbouncer.md").read_text("utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(listed) == len(printed) == 7, printed
    for text in listed:
        assert [code for line, code in printed.items() if text in line] == [
            2 if text in {"a pooler such as PgBouncer", "has an unknown option"} else 3
        ], text
    [refused] = [line for line in printed if "SASL" in line]
    assert "no password in the DSN or in PGPASSWORD; the password file " in refused


def test_a_lost_statement_names_the_reason() -> None:
    for error in (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError):
        assert str(translate(error("prepared statement x"))).startswith(
            f"prepared statement x; {POOLING}"
        )


async def test_without_a_pooler_no_second_session_is_opened(dsn: str) -> None:
    opened = await open_driver(DsnServer(dsn), pinned(Config()))
    assert not opened.is_pooled
    await opened.driver.close()


# --------------------------------------------------------------------------------------------------
# Spark


@pytest.mark.parametrize("ignored", ["extra_float_digits", f"{IGNORED},{IDLE},client_encoding"])
async def test_reads_of_spark_want_a_direct_connection(dsn: str, ignored: str) -> None:
    pytest.importorskip("adbc_driver_postgresql")
    from storage.database.arrow_results import DIRECT, arrow_snapshot  # noqa: PLC0415

    def read(url: str) -> None:
        with arrow_snapshot(url):
            pass

    async with bouncer(dsn, "session", ignore_startup_parameters=ignored) as url:
        with pytest.raises(InputError) as caught:
            await asyncio.to_thread(read, url)
    assert str(caught.value) == f"{DsnServer(url).address}: {DIRECT}"
