"""The embedded Postgres: shared, recovered, and without any trace outside its folder."""

import asyncio
import json
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from storage.config import Config
from storage.database import embedded as programs
from storage.database.embedded import (
    Account,
    Binaries,
    EmbeddedPostgres,
    data_directory,
    embedded_postgres,
)
from storage.errors import DatabaseUnavailable, InputError
from tests.postgres import chosen_binaries

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Config(embedded_shared_buffers_mb=16, embedded_connections_max=10, embedded_fsync=False)
IS_ROOT = os.geteuid() == 0

# Starts or joins the server, says so, and leaves when its standard input ends.
USER = """
import json, os, sys
from pathlib import Path
from storage.config import Config
from storage.database.embedded import Binaries
from storage.database.embedded import EmbeddedPostgres
import asyncio, asyncpg

directory, programs, uid = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
chosen = Binaries.at(Path(programs)) if programs else None
if uid:
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
config = Config(embedded_shared_buffers_mb=16, embedded_connections_max=10, embedded_fsync=False)
server = EmbeddedPostgres(directory, config=config, binaries=chosen)
dsn = server.start()

async def who():
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval("SELECT current_user")
    finally:
        await connection.close()

print(json.dumps({"dsn": dsn, "pid": server.pid, "user": asyncio.run(who())}), flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user reaches (pytest's own are private)."""
    with tempfile.TemporaryDirectory(prefix="embedded-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def server_in(directory: Path, config: Config = CONFIG) -> EmbeddedPostgres:
    return EmbeddedPostgres(directory, config=config, binaries=chosen_binaries())


def user_of(
    directory: Path, *, uid: int = 0, binaries: Path | None = None
) -> tuple["subprocess.Popen[str]", dict[str, object]]:
    """Another process that uses the server, and what it says of it."""
    chosen = binaries or (chosen_binaries() or Binaries(Path(), 0)).path
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            USER,
            str(directory),
            "" if chosen == Path() else str(chosen),
            str(uid),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def leave(process: "subprocess.Popen[str]") -> None:
    process.communicate("", timeout=60)
    assert process.returncode == 0


def run_sql(dsn: str, *statements: str) -> object:
    """The value of the last statement."""

    async def run() -> object:
        connection = await asyncpg.connect(dsn)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetchval(statements[-1])
        finally:
            await connection.close()

    return asyncio.run(run())


def permissions_of(*paths: Path) -> list[tuple[str, int, int, int]]:
    found = [(path, path.lstat()) for path in paths]
    return [
        (str(path), stat.S_IMODE(entry.st_mode), entry.st_uid, entry.st_gid)
        for path, entry in found
    ]


def is_alive(pid: int | None) -> bool:
    return (
        pid is not None
        and psutil.pid_exists(pid)
        and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    )


# --------------------------------------------------------------------------------------------------
# life of a server


@pytest.mark.every_postgres
def test_what_was_written_is_there_after_a_restart(place: Path) -> None:
    server = server_in(place)
    assert (
        run_sql(server.start(), "CREATE TABLE t (n int)", "INSERT INTO t VALUES (7) RETURNING n")
        == 7
    )
    pid = server.pid
    assert is_alive(pid)
    server.stop()
    server.stop()
    assert not is_alive(pid)
    assert server.pid is None
    assert run_sql(server.start(), "SELECT n FROM t") == 7
    server.stop()


@pytest.mark.every_postgres
def test_a_killed_server_is_recovered(place: Path) -> None:
    server = server_in(place, Config(embedded_shared_buffers_mb=16, embedded_fsync=True))
    run_sql(server.start(), "CREATE TABLE t (n int)", "INSERT INTO t VALUES (7) RETURNING n")
    assert server.pid is not None
    process = psutil.Process(server.pid)
    os.kill(process.pid, signal.SIGKILL)
    assert server._has_ended(process)
    assert run_sql(server.start(), "SELECT n FROM t") == 7
    assert "database system was interrupted" in server.log.read_text()
    server.stop()


@pytest.mark.parametrize("left", ["number of another program", "number of nobody", "empty"])
def test_a_stale_lock_file_is_no_obstacle(place: Path, left: str) -> None:
    server = server_in(place)
    server.start()
    path = place / "postgresql" / "postmaster.pid"
    lines = path.read_text().splitlines()
    server.stop()
    number = {"number of another program": os.getpid(), "number of nobody": 2**22 + 1}.get(left)
    path.write_text("" if number is None else "\n".join([str(number), *lines[1:], ""]))
    (place / "run" / ".s.PGSQL.5432.lock").write_text(f"{os.getpid()}\n")
    (place / "run" / ".s.PGSQL.5432").touch()
    assert run_sql(server.start(), "SELECT 7") == 7
    assert server.pid != number
    server.stop()


def test_a_half_made_cluster_is_made_again(place: Path) -> None:
    (place / "postgresql.new" / "base").mkdir(parents=True)
    server = server_in(place)
    assert run_sql(server.start(), "SELECT 7") == 7
    assert not (place / "postgresql.new").exists()
    server.stop()


def test_a_server_that_lost_its_socket_is_started_again(place: Path) -> None:
    server = server_in(place)
    server.start()
    before = server.pid
    (place / "run" / ".s.PGSQL.5432").unlink()
    assert run_sql(server.start(), "SELECT 7") == 7
    assert server.pid != before
    server.stop()


async def test_the_context_manager_gives_a_dsn_and_leaves(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "storage")
    async with embedded_postgres(place, config=CONFIG, binaries=chosen_binaries()) as dsn:
        connection = await asyncpg.connect(dsn)
        settings = dict(await connection.fetch("SELECT name, setting FROM pg_settings"))
        await connection.close()
    assert f"the embedded Postgres has its data in {place}" in caplog.messages
    assert settings["listen_addresses"] == ""
    assert settings["jit"] == "off"
    assert settings["server_encoding"] == "UTF8"
    assert server_in(place).pid is None


# --------------------------------------------------------------------------------------------------
# sharing


@pytest.mark.every_postgres
def test_processes_share_one_server_and_the_last_stops_it(place: Path) -> None:
    first, said_first = user_of(place)
    second, said_second = user_of(place)
    assert said_first == said_second
    leave(first)
    assert is_alive(int(str(said_second["pid"])))
    leave(second)
    assert not is_alive(int(str(said_second["pid"])))


def test_a_killed_user_counts_no_more(place: Path) -> None:
    first, said = user_of(place)
    second, _ = user_of(place)
    first.kill()
    first.communicate()
    leave(second)
    assert not is_alive(int(str(said["pid"])))


def test_the_server_outlives_a_killed_starter_and_the_next_user_finds_it(place: Path) -> None:
    first, said = user_of(place)
    first.kill()
    first.communicate()
    server = server_in(place)
    server.start()
    assert server.pid == said["pid"]
    server.stop()


def test_many_processes_that_start_at_once_get_one_server(place: Path) -> None:
    command = [sys.executable, "-c", USER, str(place), "", "0"]
    pipe = subprocess.PIPE
    with_many = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) for _ in range(4)
    ]
    said = {process.stdout.readline() for process in with_many if process.stdout}
    assert len(said) == 1
    for process in with_many:
        leave(process)


