"""The demonstration: it runs on an empty database and again, and what it shows is right."""

import asyncio
import json
from pathlib import Path

import pytest

from storage.cli import main
from tests.cli.running import NOBODY, room_storage


def tables(printed: str) -> dict[str, list[dict[str, object]]]:
    return {table["title"]: table["rows"] for table in json.loads(printed)}


async def test_it_runs_on_an_empty_database_and_again(
    empty_dsn: str, capsys: pytest.CaptureFixture[str]
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
        await asyncio.to_thread(main, ["stats", "--json", "--dsn", empty_dsn])
        assert json.loads(capsys.readouterr().out)["counts"]["rooms"] == 9 * run


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


def test_people_get_tables(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    done = room_storage(
        "demo",
        STORAGE_DATA_DIR=data,
        STORAGE_EMBEDDED_SHARED_BUFFERS_MB="16",
        STORAGE_EMBEDDED_FSYNC="off",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Who may see what" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 140


def test_without_a_database_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dsn", NOBODY]) == 3
    assert "error: " in capsys.readouterr().err
