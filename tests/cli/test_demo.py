"""The demonstration: it runs on an empty database and again, and what it shows is right."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from storage.cli import main
from storage.cli.demo.place import demo_place
from tests.cli.running import NOBODY, environment, room_storage


def tables(printed: str) -> dict[str, list[dict[str, object]]]:
    return {table["title"]: table["rows"] for table in json.loads(printed)}


async def test_it_runs_on_an_empty_database_and_again(
    empty_dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in (1, 2):
        assert await asyncio.to_thread(main, ["demo", "--json", "--dsn", empty_dsn]) == 0
        told = tables(capsys.readouterr().out)
        made = {str(room["room"]) for room in told["Rooms"]}
        assert len(made) == 9
        assert {room["version"] for room in told["Rooms"]} >= {"2", "6", "11", "12"}
        assert sum(int(str(room["PDUs"])) for room in told["Rooms"]) == sum(
            int(str(row["events"])) for row in told["Stored"]
        )
        assert "duplicate" not in {row["outcome"] for row in told["Stored"]}
        with monkeypatch.context() as patched:
            patched.setenv("STORAGE_DATABASE_SCHEMA", "room_storage_demo")
            await asyncio.to_thread(main, ["stats", "--json", "--dsn", empty_dsn])
        told = json.loads(capsys.readouterr().out)
        assert told["counts"]["rooms"] == 9 * run
        assert told["database"].endswith(", schema room_storage_demo")
    async with storage.open(empty_dsn, server_name="example.org", migrate=True) as store:
        assert store.server_name == "example.org"  # the demonstration has not claimed it


def test_what_it_shows_is_right(empty_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--dsn", empty_dsn]) == 0
    told = tables(capsys.readouterr().out)
    [new] = told["What Alice syncs next"]
    assert str(new["timeline, latest last"]) == "Carol: Has anyone seen the key?"
    sights = {str(row["what"]): row for row in told["Who may see what"]}
    assert {
        who: sights["It was me. Nobody needs to know."][who]
        for who in ("Alice", "Bob", "Dave", "server s3.test")
    } == {
        "Alice": "yes",
        "Bob": "-",
        "Dave": "yes",
        "server s3.test": "-",
    }
    assert sights["EVEN CHEAPER JAM!!!"]["note"] == "soft-failed"
    assert sights["Hello! What did I miss?"]["Dave"] == "-"
    state = {
        str(row["key"]): (row["then"], row["now"])
        for row in told["The state before Mallory's first words"]
    }
    assert state["m.room.member Mallory"] == ("join", "ban")
    assert state["m.room.history_visibility"] == ("joined", "shared")
    assert state["m.room.topic"][0] == "What is in the pantry?"
    assert state["m.room.topic"][1] in {"Plums and quinces", "Jam, but not for sale"}
    page = told["A page of history for Alice, newest first"]
    assert len(page) == 10
    orders = [int(str(row["order"])) for row in page]
    assert orders == sorted(orders, reverse=True)
    served = {
        str(row["what"]): row["served"] for row in told["A backfill for s3.test, newest first"]
    }
    assert served["Nothing at all."] == "whole"
    assert "redacted" in served.values()
    assert len(told["Timings"]) == 7
    assert told["On disk, in bytes"]


EMBEDDED = {
    "STORAGE_EMBEDDED_SHARED_BUFFERS_MB": "16",
    "STORAGE_EMBEDDED_FSYNC": "off",
    "STORAGE_CONNECT_TIMEOUT_MS": "60000",
}


async def test_people_get_tables_and_commands_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named, the commands work as printed, and the quick start is not hindered."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "my data"
    environ = EMBEDDED | {"STORAGE_DATA_DIR": str(data)}
    done = await asyncio.to_thread(lambda: room_storage("demo", given=b"", **environ))
    assert done.returncode == 0
    # the progress of what takes seconds, on a busy machine
    assert re.fullmatch(r"([a-z ]+: .*\n)*", done.stderr), done.stderr
    assert "Who may see what" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 140
    assert done.stdout.splitlines()[0] == f"data: {data / 'demo'} (embedded Postgres)"
    printed = done.stdout.partition("What next\n")[2].splitlines()
    commands = [line.strip() for line in printed if line.startswith("  ")]
    assert len(commands) == 6
    ran = await asyncio.to_thread(bash, commands, tmp_path, EMBEDDED)
    assert ran.returncode == 0, ran.stderr
    assert f"{data / 'demo'} (embedded Postgres)" in ran.stdout
    assert "@user4:s1.test may not see" in ran.stdout
    assert "nothing found" in ran.stdout
    assert (tmp_path / "demo.ndjson").stat().st_size > 0
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    async with storage.open(server_name="example.org") as store:
        await store.erase_user("@alice:example.org")  # so it is not empty
    with pytest.raises(storage.WrongServerName) as refused:
        async with storage.open(server_name="other.org"):
            pass
    assert str(refused.value).startswith(
        f"the embedded database in {data} belongs to example.org, not to other.org:"
        " open it as example.org, or another database (or data folder,"
        " STORAGE_DATA_DIR) as other.org. "
    )


def bash(
    commands: list[str], folder: Path, environ: dict[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Paste the lines into a shell."""
    found = environment(**environ)
    found["PATH"] = f"{Path(sys.executable).parent}:{found['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(commands)],
        cwd=folder,
        env=found,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "dsn,environ,settings",
    [
        (
            "postgresql://me@db.test/x",
            {},
            "export STORAGE_DSN=postgresql://me@db.test/x STORAGE_DATABASE_SCHEMA=mine",
        ),
        (
            "postgresql://me@db.test/x",
            {"STORAGE_DSN": "postgresql://me@db.test/x"},
            "export STORAGE_DATABASE_SCHEMA=mine",
        ),
        (
            "postgresql://me:secret@db.test/x",
            {},
            'export STORAGE_DSN="…the DSN that you gave…" STORAGE_DATABASE_SCHEMA=mine',
        ),
    ],
)
async def test_a_dsn_is_printed_without_a_password(
    dsn: str, environ: dict[str, str], settings: str
) -> None:
    config = storage.Config(database_schema="mine")
    chosen = environ | {"STORAGE_DATABASE_SCHEMA": "mine"}
    async with demo_place(dsn, config, chosen) as place:
        assert place.settings == settings
        assert place.about == "database x at db.test, schema mine"
        assert "secret" not in place.about + place.settings + place.removal


def test_without_a_database_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dsn", NOBODY]) == 3
    assert "error: " in capsys.readouterr().err