def test_a_lock_that_is_never_given_back_is_an_error(place: Path) -> None:
    impatient = server_in(place, Config(embedded_start_timeout_ms=50))
    holder = server_in(place)
    with holder._alone(), pytest.raises(DatabaseUnavailable, match="another process"):
        impatient.start()


# ------------------------------------------------------------------------------------------------
# accounts and permissions


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_root_runs_it_as_nobody_and_changes_nothing_outside(place: Path) -> None:
    private = place / "private"
    private.mkdir(mode=0o700)
    directory = private / "data"
    directory.mkdir()
    around = [
        *private.parents,
        private,
        directory,
        Path(sys.prefix),
        *Path(sys.prefix).parents,
        Path("/etc/passwd"),
        Path("/root"),
    ]
    before = permissions_of(*around)
    server = server_in(directory)
    run_sql(server.start(), "SELECT 1")
    assert psutil.Process(server.pid).uids().effective == pwd.getpwnam("nobody").pw_uid
    assert permissions_of(*around) == before
    assert stat.S_IMODE((directory / "postgresql").stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "run").stat().st_mode) == 0o700
    server.stop()
    assert permissions_of(*around) == before


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_an_ordinary_user_runs_it(place: Path) -> None:
    uid = pwd.getpwnam("nobody").pw_uid
    directory = place / "data"
    directory.mkdir()
    os.chown(directory, uid, uid)
    reachable = (chosen_binaries() or programs.find(Account.for_server())).path
    process, said = user_of(directory, uid=uid, binaries=reachable)
    assert said["user"] == "postgres"
    assert psutil.Process(int(str(said["pid"]))).uids().effective == uid
    leave(process)


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_programs_out_of_reach_are_copied_once(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account.for_server()
    wheel = programs.find(Account(0, 0, switch=False))
    monkeypatch.setattr(Account, "reaches", lambda _, path: place in path.parents)
    monkeypatch.setattr(programs, "COPIES", (place / "programs",))
    copied = programs.find(account)
    assert copied.path.is_relative_to(place)
    assert copied.major == wheel.major
    assert account.run([copied.path / "postgres", "--version"])[0] == 0
    assert account.run([copied.path / "initdb", "--version"])[0] == 0
    stamp = (copied.path / "postgres").stat().st_ino
    assert programs.find(account) == copied
    assert (copied.path / "postgres").stat().st_ino == stamp


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_programs_that_others_may_write_are_not_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "programs").mkdir()
    (place / "programs").chmod(0o777)
    monkeypatch.setattr(Account, "reaches", lambda _, path: place in path.parents)
    monkeypatch.setattr(programs, "COPIES", (place / "programs",))
    with pytest.raises(DatabaseUnavailable, match="cannot run"):
        programs.find(Account.for_server())


