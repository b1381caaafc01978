"""A standalone cluster of Spark on this machine: a master and two workers, each a process."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pyspark

from benchmarks.ports import free_port
from tests.pipeline.java import QUICK

HOME = Path(pyspark.__file__).parent
EXECUTOR = "CoarseGrainedExecutorBackend"


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[psutil.Process]]]:
    """The URL of its master, and its workers."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    with ExitStack() as stack:
        of_master = [
            "org.apache.spark.deploy.master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--webui-port",
            "0",
        ]
        stack.enter_context(_daemon(of_master, folder / "master"))
        workers = []  # which look for the master until it is there, as drivers do
        for number in range(2):
            of_worker = [
                "org.apache.spark.deploy.worker.Worker",
                "--host",
                "127.0.0.1",
                "--webui-port",
                "0",
                "--cores",
                "1",
            ]
            where = folder / f"worker{number}"
            workers.append(
                stack.enter_context(
                    _daemon([*of_worker, "--memory", "500m", "--work-dir", str(where), url], where)
                )
            )
        yield url, workers


def executors(workers: list[psutil.Process]) -> list[psutil.Process]:
    """The executors at work."""
    return [child for worker in workers for child in family_of(worker) if is_executor(child)]


def is_executor(process: psutil.Process) -> bool:
    """Return whether the process is an executor that has not ended.

    Meanwhile the shell that started it may go away, and so may any other child.
    """
    try:
        return process.name() == "java" and EXECUTOR in " ".join(process.cmdline())
    except psutil.Error:
        return False


def family_of(process: psutil.Process) -> list[psutil.Process]:
    """Its children, and theirs; none of one that has ended."""
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def end_all(processes: Iterable[psutil.Process], *, kill: bool = False) -> None:
    """Ask each of these to end, or kill it; some may have ended meanwhile."""
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            (one.kill if kill else one.terminate)()


@contextmanager
def _daemon(arguments: list[str], folder: Path) -> Iterator[psutil.Process]:
    folder.mkdir(parents=True)
    environ = {
        **os.environ,
        "SPARK_HOME": str(HOME),
        "SPARK_DAEMON_MEMORY": "200m",
        "PYSPARK_PYTHON": sys.executable,
    }
    environ["SPARK_DAEMON_JAVA_OPTS"] = QUICK
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [HOME / "bin" / "spark-class", *arguments], env=environ, stdout=log, stderr=log
        )
        watched = psutil.Process(process.pid)
        try:
            yield watched
        finally:
            family = [*family_of(watched), watched]
            end_all(family)
            psutil.wait_procs(family, timeout=30)
            process.wait(30)
