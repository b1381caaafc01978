"""SIGINT and SIGTERM in the middle of each command: how it ends, and what it leaves behind.

A table that the command needs is locked, so that the signal always comes while a statement runs.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

import storage
from storage.cli.app import COMMANDS as COMMANDS_OF_APP
from storage.cli.app import SPARK
from storage.testing import RoomBuilder, build_room, ndjson_line
from tests.cli.running import ROOT, environment, room_storage, started
from tests.long_run import long_run
from tests.maintenance.rooms import LIVELY, SERVER
from tests.pausing import pause
from tests.small_limits import SMALL_BATCHES

GO_ON = "run the same command again to go on"
COMMANDS = {
    "verify": ("events", "nothing was changed"),
    "verify --repair": ("events", f"repaired rooms stay repaired; {GO_ON}"),
    "gc": ("events", GO_ON),
    "gc --room {room}": ("events", GO_ON),
    "censor": ("events", GO_ON),
    "censor --dry-run": ("events", "nothing was changed"),
    "archive --older-than 0 --to {folder}": ("events", GO_ON),
    "archive --older-than 0 --to {folder} --dry-run": ("events", "nothing was changed"),
    "archive --back": ("events", GO_ON),
    "archive --sweep": ("archive_packs", GO_ON),
    "train-dictionary": ("events", "nothing was changed"),
    "purge {room} --before {event}": ("events", GO_ON),
    "purge {room} --all --force": ("state_groups", GO_ON),
    "purge --retention": ("events", GO_ON),
    "purge --resume": ("purge_jobs", GO_ON),
    "purge --jobs": ("purge_jobs", ""),
    "rebuild-visibility {room}": ("visibility", "nothing was changed"),
    "forget-user @user1:s1.test": ("erased_users", GO_ON),
    "forget-user --remove @user1:s1.test": ("events", GO_ON),
    "export-user @user1:s1.test {folder}/user1": ("events", "no folder was written"),
    "jobs": ("background_jobs", GO_ON),
    "jobs --list": ("background_jobs", ""),
    "stats": ("events", ""),
    "explain sync --user @user1:s1.test": ("events", ""),
    "explain-visibility {event} s9.test": ("events", ""),
    "import {file}": ("events", f"stored events stay; {GO_ON}"),
    "export {folder}/out.ndjson": ("events", "no file was written"),
    "migrate": ("alembic_version", f"the steps before stay done; {GO_ON}"),
    "migrate --list": ("alembic_version", ""),
    "demo": ("deployment", ""),
}
OTHERS = {
    "inspect": "a signal is its regular end: test_inspect.py",
    "serve": "a signal is its regular end: test_serve.py",
    "spark": "test_spark.py",
}

WAITING = """
SELECT count(*)
FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock'
"""
LEFT = """
SELECT (SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name LIKE 'room-storage%')
    + (SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
        WHERE d.datname = current_database() AND l.locktype = 'advisory')
    + (SELECT count(*) FROM pg_class WHERE relpersistence = 't')
"""


def test_no_command_is_left_out() -> None:
    named = {command.name for command in (*COMMANDS_OF_APP, SPARK)}
    assert {line.split()[0] for line in COMMANDS} | set(OTHERS) == named


async def filled(dsn: str, events: int = 60) -> RoomBuilder:
    room = build_room(LIVELY, events, seed=4, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus, room_version=room.version)
    return room


def arguments(line: str, room: RoomBuilder, folder: Path) -> list[str]:
    file = folder / "in.ndjson"
    file.write_bytes(b"".join(map(ndjson_line, room.generated())))
    event = room.events[40].event_id
    return [
        part.format(room=room.room_id, event=event, file=file, folder=folder)
        for part in line.split()
    ]


@asynccontextmanager
async def locked(dsn: str, table: str) -> AsyncIterator[None]:
    """Nobody else can read the table; the block begins once somebody waits for it."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(f"BEGIN; LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield
    finally:
        await conn.close()


async def until(
    conn: asyncpg.Connection,
    sql: str,
    *,
    at_least: int = 0,
    at_most: int = 1 << 30,
    seconds: float = 60,
) -> None:
    async with asyncio.timeout(seconds):
        while not at_least <= await conn.fetchval(sql) <= at_most:
            await pause()


async def interrupted(
    dsn: str, command: list[str], table: str, *signals: signal.Signals
) -> tuple[int, str, str]:
    """Run a command until it waits for the table, send the signals; return how it ended."""
    watcher = await asyncpg.connect(dsn)
    try:
        async with locked(dsn, table):
            # the demonstration would use a schema of its own
            running = await asyncio.to_thread(
                started, *command, STORAGE_DSN=dsn, STORAGE_DATABASE_SCHEMA="public"
            )
            await until(watcher, WAITING, at_least=1)
            for one in signals:
                running.send_signal(one)
                await asyncio.sleep(0.05)
            output, errors = await asyncio.to_thread(running.communicate, None, 30)
        await until(watcher, LEFT, at_most=0)
    finally:
        await watcher.close()
    return running.returncode, output.decode(), errors.decode()


