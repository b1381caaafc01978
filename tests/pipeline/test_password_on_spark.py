"""A password of a DSN in what Spark shows and keeps: event log, process list, plans, errors."""

import asyncio
import secrets
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("pyspark")

import storage
from storage.errors import InputError, StorageError
from storage.pipeline.export import ExportTask
from storage.pipeline.imports.append_events import StoreTarget
from storage.pipeline.imports.lines import FileRange
from storage.pipeline.session import check_java
from storage.pipeline.source.filters import Options
from storage.pipeline.synapse.source import Synapse
from storage.testing import RoomBuilder
from tests.cli.running import ROOT, environment
from tests.long_run import long_run
from tests.maintenance.rooms import SERVER
from tests.pipeline.java import QUICK

SECRET: Final = secrets.token_hex(12)  # in no other process
ALICE: Final = f"@alice:{SERVER}"


def test_no_value_shows_its_dsn() -> None:
    dsn = f"postgresql://u:{SECRET}@h/x"
    shown = [
        Options(dsn),
        ExportTask(dsn, ("a", "b"), "/path", 1, verify=True),
        StoreTarget(dsn, SERVER, "spark", 1),
        FileRange("synapse", 0, 0, 0, dsn, 1, 2),
    ]
    for one in shown:
        assert SECRET not in repr(one), one
    assert "/a/file" in repr(FileRange("lines", 0, 0, 0, "/a/file", 1, 2))


def test_no_error_of_libpq_shows_the_dsn() -> None:
    for dsn, sentence in (
        (f"mysql://u:{SECRET}@h/x", "the DSN cannot be read: it must begin with postgresql://"),
        (f"postgresql://u:{SECRET}@[::1:1/x", "the DSN cannot be read: a bracket"),
        (f"postgresql://u:a@{SECRET}@h/x", "the DSN cannot be read: in a user name"),
        (
            f"postgresql://u:{SECRET}@127.0.0.1:1/x",
            'cannot connect to Postgres at 127.0.0.1:1: connection to server at "127.0.0.1", port',
        ),
        (
            f"postgresql://u:{SECRET}@127.0.0.1:1/x?sslmode=perhaps",
            'cannot connect to Postgres at 127.0.0.1:1: invalid sslmode value: "perhaps"',
        ),
    ):
        with pytest.raises(StorageError) as caught:
            Synapse.of(dsn)
        assert str(caught.value).startswith(sentence)
        assert "\n" not in str(caught.value)
        assert SECRET not in f"{caught.value}{caught.value.__cause__}"


@pytest.mark.slow
@pytest.mark.timeout(300)  # a JVM, on a busy machine
@long_run
async def test_a_streaming_command_keeps_the_password_to_itself(dsn: str, tmp_path: Path) -> None:
    """The DSN stands in a file, and is an option of the source that Spark follows."""
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    room = RoomBuilder("11", sign=False)
    room.start(ALICE)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
    (tmp_path / "dsn").write_text(dsn.replace("@", f":{SECRET}@", 1))
    log = tmp_path / "log"
    log.mkdir()
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{log}",
        "spark.driver.memory": "600m",
        "spark.driver.extraJavaOptions": QUICK,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "storage", "spark", "stream", str(tmp_path / "events"), "--once"),
        *("--master", "local[1]"),
        *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
        cwd=ROOT,
        env=environment(STORAGE_DSN_FILE=str(tmp_path / "dsn")),
        stdout=PIPE,
        stderr=PIPE,
    )
    ended = asyncio.create_task(process.communicate())
    processes = set[str]()
    while not ended.done():
        processes |= command_lines()
        await asyncio.wait([ended], timeout=0.2)
    output = b"".join(ended.result()).decode()
    assert process.returncode == 0, output[-3000:]
    logged = "".join(path.read_text("utf-8", "ignore") for path in log.rglob("*") if path.is_file())
    assert "SparkListenerApplicationEnd" in logged
    kept = "".join(
        path.read_text("utf-8", "ignore")
        for path in (tmp_path / "events" / "_checkpoint").rglob("*")
        if path.is_file()
    )
    assert "spark.eventLog.enabled=true" in "".join(processes)
    for text in (logged, output, kept, *processes):
        assert SECRET not in text


def command_lines() -> set[str]:
    """The arguments of all processes, as `ps` shows them."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return found
