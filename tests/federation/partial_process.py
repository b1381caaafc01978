"""Processes that join with the members omitted, receive, complete, and are killed on the way.

Each kills itself a moment after it begins its n-th statement: at once, or some milliseconds later.
They are forks of one process that has imported everything: that takes longer than all the rest.
"""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import storage
from storage.config import Config
from storage.streams import position_poller
from storage.testing import signing_key
from tests.federation.partial_worlds import SERVER, PartialWorld, Replica, Script

POLLS: Final = frozenset(
    {position_poller.SQL_SEQUENCES, position_poller.SQL_MOVE_IDLE, position_poller.SQL_POSITIONS}
)


class Killer:
    """An observer that counts statements, and kills its process after the n-th; 0: never.

    The statements that are repeated all the time do not count: how many there are depends on the
    load, and the n-th might never come.
    """

    def __init__(self, last: int = 0, delay_ms: float = 0) -> None:
        self.count = 0
        self.last = last
        self.delay_ms = delay_ms

    def before(self, statement: str) -> None:
        if statement in POLLS:
            return
        self.count += 1
        if self.count == self.last and self.delay_ms:
            threading.Timer(self.delay_ms / 1000, kill).start()
        elif self.count == self.last:
            kill()

    def after(self, _: str, __: float) -> None:
        """Nothing."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@functools.lru_cache(maxsize=1)
def script_of(seed: int) -> Script:
    """The script of a seed; to play it changes nothing in it."""
    return Script(PartialWorld(seed))


async def play(dsn: str, seed: int, killer: Killer, *, is_partial: bool = True) -> None:
    script = script_of(seed)
    async with storage.open(
        dsn,
        server_name=SERVER,
        signing_key=signing_key(SERVER),
        observer=killer,
        config=Config(pool_size_max=3),
    ) as store:
        await script.play(Replica.of(store, script.world.remote), is_partial=is_partial)


class Forks:
    """The process that forks, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._turn = threading.Lock()

    def run(self, *job: Any) -> int:
        """Do a job in a new process that kills itself; return its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())


@contextmanager
def forks(module: str = "tests.federation.partial_process") -> Iterator[Forks]:
    """Start the process that forks: a module that serves."""
    command = [sys.executable, "-m", module]
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True) as process:
        yield Forks(process)


def serve(
    do: Callable[..., Coroutine[Any, Any, None]], prepare: Callable[..., object] | None = None
) -> None:
    """Do each line of the input in a process, one after the other; print their exit codes."""
    for line in sys.stdin:
        job = json.loads(line)
        if prepare is not None:
            prepare(*job)
        child = os.fork()
        if child == 0:
            asyncio.run(do(*job))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


async def play_killed(dsn: str, seed: int, number: int, delay_ms: float) -> None:
    await play(dsn, seed, Killer(number, delay_ms))


if __name__ == "__main__":
    serve(play_killed, lambda _, seed, *__: script_of(seed))