# they end where another command does; `make soak` interrupts these, too
ALIKE = {
    "gc --room {room}",
    "censor --dry-run",
    "archive --older-than 0 --to {folder} --dry-run",
    "archive --sweep",
    "purge --jobs",
    "jobs --list",
    "migrate --list",
    "explain-visibility {event} s9.test",
}


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=(long_run,) if line in ALIKE else ()) for line in COMMANDS],
)
async def test_one_interrupt_ends_it(dsn: str, tmp_path: Path, line: str) -> None:
    room = await filled(dsn)
    table, advice = COMMANDS[line]
    command = arguments(line, room, tmp_path)
    before = sorted(tmp_path.iterdir())
    code, output, errors = await interrupted(dsn, command, table, signal.SIGINT)
    said = f"interrupted: {advice}\n" if advice else "interrupted\n"
    assert (code, errors.splitlines(keepends=True)[-1]) == (130, said)
    assert "Traceback" not in errors
    assert output == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "signals,code",
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGINT, signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT], 130),
    ],
)
async def test_other_signals_and_impatience(
    dsn: str, tmp_path: Path, signals: list[signal.Signals], code: int
) -> None:
    room = await filled(dsn)
    command = arguments("purge {room} --before {event}", room, tmp_path)
    ended, output, errors = await interrupted(dsn, command, "state_groups", *signals)
    assert (ended, output) == (code, "")
    assert "Traceback" not in errors


async def test_the_end_is_json_where_the_log_is(dsn: str, tmp_path: Path) -> None:
    command = ["--log-format", "json", "gc"]
    code, output, errors = await interrupted(dsn, command, "events", signal.SIGINT)
    [line] = errors.splitlines()
    assert (code, output) == (130, "")
    assert json.loads(line)["message"] == f"interrupted: {GO_ON}"


async def test_a_purge_goes_on_after_an_interrupt(dsn: str, tmp_path: Path) -> None:
    room = await filled(dsn, 300)
    command = ["purge", room.room_id, "--before", room.events[250].event_id, "--json", "--quiet"]
    slow = {
        "STORAGE_PURGE_PAUSE_MS": "1000",  # so that the signal comes before the end
        "STORAGE_DSN": dsn,
    }
    watcher = await asyncpg.connect(dsn)
    running = await asyncio.to_thread(started, *command, first=SMALL_BATCHES.format(10), **slow)
    await until(watcher, "SELECT COALESCE(sum(deleted_count), 0) FROM purge_jobs", at_least=20)
    running.send_signal(signal.SIGINT)
    output, errors = await asyncio.to_thread(running.communicate, None, 30)
    assert (running.returncode, output) == (130, b"")
    assert errors.decode() == f"interrupted: {GO_ON}\n"
    await until(watcher, LEFT, at_most=0)
    await watcher.close()
    done = room_storage(*command, STORAGE_DSN=dsn)
    [purged] = json.loads(done.stdout)["rooms"]
    assert (done.returncode, purged["job"]["phase"], purged["job"]["job_id"]) == (0, "done", 1)
    assert room_storage("verify", STORAGE_DSN=dsn).returncode == 0


async def test_the_embedded_postgres_stops(tmp_path: Path) -> None:
    environ = {
        "STORAGE_DATA_DIR": str(tmp_path / "data"),
        "STORAGE_EMBEDDED_SHARED_BUFFERS_MB": "16",
        "STORAGE_EMBEDDED_FSYNC": "off",
    }
    running = await asyncio.to_thread(
        started, "import", "-", "--server-name", SERVER, "--json", **environ
    )
    status = tmp_path / "data" / "postgresql" / "postmaster.pid"
    async with asyncio.timeout(60):
        while not (status.exists() and "ready" in status.read_text()):
            assert running.poll() is None
            await pause()
    running.send_signal(signal.SIGINT)
    _, errors = await asyncio.to_thread(running.communicate, None, 60)
    assert (running.returncode, b"Traceback" in errors) == (130, False)
    assert not status.exists()


ENDLESS = "print('importing', flush=True)\nwhile True: pass  # no signal is lost\n"
IMPORTING = """
import signal, sys
import storage.cli

signal.signal(signal.SIGINT, signal.default_int_handler)
storage.cli.__path__.insert(0, sys.argv.pop(1))
sys.exit(storage.cli.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["app", "stats"])
def test_a_signal_while_a_module_is_imported(
    tmp_path: Path, module: str, number: signal.Signals
) -> None:
    """A module that takes for ever stands for the imports, of all commands or of one."""
    (tmp_path / f"{module}.py").write_text(ENDLESS)
    running = subprocess.Popen(
        [sys.executable, "-c", IMPORTING, str(tmp_path), "stats"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"importing\n"
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    if number is signal.SIGTERM and module == "app":  # before a handler
        assert (running.returncode, errors) == (-signal.SIGTERM, b"")
    else:
        assert (running.returncode, errors) == (128 + number, b"interrupted\n")


@pytest.mark.parametrize(
    "program,too_much",
    [
        ("import storage", {"storage.errors", "asyncio", "dataclasses"}),
        ("from storage.cli import main; main(['--version'])", {"asyncio", "asyncpg", "rich"}),
    ],
)
def test_a_start_imports_little(program: str, too_much: set[str]) -> None:
    """So `import storage` takes 0.1 s in place of a second, and the version 0.4 s."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {program}; print(*sys.modules)"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert too_much & set(done.stdout.split()) == set()
