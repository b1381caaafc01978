"""Executors: attempts at one task do not conflict, and they get the driver's config.

No password is left behind.
"""

import sys
from asyncio.subprocess import PIPE, STDOUT, create_subprocess_exec
from pathlib import Path

import asyncpg
import pytest
from pyspark.sql import SparkSession

import storage
from storage.config import Config
from storage.database.migrate import migrate
from storage.errors import InstanceNameTaken
from storage.persist.model.incoming import IncomingEvent
from storage.pipeline import RoomEvents, export_parquet, import_archive, rebuild, verify
from storage.pipeline.imports.append_events import (
    NAMES_TRIED,
    ArrivedEvent,
    Loader,
    StoreTarget,
    TaskAttempt,
)
from storage.testing import SHAPES, generate_room, write_ndjson
from tests.long_run import long_run
from tests.pipeline.stores import SERVER

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def test_attempts_at_one_task_write_beside_each_other(dsn: str) -> None:
    """A speculative attempt has another number; one of a repeated stage has the same.

    All store the same room.
    """
    room = generate_room(SHAPES["direct_chat"], 12, sign=False)
    arrivals = [
        ArrivedEvent(
            IncomingEvent(storage.event.parse(event.pdu, room.room_version), "live", None), 0
        )
        for event in room
    ]
    target = StoreTarget(dsn, SERVER)
    with (
        Loader(target, TaskAttempt(3)) as first,
        Loader(target, TaskAttempt(3, 1)) as speculative,
        Loader(target, TaskAttempt(3)) as repeated,
    ):
        names = [one.store.identity.instance_name for one in (first, speculative, repeated)]
        assert names == ["spark-3", "spark-3-1", "spark-3-2"]
        assert [one.append(arrivals) for one in (first, speculative, repeated)] == [[], [], []]
        assert (first.outcomes, repeated.outcomes) == ({"stored": 12}, {"duplicate": 12})


def test_names_run_out(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = StoreTarget(dsn, SERVER, config=Config(enter_wait_ms=1))
    loaders = [Loader(target, TaskAttempt(0)) for _ in range(NAMES_TRIED)]
    for loader in loaders:
        loader.__enter__()
    with pytest.raises(InstanceNameTaken), Loader(target, TaskAttempt(0)):
        pass
    for loader in loaders:
        loader.__exit__()


async def test_executors_have_the_config_of_the_driver(
    spark: SparkSession, empty_dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executors began before the environment named the schema: they would use another one."""
    monkeypatch.setenv("STORAGE_DATABASE_SCHEMA", "apart")
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute("CREATE SCHEMA apart")
    await connection.close()
    await migrate(empty_dsn)
    room = generate_room(SHAPES["direct_chat"], 20, sign=False)
    write_ndjson(room, tmp_path / "room.ndjson")
    assert import_archive(
        spark, [str(tmp_path / "room.ndjson")], empty_dsn, server_name=SERVER
    ).outcomes["stored"] == len(room)
    assert verify(spark, empty_dsn, tasks=1).count() == 0
    assert rebuild(spark, empty_dsn, tasks=1) == {}
    assert export_parquet(spark, empty_dsn, str(tmp_path / "export"), partitions=1).events == len(
        room
    )
    spark.dataSource.register(RoomEvents.with_config(Config.from_env()))
    try:
        frame = (
            spark.read.format("room_events")
            .options(dsn=empty_dsn, columns="event_id,pdu", partitions="1")
            .load()
        )
        assert frame.count() == len(room)
        frame.coalesce(1).write.format("room_events").options(
            dsn=empty_dsn, room_version=room.room_version
        ).mode("append").save()
    finally:
        spark.dataSource.register(RoomEvents)


VIEW = """
import sys
from pyspark.sql import SparkSession
from storage.pipeline import RoomEvents
from tests.pipeline.java import QUICK

conf = dict(pair.split("=", 1) for pair in sys.argv[2:])
builder = SparkSession.builder.master("local[1]").config("spark.driver.memory", "600m")
builder = builder.config("spark.driver.extraJavaOptions", QUICK)
for key, value in conf.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
spark.dataSource.register(RoomEvents)
options = f"dsn '{sys.argv[1]}', columns 'event_id'"
spark.sql(f"CREATE TEMPORARY VIEW events USING room_events OPTIONS ({options})")
print(spark.sql("SELECT count(*) FROM events").collect())
spark.sql("EXPLAIN EXTENDED SELECT * FROM events").show(truncate=False)
print(spark.conf.get("spark.sql.redaction.options.regex"))
spark.stop()
"""


@long_run
async def test_no_password_is_left_in_the_event_log(dsn: str, tmp_path: Path) -> None:
    """In a session that the user has made, with a rule for redaction of their own."""
    async with storage.open(dsn, server_name=SERVER):
        pass
    secret = "correct-horse"
    with_password = dsn.replace("@", f":{secret}@", 1)
    settings = [
        "spark.eventLog.enabled=true",
        "spark.eventLog.compress=false",
        f"spark.eventLog.dir=file://{tmp_path}",
        "spark.ui.enabled=false",
        "spark.sql.redaction.options.regex=(?i)mine",
    ]
    process = await create_subprocess_exec(
        sys.executable, "-c", VIEW, with_password, *settings, cwd=ROOT, stdout=PIPE, stderr=STDOUT
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output[-3000:]
    logged = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "CreateTempViewUsing" in logged
    assert secret not in logged
    assert secret not in output
    assert "(?i)mine|" in output
