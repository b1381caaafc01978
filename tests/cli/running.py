"""Run `room-storage` as a process: forked after all imports, or from scratch."""

import asyncio
import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from storage.cli.app import COMMANDS, SPARK

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "postgresql://postgres@127.0.0.1:1/nowhere"
PRELOADED = [
    "storage.database.migrate",
    "storage.public",
    *(f"storage.cli.{one.module}" for one in (*COMMANDS, SPARK)),
]
STREAMS = ("stdin", "stdout", "stderr")
INTERRUPTIBLE = """
import runpy, signal
# A shell's background jobs ignore SIGINT, and so do their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("storage", run_name="__main__", alter_sys=True)
"""


def environment(**environ: str) -> dict[str, str]:
    """This process's, without any setting of ours, and with these."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith("STORAGE_")
    } | environ


def room_storage(
    *arguments: str, given: bytes = b"", **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; ``given`` is its standard input.

    To import it all would take longer than what most commands do.
    """
    with tempfile.TemporaryDirectory(prefix="room-storage-command-") as folder:
        Path(folder, "stdin").write_bytes(given)
        process = _server().Process(
            target=_command, args=(arguments, environment(**environ), folder)
        )
        process.start()
        process.join()
        stdout, stderr = (Path(folder, name).read_bytes().decode() for name in STREAMS[1:])
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, stdout, stderr)


async def room_storage_beside(
    *arguments: str, given: bytes = b"", **environ: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command beside a store that is open in this process. The event loop continues.

    If it stopped, a session that just prepares a statement would keep the tables of this statement
    locked, and the command could give up.
    """
    return await asyncio.to_thread(room_storage, *arguments, given=given, **environ)


@functools.cache
def _server() -> ForkServerContext:
    """Forks processes that have imported the command."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__])
    return context


def _command(arguments: Sequence[str], environ: Mapping[str, str], folder: str) -> None:
    """In the new process: what `python -m storage` does, with files for its streams."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environ)
    for number, name in enumerate(STREAMS):
        descriptor = os.open(Path(folder, name), os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The files end with the process.
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    from storage.cli import main  # noqa: PLC0415  # it is there already

    sys.exit(main(arguments))


def started(*arguments: str, first: str = "", **environ: str) -> "subprocess.Popen[bytes]":
    """A command that is still running, with pipes: `python -m storage`.

    The process runs the code ``first`` before it.
    """
    return subprocess.Popen(
        [sys.executable, "-c", first + INTERRUPTIBLE, *arguments],
        cwd=ROOT,
        env=environment(**environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
