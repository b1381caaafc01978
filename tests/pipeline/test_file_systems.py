"""The file-system layer: names of URLs, and an S3 server that the tests start."""

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

import storage
from storage.errors import InputError
from storage.pipeline.file_systems import below, emptied, opened, renamed
from storage.pipeline.session import check_java
from storage.testing import SHAPES, generate_room
from tests.homeserver.environment import moto_server
from tests.long_run import long_run
from tests.pipeline.stores import SERVER, tables

ROOT = Path(__file__).parents[2]


def test_names_below_a_path() -> None:
    assert below("/a/b/", "c/d=1 %") == "/a/b/c/d=1 %"
    assert below("s3a://bucket/a", "d=1 %/é") == "s3a://bucket/a/d=1%20%25/%C3%A9"
    assert below("s3://bucket/a?region=eu", "b") == "s3://bucket/a/b?region=eu"


def test_any_file_system_of_fsspec() -> None:
    where, path = opened("memory://store/a")
    emptied("memory://store/a")
    with where.open_output_stream(f"{path}/_one") as file:
        file.write(b"1")
    renamed("memory://store/a", [("_one", "two")])
    with where.open_input_file(f"{path}/two") as file:
        assert file.read() == b"1"
    with pytest.raises(InputError, match="nothing://x"):
        opened("nothing://x")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty bucket; the environment names its server."""
    command = moto_server()
    if command is None:
        pytest.skip("python -m tests.homeserver.environment makes the environment of moto")
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([command, "-H", "127.0.0.1", "-p", "0"], stdout=log, stderr=log)
    try:
        while (found := re.search(r"http://127.0.0.1:\d+", (tmp_path / "log").read_text())) is None:
            assert server.poll() is None
            os.sched_yield()
        for name, value in {
            "AWS_ENDPOINT_URL": found[0],
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{found[0]}/lake", method="PUT")).close()
        yield "s3a://lake"
    finally:
        server.terminate()
        server.wait(30)


@long_run
@pytest.mark.timeout(300)
async def test_export_import_and_mirror_on_s3(
    s3: str, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    room = generate_room(SHAPES["small_chat"], 60, seed=1, sign=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus, room_version=room.room_version)
    where, path = opened(s3)
    with where.open_output_stream(f"{path}/broken.ndjson") as file:
        file.write(b"no line\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.pipeline.s3_process", dsn, another_dsn, s3),
        cwd=ROOT,
        stdout=PIPE,
        stderr=PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    spoken = re.findall("WARN .*|log4j.*|[Ll]og(?:ging)? level.*", errors.decode())
    assert spoken == [], "what Spark says of itself at its start"
    outcomes = {"stored": len(room), "bad_line": 1}
    expected = {"exported": len(room), "last": True, "outcomes": outcomes}
    assert json.loads(output.splitlines()[-1]) == expected
    assert await tables(dsn) == await tables(another_dsn)
    [letter] = pq.read_table(f"{path}/rejects", filesystem=where).to_pylist()
    assert (letter["source"], letter["line"], letter["pdu"]) == (
        f"{s3}/broken.ndjson",
        1,
        b"no line",
    )
    mirrored = DeltaTable("s3://lake/mirror/events").to_pyarrow_table(columns=["event_id"])
    assert sorted(mirrored.column("event_id").to_pylist()) == sorted(
        event.event_id for event in room
    )
