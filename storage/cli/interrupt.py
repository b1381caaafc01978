"""How a signal ends a command: cleanly, with exit code 130 (SIGINT) or 143 (SIGTERM).

The first signal cancels the work. The statement that runs is cancelled on the server, transactions
are rolled back, locks are released, temporary files are deleted, and the embedded Postgres stops. A
second signal interrupts this cleaning up, except for threads. A third ends the process at once;
then Postgres cleans up when it sees that the connection is closed.
"""

import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from storage.errors import StorageError

if TYPE_CHECKING:
    import asyncio  # only commands that run need it, so it is imported late

T = TypeVar("T")

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

AGAIN: Final = "run the same command again to go on"
UNCHANGED: Final = "nothing was changed"

Handler = Callable[[int, FrameType | None], object]


class Interrupted(SystemExit):
    """A signal ended the command. ``advice`` says how to continue, or is empty."""

    def __init__(self, number: int, advice: str = "") -> None:
        super().__init__(128 + number)
        self.advice = advice

    @property
    def sentence(self) -> str:
        return f"interrupted: {self.advice}" if self.advice else "interrupted"


class SignalStop:
    """Handles the signals while a task runs: see the module docstring."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the work as the task that a signal cancels."""
        import asyncio  # noqa: PLC0415

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await work

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.numbers.append(number)
        if len(self.numbers) == 1 and self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif len(self.numbers) <= 2:
            raise KeyboardInterrupt
        else:
            os._exit(128 + self.numbers[0])


def run(work: Coroutine[Any, Any, T], advice: str = "") -> T:
    """Run the coroutine of a command; a signal cancels it and raises `Interrupted`."""
    import asyncio  # noqa: PLC0415

    import uvloop  # noqa: PLC0415

    stop = SignalStop()
    with handled(stop):
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(stop.watched(work))
        except (asyncio.CancelledError, KeyboardInterrupt, StorageError):
            if not stop.numbers:
                raise
            ignore_signals()
            raise Interrupted(stop.numbers[0], advice) from None


@contextmanager
def interruptible(advice: str = "") -> Iterator[None]:
    """Raise `Interrupted` where a signal arrives in the block, for work without an event loop.

    A third signal ends the process at once. Spark sets a handler of its own for SIGINT: it ends the
    running jobs and raises KeyboardInterrupt. SIGTERM does the same then.
    """
    numbers: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        other = signal.getsignal(signal.SIGINT)
        if len(numbers) == 1 and callable(other) and other is not stop:
            other(number, frame)
        if len(numbers) == 1:
            raise Interrupted(number, advice)
        if len(numbers) > 2:
            os._exit(128 + numbers[0])

    with handled(stop):
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(numbers[0] if numbers else signal.SIGINT, advice) from None


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """Handle the signals in the block, except those that this process ignores.

    At its end the earlier handlers return, unless others were set in the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    changed = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    for number in changed:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in changed:
            if signal.getsignal(number) is handler:
                signal.signal(number, before[number] or signal.SIG_DFL)


def ignore_signals() -> None:
    """Ignore further signals: the process is about to end, and would lose its exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
