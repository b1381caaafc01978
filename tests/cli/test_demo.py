"""The demonstration: it runs on an empty database and again, and what it shows is right."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import storage
from storage.cli import demo, main
from storage.cli.demo import GENERATED, demo_database
from storage.ids import RoomId
from storage.maintenance.verify import Finding
from tests.cli.running import NOBODY, environment, room_storage


def told(printed: str) -> dict[str, object]:
    found = json.loads(printed)
    assert isinstance(found, dict)
    return found


async def test_it_runs_on_an_empty_database_and_again(
    empty_dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = 1 + len(GENERATED)
    for run in (1, 2):
        assert await asyncio.to_thread(main, ["demo", "--json", "--dsn", empty_dsn]) == 0
        shown = told(capsys.readouterr().out)
        assert re.fullmatch(rf"[\d,]+ events in {rooms * run} rooms", str(shown["stored"]))
        with monkeypatch.context() as patched:
            patched.setenv("STORAGE_DATABASE_SCHEMA", "room_storage_demo")
            await asyncio.to_thread(main, ["stats", "--json", "--dsn", empty_dsn])
        stats = json.loads(capsys.readouterr().out)
        assert stats["counts"]["rooms"] == rooms * run
        assert stats["database"].endswith(", schema room_storage_demo")
    async with storage.open(empty_dsn, server_name="example.org", migrate=True) as store:
        assert store.server_name == "example.org"  # the demonstration has not claimed it


def test_what_it_shows_is_right(empty_dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--json", "--dsn", empty_dsn]) == 0
    shown = told(capsys.readouterr().out)
    assert set(shown["outcomes"]) == {"stored"}  # type: ignore[call-overload]
    assert shown["next sync"] == [{"body": "And the cellar is locked.", "msgtype": "m.text"}]
    assert shown["the last three"] == ["m.room.message", "m.room.message", "m.room.member"]
    assert shown["a join, a ban, a late message"] == ["stored", "stored", "soft_failed"]
    assert shown["Mallory now"] == "ban"
    assert "the late one: False" in str(shown["Bob sees"])
    assert "it was soft-failed" in str(shown["why"])
    for shape, version, count in GENERATED:
        said, _, _ = str(shown[f"{shape}, version {version}"]).partition(", in ")
        stored = [part.split(" ") for part in said.split(", ")]
        assert sum(int(amount.replace(",", "")) for amount, _ in stored) == count
        assert {outcome for _, outcome in stored} <= {"stored", "soft_failed", "rejected"}
    assert shown["verify"] == "all derived data is as computed again"


async def test_a_difference_fails(
    empty_dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: object, **more: object) -> AsyncIterator[Finding]:
        yield Finding("events", RoomId("!room:s1.test"), ("$event",), "1", "2")

    monkeypatch.setattr(demo, "verify", found)
    monkeypatch.setattr(demo, "GENERATED", ())
    assert await asyncio.to_thread(main, ["demo", "--dsn", empty_dsn]) == 1
    printed = capsys.readouterr()
    assert "error: the demonstration found a difference" in printed.err
    assert "verify" not in printed.out


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
    assert "Bob sees: 11 of 12 events" in done.stdout
    assert done.stdout.splitlines()[0] == f"data: {data / 'demo'} (embedded Postgres)"
    printed = done.stdout.partition("What next\n")[2].splitlines()
    commands = [line.strip() for line in printed if line.startswith("  ")]
    assert len(commands) == 6
    ran = await asyncio.to_thread(bash, commands, tmp_path, EMBEDDED)
    assert ran.returncode == 0, ran.stderr
    assert f"{data / 'demo'} (embedded Postgres)" in ran.stdout
    assert "@bob:s1.test may not see" in ran.stdout
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
    async with demo_database(dsn, config, chosen) as place:
        assert place.settings == settings
        assert place.about == "database x at db.test, schema mine"
        assert "secret" not in place.about + place.settings + place.removal


def test_without_a_database_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dsn", NOBODY]) == 3
    assert "error: " in capsys.readouterr().err
