"""`room-storage import` as users call it: exit codes, output, the rejects file, an interrupt.

Also each thing that can be missing.
"""

import asyncio
import gzip
import json
import signal
from pathlib import Path

import asyncpg
import pytest

from storage.cli import main
from storage.testing import SHAPES, generate_room, ndjson_line, write_ndjson
from tests.cli.running import NOBODY, room_storage, started
from tests.pausing import pause


@pytest.fixture
def file(tmp_path: Path) -> str:
    write_ndjson(generate_room(SHAPES["small_chat"], 30, seed=21), tmp_path / "room.ndjson")
    return str(tmp_path / "room.ndjson")


def test_a_file_and_again(dsn: str, file: str) -> None:
    done = room_storage("import", file, "--json", "--server-name", "s1.test", STORAGE_DSN=dsn)
    told = json.loads(done.stdout)
    assert (done.returncode, told["stored"], told["rejects"], done.stderr) == (0, 30, 0, "")
    done = room_storage("import", file, STORAGE_DSN=dsn, STORAGE_SERVER_NAME="s1.test")
    assert done.returncode == 0
    assert ["duplicate", "30"] in [line.split() for line in done.stdout.splitlines()]


def test_rejects_are_kept_and_told_by_the_exit_code(dsn: str, file: str, tmp_path: Path) -> None:
    lines = Path(file).read_bytes() + b"no line\n"
    kept = tmp_path / "rejects.ndjson"
    done = room_storage(
        "import",
        "-",
        "--json",
        "--rejects",
        str(kept),
        "--dsn",
        dsn,
        "--server-name",
        "s1.test",
        given=lines,
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["stored"], told["bad_line"], told["rejects"]) == (1, 30, 1, 1)
    [reject] = map(json.loads, kept.read_text().splitlines())
    assert (reject["file"], reject["line"], reject["outcome"], reject["text"]) == (
        "-",
        31,
        "bad_line",
        "no line",
    )


@pytest.mark.parametrize(
    "begin,sentence",
    [
        (
            gzip.compress(b"{}", mtime=0),
            "is compressed: use `gunzip -c FILE | room-storage import -`",
        ),
        (b"\x28\xb5\x2f\xfd", "is compressed: use `zstd -dc FILE | room-storage import -`"),
        (b"PAR1", "is Parquet: give it a name that ends with .parquet"),
    ],
)
def test_another_format_is_refused_as_a_whole(
    dsn: str, file: str, tmp_path: Path, begin: bytes, sentence: str
) -> None:
    other = tmp_path / "other"
    other.write_bytes(begin)
    for sources, given in (([file, str(other)], b""), (["-"], begin)):
        done = room_storage(
            "import", *sources, STORAGE_DSN=dsn, STORAGE_SERVER_NAME="s1.test", given=given
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert f"error: {sources[-1]} {sentence}\n" in done.stderr


def test_without_a_server_name_the_import_asks_for_one(dsn: str, file: str) -> None:
    """Rooms that are stored without local users stay without them."""
    done = room_storage("import", file, "--dsn", dsn)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--server-name NAME" in done.stderr
    assert "--no-local-users" in done.stderr
    both = room_storage(
        "import", file, "--dsn", dsn, "--server-name", "s1.test", "--no-local-users"
    )
    assert (both.returncode, "one of --server-name and --no-local-users" in both.stderr) == (
        2,
        True,
    )
    done = room_storage("import", file, "--json", "--dsn", dsn, "--no-local-users")
    assert (done.returncode, json.loads(done.stdout)["stored"], done.stderr) == (0, 30, "")
    again = room_storage("import", file, "--json", "--dsn", dsn, "--server-name", "s1.test")
    assert (again.returncode, json.loads(again.stdout)["duplicate"]) == (0, 30)
    named = room_storage("import", file, "--json", "--dsn", dsn)
    assert (named.returncode, json.loads(named.stdout)["duplicate"], named.stderr) == (0, 30, "")
    assert room_storage("import", file, "--dsn", dsn, "--no-local-users").returncode == 2


async def test_an_interrupt_and_a_rerun(dsn: str, file: str) -> None:
    events = [ndjson_line(event) for event in generate_room(SHAPES["small_chat"], 200, seed=22)]
    command = ["import", "-", "--json", "--dsn", dsn, "--server-name", "s1.test"]
    running = await asyncio.to_thread(started, *command)
    assert running.stdin is not None
    await asyncio.to_thread(running.stdin.write, b"".join(events[:50]))
    await asyncio.to_thread(running.stdin.flush)
    connection = await asyncpg.connect(dsn)
    async with asyncio.timeout(60):
        while await connection.fetchval("SELECT count(*) FROM events") < 50:
            assert running.poll() is None
            await pause()
    await connection.close()
    running.send_signal(signal.SIGINT)
    output, errors = await asyncio.to_thread(running.communicate)
    assert (running.returncode, output) == (130, b"")
    assert b"Traceback" not in errors
    assert b"run the same command again" in errors
    done = await asyncio.to_thread(lambda: room_storage(*command, given=b"".join(events)))
    told = json.loads(done.stdout)
    assert (done.returncode, told["duplicate"], told["stored"]) == (0, 50, 150)


@pytest.mark.parametrize(
    "arguments,code,told",
    [
        (["import"], 2, "FILE"),
        (["import", "absent.ndjson"], 2, "absent.ndjson: No such file"),
        (["import", "{file}", "absent.ndjson"], 2, "absent.ndjson: No such file"),
        (["import", "absent.parquet"], 2, "absent.parquet: No such file"),
        (["import", "{file}", "--rejects", "/nowhere/at/all"], 2, "/nowhere/at/all: No such file"),
        (["import", "{file}", "--dsn", NOBODY], 3, "error: "),
        (["import", "{file}", "--dsn", "mysql://x"], 2, "DSN"),
        (["import", "{file}", "--dsn", "postgresql://localhost:port/x"], 2, "DSN"),
        (["stats", "--dsn", NOBODY], 3, "error: "),
    ],
)
def test_what_is_missing_is_said(
    file: str, arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(file=file) for argument in arguments]) == code
    printed = capsys.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err


def test_a_database_that_is_not_there(
    dsn: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["import", file, "--dsn", dsn.replace("/storage_test", "/absent_storage_test")]) == 3
    )
    assert "absent_storage_test" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["import", "{file}"], ["stats"]])
async def test_a_schema_that_is_old_or_absent(
    empty_dsn: str, file: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument.format(file=file) for argument in command]
    assert await asyncio.to_thread(main, [*arguments, "--dsn", empty_dsn]) == 2
    assert "room-storage migrate" in capsys.readouterr().err
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute("CREATE TABLE alembic_version AS SELECT '0000' AS version_num")
    await connection.close()
    assert await asyncio.to_thread(main, [*arguments, "--dsn", empty_dsn]) == 2
    assert "0000" in capsys.readouterr().err
