"""`room-storage export`: importing its output gives an equal store; and how it can fail.

The output is NDJSON or Parquet.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.cli import main
from storage.event.ndjson import read_line
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedRoom,
    build_room,
    deliver_with_gap,
    generate_room,
)
from tests.cli.running import NOBODY, room_storage
from tests.pipeline.planted import with_planted_creates
from tests.pipeline.stores import SERVER, fill, tables

ROOMS = {
    "odd": generate_room(SHAPES["small_chat"].replaced(odd=ODD_SOME), 60, seed=13, sign=False),
    "with a gap": deliver_with_gap(
        build_room(SHAPES["fork_heavy"], 50, seed=14, version="12", sign=False), 15, 30
    ),
}
PLANTED = [
    with_planted_creates(
        generate_room(SHAPES["direct_chat"], 12, seed=20 + seed, version=version, sign=False), at
    )
    for seed, (version, at) in enumerate(product(("1", "5", "10", "11", "12"), (1, 12)))
]


async def filled(dsn: str) -> None:
    for room in ROOMS.values():
        await fill(dsn, room)


async def contents(dsn: str) -> dict[str, Any]:
    """Every table without numbers and positions.

    Not how many states are kept: what is the current state for a moment only is not stored where
    events come together.
    """
    found = await tables(dsn)
    del found["counts"]["state_groups"], found["counts"]["audiences"]
    return found


def imported(dsn: str, *files: str) -> dict[str, int]:
    done = room_storage("import", *files, "--json", "--dsn", dsn, "--server-name", SERVER)
    assert done.returncode == 0, done.stderr
    told: dict[str, int] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("form", ["ndjson", "parquet"])
async def test_an_import_of_an_export_is_an_equal_store(
    dsn: str, another_dsn: str, tmp_path: Path, form: str
) -> None:
    await filled(dsn)
    file = tmp_path / "rooms.ndjson"
    done = room_storage("export", str(file), "--json", "--dsn", dsn)
    told = json.loads(done.stdout)
    assert (done.returncode, told["rooms"], told["bytes"]) == (0, 2, file.stat().st_size)
    assert [path.name for path in tmp_path.iterdir()] == ["rooms.ndjson"]
    lines = file.read_bytes().splitlines()
    assert len(lines) == told["events"]
    if form == "parquet":
        file = parquet(tmp_path / "rooms.parquet", lines)
    assert imported(another_dsn, str(file))["lines"] == told["events"]
    assert await contents(another_dsn) == await contents(dsn)
    assert imported(another_dsn, str(file))["duplicate"] == told["events"]


def parquet(path: Path, lines: list[bytes]) -> Path:
    read = [read_line(line) for line in lines]
    columns = {
        "pdu": [one.pdu for one in read],
        "room_version": [one.room_version for one in read],
        "origin": [one.origin for one in read],
        "state_before": pa.array([one.state_before for one in read], pa.list_(pa.string())),
    }
    pq.write_table(pa.table(columns), path, row_group_size=50)
    return path


async def test_create_events_that_anybody_planted_come_through(
    dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """The version that a line names stands before theirs, and they come after the first one."""
    for room in PLANTED:
        await fill(dsn, room)
    file = tmp_path / "rooms.ndjson"
    assert room_storage("export", str(file), "--dsn", dsn).returncode == 0
    assert imported(another_dsn, str(file))["rejects"] == 0
    assert await contents(another_dsn) == await contents(dsn)
    verified = room_storage("verify", "--dsn", another_dsn)
    assert verified.returncode == 0, verified.stdout


async def test_bytes_with_line_breaks_come_through(
    dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    room = generate_room(SHAPES["direct_chat"], 8, seed=15, sign=False)
    spelled = [
        replace(event, pdu=json.dumps(json.loads(event.pdu), indent=2).encode())
        for event in room.events
    ]
    await fill(dsn, GeneratedRoom(room.room_id, room.room_version, tuple(spelled), room.keys))
    assert room_storage("export", str(tmp_path / "x.ndjson"), "--dsn", dsn).returncode == 0
    assert b"pdu_base64" in (tmp_path / "x.ndjson").read_bytes()
    imported(another_dsn, str(tmp_path / "x.ndjson"))
    assert await contents(another_dsn) == await contents(dsn)


async def test_one_room_to_standard_output(dsn: str) -> None:
    await filled(dsn)
    wanted = ROOMS["odd"]
    done = room_storage("export", "-", "--room", wanted.room_id, "--dsn", dsn)
    lines = [read_line(line) for line in done.stdout.encode().splitlines()]
    stored = {event.pdu for event in wanted}
    assert done.returncode == 0
    assert lines
    assert {line.pdu for line in lines} <= stored


@pytest.mark.parametrize(
    "arguments,code,told",
    [
        (["export"], 2, "FILE"),
        (
            ["export", "/nowhere/at/all.ndjson", "--dsn", "{dsn}"],
            2,
            "/nowhere/at/all.ndjson: No such file",
        ),
        (["export", "x.parquet", "--dsn", "{dsn}"], 2, "spark export"),
        (
            ["export", "{folder}/x", "--room", "!absent:s1.test", "--dsn", "{dsn}"],
            2,
            "unknown room !absent:s1.test",
        ),
        (["export", "{folder}/x", "--dsn", NOBODY], 3, "error: "),
    ],
)
def test_what_is_wrong_is_said_and_leaves_no_file(
    dsn: str,
    tmp_path: Path,
    arguments: list[str],
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([argument.format(dsn=dsn, folder=tmp_path) for argument in arguments]) == code
    printed = capsys.readouterr()
    assert told in printed.err
    assert "Traceback" not in printed.err
    assert not list(tmp_path.iterdir())


def test_an_earlier_export_stays_where_the_next_one_fails(dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "rooms.ndjson"
    file.write_text("earlier")
    arguments = ["export", str(file), "--overwrite", "--room", "!absent:s1.test", "--dsn", dsn]
    assert main(arguments) == 2
    assert file.read_text() == "earlier"


def test_an_earlier_export_is_replaced_only_on_request(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rooms.ndjson"
    file.write_text("earlier")
    assert main(["export", str(file), "--dsn", dsn]) == 2
    assert f"{file} exists: choose another name, or replace it with --" in capsys.readouterr().err
    assert file.read_text() == "earlier"
    assert main(["export", str(file), "--overwrite", "--dsn", dsn]) == 0
    assert file.read_text() == ""
    assert list(tmp_path.iterdir()) == [file]


async def test_a_full_disk_is_said(dsn: str) -> None:
    await filled(dsn)
    done = room_storage("export", "/dev/full", "--dsn", dsn)
    assert (done.returncode, done.stderr) == (2, "error: /dev/full: No space left on device\n")


def test_parquet_that_is_none_or_lacks_its_column(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    pq.write_table(pa.table({"pdus": [b"{}"]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"pdu": [1]}), tmp_path / "c.parquet")
    for name, told in (
        ("a", "a.parquet: "),
        ("b", "no column pdu"),
        ("c", "no column pdu"),
        ("d", "d.parquet: No such file"),
    ):
        assert main(["import", str(tmp_path / f"{name}.parquet"), "--dsn", dsn]) == 2
        assert told in capsys.readouterr().err


def test_rows_that_are_no_events_are_rejects(dsn: str, tmp_path: Path) -> None:
    rows = {
        "pdu": [b"no json", b'{"a":1},"origin":"outlier"', None, b"\xff"],
        "origin": ["live", None, "live", "nowhere"],
    }
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    kept = tmp_path / "rejects.ndjson"
    done = room_storage(
        "import",
        str(tmp_path / "x.parquet"),
        "--json",
        "--rejects",
        str(kept),
        "--dsn",
        dsn,
        "--server-name",
        SERVER,
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["bad_line"], told["stored"]) == (1, 4, 0)
    assert [json.loads(line)["line"] for line in kept.read_text().splitlines()] == [1, 2, 3, 4]
