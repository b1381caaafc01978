"""The command line: exit codes, output for people and for programs, no tracebacks."""

import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from typer.main import get_command

from storage.cli import main
from storage.cli import migrate as cli_migrate
from storage.cli.app import COMMANDS, CliCommand, app
from storage.cli.output import print_rows
from storage.database import migrate as migrating
from storage.database.migrate import HEAD_REVISION, migration_sql
from tests.cli.running import NOBODY, ROOT, environment, room_storage, started
from tests.database.newer import example_release


def test_migrate_brings_the_schema_up_and_says_so(empty_dsn: str) -> None:
    for _ in range(2):
        done = room_storage("migrate", "--json", "--dsn", empty_dsn)
        assert (done.returncode, json.loads(done.stdout)) == (
            0,
            {"revision": HEAD_REVISION, "wanted": HEAD_REVISION},
        )
    done = room_storage("migrate", STORAGE_DSN=empty_dsn)
    assert done.returncode == 0
    assert HEAD_REVISION in done.stdout
    assert done.stderr == ""


async def test_the_first_start_of_the_unit_needs_nothing_else(empty_dsn: str) -> None:
    """`migrate --pre` and `serve`, as the unit runs them, on a database that nobody has opened."""
    done = room_storage("migrate", "--pre", "--json", "--dsn", empty_dsn)
    assert (done.returncode, json.loads(done.stdout)["revision"]) == (0, HEAD_REVISION)
    with started("serve", "--server-name", "s1.test", "--port", "0", STORAGE_DSN=empty_dsn) as one:
        assert one.stdout is not None
        assert one.stdout.readline().startswith(b"listening on 127.0.0.1:")
        one.terminate()
        one.communicate()
    done = room_storage("migrate", "--pre", "--dsn", empty_dsn)
    assert (done.returncode, done.stderr) == (0, "")


