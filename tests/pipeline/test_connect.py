"""The pipeline in a session of Spark Connect, which has no Spark context, no JVM and no RDDs."""

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

import storage
from storage.errors import InputError
from storage.pipeline.session import check_java
from storage.testing import SHAPES, generate_room, write_ndjson
from tests.long_run import long_run
from tests.pipeline.stores import SERVER, tables

ROOT = Path(__file__).parents[2]
CLASSIC = re.compile(r"\.sparkContext\b|\b_jvm\b|\b_jdf\b|\b_jsc\b|\.rdd\b")


def test_no_module_uses_what_connect_lacks() -> None:
    """One place may: it asks first whether the session is remote."""
    users = {
        path.name
        for path in (ROOT / "storage" / "pipeline").rglob("*.py")
        if CLASSIC.search(path.read_text())
    }
    assert users == {"session.py"}


@long_run
@pytest.mark.timeout(300)
async def test_the_same_tables_as_by_appending(dsn: str, another_dsn: str, tmp_path: Path) -> None:
    """A server starts in half a minute, on a busy machine."""
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    rooms = [generate_room(SHAPES["small_chat"], 60, seed=seed, sign=False) for seed in range(3)]
    write_ndjson((event for room in rooms for event in room), tmp_path / "rooms.ndjson")
    with (tmp_path / "rooms.ndjson").open("ab") as file:
        file.write(b"no line\n")
    write_ndjson(generate_room(SHAPES["direct_chat"], 12, sign=False), tmp_path / "more.ndjson")
    async with storage.open(another_dsn, server_name=SERVER) as store:
        for room in rooms:
            await store.append(room.pdus, room_version=room.room_version)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.pipeline.connect_process"),
        *(str(tmp_path / "rooms.ndjson"), str(tmp_path / "more.ndjson"), dsn, str(tmp_path)),
        cwd=ROOT,
        stdout=PIPE,
        stderr=PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    events = sum(map(len, rooms))
    found = json.loads(output.splitlines()[-1])
    assert found.pop("error").startswith("DatabaseError in an executor: ")
    assert found == {
        "session": "pyspark.sql.connect.session",
        "outcomes": {"stored": events, "bad_line": 1},
        "events": events,
        "exported": events,
        "findings": 0,
        "failed": {},
    }
    assert await tables(dsn) == await tables(another_dsn)