def test_an_account_reaches_what_the_permission_bits_say(place: Path) -> None:
    stranger = Account(12345, 12345, switch=True)
    assert stranger.reaches(place / "file")
    place.chmod(0o700)
    assert not stranger.reaches(place / "file")
    assert Account(os.geteuid(), os.getegid(), switch=True).reaches(place / "file")


# --------------------------------------------------------------------------------------------------
# paths and failures


@pytest.mark.every_postgres
def test_a_path_too_long_for_a_socket_gets_a_short_one(place: Path) -> None:
    directory = place / ("x" * 100) / "data"
    server = server_in(directory)
    dsn = server.start()
    sockets = Path((directory / "socket").read_text())
    assert not sockets.is_relative_to(directory)
    assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert run_sql(dsn, "SELECT 7") == 7
    other, said = user_of(directory)
    assert said["dsn"] == dsn
    leave(other)
    server.stop()
    assert not sockets.exists()


def test_a_data_directory_of_another_version_is_refused(place: Path) -> None:
    (place / "postgresql").mkdir()
    (place / "postgresql" / "PG_VERSION").write_text("9\n")
    with pytest.raises(DatabaseUnavailable, match="Postgres 9"):
        server_in(place).start()


def test_a_server_that_does_not_come_up_says_why(place: Path) -> None:
    server = server_in(place)
    server.start()
    server.stop()
    (place / "postgresql" / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(DatabaseUnavailable, match="no_such_setting"):
        server.start()
    assert server.pid is None


def test_a_folder_that_cannot_be_made_says_so(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(DatabaseUnavailable, match="cannot be started"):
        server_in(place / "file" / "data").start()


def test_programs_that_are_not_there_say_so(place: Path) -> None:
    with pytest.raises(DatabaseUnavailable, match="no Postgres can be run"):
        Binaries.at(place)


def test_the_data_directory_comes_from_the_environment() -> None:
    assert data_directory({"STORAGE_DATA_DIR": "/srv/rooms"}) == Path("/srv/rooms")
    assert data_directory({}).parent.name == "room-storage"
    with pytest.raises(InputError, match="STORAGE_DATA_DIR is empty: unset it"):
        data_directory({"STORAGE_DATA_DIR": ""})


def test_the_users_data_of_another_baseline_are_in_nobodys_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A database of release 0.2.0 or earlier cannot be migrated: it stays in its own folder."""
    found = {data_directory({})}
    monkeypatch.setattr("storage.database.embedded.BASELINE", "baseline 9.9.0")
    assert data_directory({}) not in found
    assert data_directory({"STORAGE_DATA_DIR": "/srv/rooms"}) == Path("/srv/rooms")


def test_nothing_listens_on_the_network(place: Path) -> None:
    server = server_in(place)
    server.start()
    connections = psutil.Process(server.pid).net_connections(kind="inet")
    assert [found for found in connections if found.status == psutil.CONN_LISTEN] == []
    assert socket.AF_UNIX in {
        found.family for found in psutil.Process(server.pid).net_connections(kind="unix")
    }
    server.stop()