async def test_pre_stops_where_a_process_may_need_the_schema(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute("INSERT INTO writers (instance_name) VALUES ('main')")
    await connection.close()
    scripts = example_release(tmp_path / "examples")
    monkeypatch.setattr(migrating, "scripts_directory", lambda: scripts)
    monkeypatch.setattr(cli_migrate, "HEAD_REVISION", "9002")
    monkeypatch.setattr(migrating, "OLDEST_REVISION", "9002")

    def run(*arguments: str) -> str:
        assert main(["migrate", *arguments, "--dsn", dsn]) == 0
        return capsys.readouterr().out

    listed = await asyncio.to_thread(run, "--list")
    assert ("9001" in listed, "9002" in listed) == (True, True)
    done = await asyncio.to_thread(run, "--pre", "--json")
    assert json.loads(done)["revision"] == "9001"
    done = await asyncio.to_thread(run, "--pre")
    assert done.splitlines()[2] == (
        "the next step needs `room-storage migrate` while no process of an older release runs;"
        " this release cannot serve the database before it"
    )


def test_migrate_without_a_dsn_uses_the_embedded_postgres(tmp_path: Path) -> None:
    """Before that, other commands say what the database lacks, and where it is."""
    environ: dict[str, Any] = {
        "STORAGE_DATA_DIR": str(tmp_path / "data"),
        "STORAGE_EMBEDDED_SHARED_BUFFERS_MB": "16",
    }
    done = room_storage("stats", **environ)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: the embedded database in {tmp_path / 'data'} has no tables of room-storage, wanted"
        f" is the revision {HEAD_REVISION}: run `room-storage migrate` on it"
    )
    done = room_storage("stats", STORAGE_DATABASE_SCHEMA="rooms", **environ)
    assert f"{tmp_path / 'data'} (schema rooms) has no tables of room-storage" in done.stderr
    done = room_storage("migrate", STORAGE_DATABASE_SCHEMA="rooms", **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: the database has no schema 'rooms': create it" in done.stderr
    done = room_storage("migrate", "--json", **environ)
    assert (done.returncode, json.loads(done.stdout)["revision"]) == (0, HEAD_REVISION)
    assert done.stderr == ""
    assert (tmp_path / "data" / "postgresql").exists()


def test_migrate_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--sql"]) == 0
    assert capsys.readouterr().out == migration_sql()


@pytest.mark.parametrize(
    "arguments,code,told",
    [
        (["--help"], 0, "migrate"),
        (["spark", "export", "--help"], 0, "--"),
        (["migrate", "-h"], 0, "--sql"),
        (["nonsense"], 2, "nonsense"),
        (["migrate", "--nonsense"], 2, "nonsense"),
        (["migrate", "--dsn", "mysql://x"], 2, "DSN"),
        (["migrate", "--dsn", NOBODY], 3, "error: "),
    ],
)
def test_exit_codes(
    arguments: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert told in (printed.out if code == 0 else printed.err)
    assert "Traceback" not in printed.err
    assert "<bool>" not in printed.out  # a flag takes no value


def test_without_a_command_there_is_help() -> None:
    done = room_storage()
    assert done.returncode == 2
    assert "migrate" in done.stdout + done.stderr


def test_a_setting_that_does_not_fit_is_named() -> None:
    done = room_storage("migrate", "--dsn", NOBODY, STORAGE_POOL_SIZE_MAX="many")
    assert done.returncode == 2
    assert "STORAGE_POOL_SIZE_MAX" in done.stderr


def test_an_error_for_programs_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--json", "--dsn", NOBODY]) == 3
    assert json.loads(capsys.readouterr().out)["error"] == "DatabaseUnavailable"


WITHOUT_JSON = {"spark demo": "it prints a line for each step, for people"}


@pytest.mark.parametrize("arguments", [["migrate", "--sql"], ["stats"], ["stats", "--json"]])
def test_a_full_standard_output_is_one_sentence(dsn: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "storage", *arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(STORAGE_DSN=dsn),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.stderr == "error: standard output: No space left on device\n"
    assert done.returncode == 2


def test_a_closed_pipe_is_no_finding() -> None:
    """As `room-storage migrate --sql | head -1`."""
    process = started("migrate", "--sql")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, stderr = process.communicate()
    assert (process.returncode, stderr) == (141, b"")


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """Every command with its options."""
    for name, one in getattr(command, "commands", {}).items():
        yield from leaves(one, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), {option for one in command.params for option in one.opts}


def test_each_command_prints_json_for_programs() -> None:
    found = dict(leaves(get_command(app)))
    assert len(found) > 20
    assert {name for name, options in found.items() if "--json" not in options} == set(WITHOUT_JSON)


@pytest.mark.parametrize("one", COMMANDS, ids=lambda one: one.name)
def test_examples_in_the_help_can_be_parsed(
    one: CliCommand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each example has only options that exist, and the help shows it at 80 columns."""
    command: Any = get_command(app)
    for example in one.examples:
        for part in example.split(" | "):
            words = shlex.split(part.partition(" > ")[0])
            if words[0] in {"gunzip", "gzip", "jq"}:
                continue
            name, *arguments = words[1:] if words[0] == "room-storage" else words
            context = command.commands[name].make_context(name, arguments)
            assert context.info_name == name
    monkeypatch.setenv("COLUMNS", "80")
    assert main([one.name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples:" in shown
    assert "bool" not in shown.casefold()
    assert max(map(len, shown.splitlines())) <= 80


def test_a_table_is_not_cut_off_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of tables of a small database: together one column wider than the terminal."""
    monkeypatch.setattr("storage.cli.output.FILE_WIDTH", 80)
    columns = ["table", "heap", "large values", "indexes", "together", "an event"]
    row = ("auth_chain_links", "3,817,472", "106,496", "1,245,184", "5,169,152", "2,020.0")
    print_rows("On disk", columns, [row], as_json=False)
    shown = capsys.readouterr().out.splitlines()[1:]
    assert max(map(len, shown)) <= 80
    assert {line[-1] for line in shown} == set("┓┃┩│┘")
    assert all(value in shown[-2] for value in row)
