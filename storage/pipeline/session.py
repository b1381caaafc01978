"""Open a Spark session with settings for one machine: for the command line, tests, benchmarks.

On a cluster, use your own. Java is checked first, because without it Spark fails with a trace that
does not say so.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import orjson
import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, is_remote
from pyspark.sql import functions as f

from storage import errors
from storage.config import Config
from storage.errors import (
    CommitUnknown,
    DatabaseConflict,
    DatabaseError,
    DatabaseFull,
    DatabaseUnavailable,
    InputError,
    InstanceNameTaken,
    PermissionRefused,
    StorageError,
)
from storage.pipeline.source.reader import RoomEvents

MASTERS: Final = ("local", "spark://", "yarn", "k8s://")
JAVA_OLDEST: Final = 17
LOG_SETTINGS: Final = Path(__file__).with_name("log4j2.properties")

SETTINGS: Final[Mapping[str, str]] = {
    "spark.log.level": "ERROR",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "4000",  # of events, some megabytes
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ui.retainedExecutions": "20",
    "spark.ui.showConsoleProgress": "false",  # it runs into what a command prints
}
LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # before those that a caller gives
    "spark.driver.defaultJavaOptions": f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}",
    # The JVM only passes data on: little of its code becomes hot.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "4",
    # Few rows reach the JVM, so compiling a stage costs more than it saves.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
}


@contextmanager
def session(
    master: str = "local[*]", conf: Mapping[str, str] | None = None, *, name: str = "room-storage"
) -> Iterator[SparkSession]:
    """Open a session for the block, with `RoomEvents` registered.

    ``conf`` overrides the settings here. Raise `InputError` where Java is missing or too old, or
    for a master of another kind.
    """
    check_master(master)
    check_java()
    local = master.startswith("local")
    if local:
        os.environ["PYSPARK_PYTHON"] = sys.executable  # executors use this environment
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**SETTINGS, **(LOCAL_SETTINGS if local else {}), **(conf or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    try:
        spark.dataSource.register(RoomEvents.with_config(Config.from_env()))
        yield spark
    finally:
        spark.stop()


def check_master(master: str) -> None:
    """Raise `InputError` unless Spark can start a driver of this process with the master."""
    if not master.startswith(MASTERS):
        raise InputError(
            f"Spark has no master {master!r}: give local[N], spark://HOST:PORT, yarn or k8s://…"
            + ("; a session of Spark Connect is for programs" if master.startswith("sc:") else "")
        )


def check_java(environ: Mapping[str, str] = os.environ) -> None:
    """Raise `InputError` with what to install, unless there is a Java that Spark runs on."""
    home = environ.get("JAVA_HOME")
    java = (
        shutil.which(str(Path(home) / "bin" / "java"))
        if home
        else shutil.which("java", path=environ.get("PATH"))
    )
    advice = (
        f"Spark needs Java {JAVA_OLDEST} or newer:"
        " install it (Debian: apt install openjdk-17-jre-headless)"
    )
    if java is None:
        where = (
            f"JAVA_HOME={home} has none"
            if home
            else "there is none in PATH, and JAVA_HOME is not set"
        )
        raise InputError(f"{advice}; {where}")
    command = [java, "-version"]
    ran = subprocess.run(  # noqa: S603  # the program found above
        command, capture_output=True, text=True, check=False
    )
    version = re.search(r'version "(?:1\.)?(\d+)', ran.stderr)
    if version is None or int(version[1]) < JAVA_OLDEST:
        raise InputError(
            f"{advice}; {java} is {version[1] if version else 'of an unknown version'}"
        )


# --------------------------------------------------------------------------------------------------
# Turn failures in executors into our errors. Spark returns them as text, a trace in a trace.

RAISED: Final = re.compile(r"^(?:E?\s*)storage\.errors\.(\w+): (.+)$", re.MULTILINE)
CAUSED: Final = re.compile(r"^(?:Caused by: )(?:[\w$]+\.)*([\w$]+: .+)$", re.MULTILINE)
LENGTH_MAX: Final = 500
OF_THE_DATABASE: Final = (
    DatabaseUnavailable,
    DatabaseFull,
    DatabaseConflict,
    CommitUnknown,
    InstanceNameTaken,
    PermissionRefused,
)


@contextmanager
def executor_errors() -> Iterator[None]:
    """Raise our error instead of Spark's: the executor's, or a `StorageError` with its cause."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise of_text(str(error)) from error


def of_text(text: str) -> StorageError:
    """Return the error at the end of a trace, in its own class if that takes a text."""
    raised = RAISED.findall(text)
    if not raised:
        causes: list[str] = CAUSED.findall(text)
        return StorageError(
            f"Spark: {(causes[-1] if causes else text.strip().partition(chr(10))[0])[:LENGTH_MAX]}"
        )
    name, reason = raised[-1]
    message = f"{name} in an executor: {reason[:LENGTH_MAX]}"
    kind = getattr(errors, name, StorageError)
    if kind in OF_THE_DATABASE:
        return cast("StorageError", kind(message))
    if issubclass(kind, DatabaseError):
        return DatabaseError(message)
    return (InputError if issubclass(kind, InputError) else StorageError)(message)


# --------------------------------------------------------------------------------------------------
# Distribute work to tasks, only with calls that Spark Connect has, too.
#
# Work travels as rows, one partition for each task. A closure would be sent to every task as a
# whole, and Spark Connect has no broadcasts.

PROBED: Final = 1 << 16
"""Rows of the frame that Spark splits by its own measure; more than any cluster has cores."""

WORK: Final = pa.schema([("task", pa.int32()), ("work", pa.binary())])

Batches = Iterator[pa.RecordBatch]
MapBatches = Callable[[Batches], Batches]


def parallelism(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at once, as far as it knows its executors now.

    Spark Connect does not say it: a small job shows into how many partitions Spark splits a frame.
    """
    if not is_remote():
        return int(spark.sparkContext.defaultParallelism)  # without a job, which takes 0.1 s
    return spark.range(PROBED).select(f.spark_partition_id()).distinct().count()


def task_frame(spark: SparkSession, tasks: Sequence[Sequence[Any]]) -> DataFrame:
    """Return a frame with a partition for each task; `taken_work` reads its items there.

    An item is anything that JSON can express, or a named tuple of such; it comes back as a list.
    """
    rows = [
        (task, orjson.dumps(item, default=list))
        for task, items in enumerate(tasks)
        for item in items
    ]
    columns = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(WORK)]
    frame = spark.createDataFrame(pa.Table.from_arrays(columns, schema=WORK))
    return frame.repartitionById(max(len(tasks), 1), "task")


def taken_work(batches: Batches) -> Iterator[Any]:
    """Yield the items of a task, in order."""
    for batch in batches:
        yield from map(orjson.loads, batch.column("work").to_pylist())
