"""`room-storage spark`: what it says where something is missing.

The jobs themselves are tested in tests/pipeline.
"""

import asyncio
import signal
import threading
from types import SimpleNamespace

import asyncpg
import psutil
import pytest
from unpaddedbase64 import encode_base64

from storage.cli import spark as commands
from storage.cli.spark import tasks_shown
from storage.cli.spark_answer import newest_and_forecast
from storage.cli.spark_session import setting
from storage.errors import DatabaseUnavailable, InputError
from storage.observability.counters import Progress
from tests.cli.running import NOBODY, room_storage, started
from tests.cli.test_interrupts import LEFT, WAITING, filled, locked, until
from tests.long_run import long_run
from tests.pipeline.java import COMMAND

pytest.importorskip("pyspark")

from storage.pipeline.session import check_java, check_master, of_text


def test_java_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="openjdk-17"):
        check_java({"PATH": ""})
    with pytest.raises(InputError, match="JAVA_HOME=/nowhere"):
        check_java({"PATH": "", "JAVA_HOME": "/nowhere"})


def test_a_master_that_spark_has_not_is_named() -> None:
    for master in ("local", "local[2]", "spark://h:7077", "yarn", "k8s://https://h"):
        check_master(master)
    for master, said in (("sc://h", "Connect is for programs"), ("", "spark://"), ("Yarn", "yarn")):
        with pytest.raises(InputError, match=said):
            check_master(master)


@pytest.mark.parametrize(
    "counted,limit,days",
    [
        (100, 20, [*range(90, 100), *range(108, 190, 9)]),
        (100, 5, [97, 98, 99, 144, 189]),
        (100, 1, [99]),
        (100, 400, list(range(190))),
        (3, 20, [0, 1, 2, *range(11, 93, 9)]),
        (0, 20, []),
    ],
)
def test_the_newest_days_and_the_forecast_are_shown(
    counted: int, limit: int, days: list[int]
) -> None:
    """Days are numbers here. The forecast has the 90 after the last, if there is any."""
    ahead = 90 if counted else 0
    rows = [{"day": day, "forecast": day >= counted} for day in range(counted + ahead)]
    assert [row["day"] for row in newest_and_forecast(rows, limit)] == days


def test_a_setting_has_a_name_and_a_value() -> None:
    assert setting("spark.a=b=c") == ("spark.a", "b=c")
    with pytest.raises(InputError, match="KEY=VALUE"):
        setting("spark.a")


def test_an_error_of_an_executor_is_told_by_its_name() -> None:
    trace = (
        "org.apache.spark.SparkException: …\nTraceback:\n  File x\n"
        "storage.errors.DatabaseUnavailable: no route (SQLSTATE 08001)\n\n"
    )
    assert "DatabaseUnavailable in an executor: no route" in str(of_text(trace))
    assert isinstance(of_text(trace), DatabaseUnavailable)
    assert (
        str(of_text("Aborted\nCaused by: java.io.IOException: No space left on device\n\tat x.y"))
        == "Spark: IOException: No space left on device"
    )
    assert isinstance(of_text("storage.errors.WrongServerName: other"), InputError)
    assert str(of_text("something else\nmore")) == "Spark: something else"


def test_how_a_command_ends_that_cannot_begin() -> None:
    without_java = room_storage("spark", "verify", "--dsn", NOBODY, PATH="", JAVA_HOME="")
    assert (without_java.returncode, without_java.stdout) == (2, "")
    assert without_java.stderr.startswith("error: Spark needs Java 17")


def test_a_database_that_cannot_be_reached_is_told_before_spark_starts() -> None:
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    done = room_storage("spark", "verify", "--dsn", NOBODY)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)


def test_a_key_is_a_server_a_key_id_and_base64() -> None:
    text = encode_base64(bytes(range(32)))
    assert bytes(commands._keys([f"s1.test ed25519:1 {text}"])["s1.test", "ed25519:1"]) == bytes(
        range(32)
    )
    assert commands._keys(None) == {}
    for wrong in ("s1.test ed25519:1", f"s1.test rsa:1 {text}", "s1.test ed25519:1 short"):
        with pytest.raises(InputError, match="allow-key"):
            commands._keys([wrong])


@pytest.mark.slow
@pytest.mark.timeout(600)  # the JVM starts in ten seconds, and in a minute on a busy machine
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=long_run), signal.SIGTERM])
async def test_a_signal_ends_the_jobs_and_the_jvm(dsn: str, number: signal.Signals) -> None:
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    await filled(dsn)
    watcher = await asyncpg.connect(dsn)
    async with locked(dsn, "state_groups"):
        running = await asyncio.to_thread(
            started, "spark", "verify", "--quiet", "--dsn", dsn, "--master", "local[1]", *COMMAND
        )
        waits = WAITING + " AND application_name LIKE '%spark maintenance%'"
        await until(watcher, waits, at_least=1, seconds=240)
        children = psutil.Process(running.pid).children(recursive=True)
        assert any("java" in child.name() for child in children)
        running.send_signal(number)
        output, errors = await asyncio.to_thread(running.communicate, None, 60)
    assert (running.returncode, output) == (128 + number, b"")
    assert errors.decode().endswith("interrupted: nothing was changed\n")
    assert b"Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    await until(watcher, LEFT, at_most=0)
    await watcher.close()


async def test_tasks_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of the running stages count; the last look is before the end of the block."""
    shown: list[Progress] = []
    seen = threading.Event()

    def show(_: object, progress: Progress) -> None:
        shown.append(progress)
        seen.set()

    stage = SimpleNamespace(numTasks=8, numCompletedTasks=3)
    tracker = SimpleNamespace(
        getActiveStageIds=lambda: [1, 2], getStageInfo=lambda one: stage if one == 1 else None
    )
    context = SimpleNamespace(statusTracker=lambda: tracker)
    monkeypatch.setattr("storage.cli.common.ProgressDisplay.__call__", show)
    monkeypatch.setattr("storage.cli.spark.POLL_SECONDS", 0.01)
    with tasks_shown(SimpleNamespace(sparkContext=context), quiet=False):
        assert seen.wait(10)
    assert shown[0] == Progress("spark", 3, 8, "tasks")
