"""Long polling: ask, and if there is nothing new wait for a commit and ask again."""

import asyncio
from collections.abc import Awaitable, Callable

from storage.queries.sync.results import Sync


class Commits:
    """Wakes whoever waits when this process has committed something. `told` is a callback of the writer."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def told(self, *_: object) -> None:
        """Something was committed: all that wait go on."""
        self._next.set()
        self._next = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Set at the next commit. Take it before looking, so that nothing falls between looking and waiting."""
        return self._next


async def until_news(ask: Callable[[], Awaitable[Sync]], commits: Commits, *, timeout_ms: int, poll_ms: int) -> Sync:
    """The first answer that is not empty, or the last one when the time is over.

    What another process commits is found by asking every ``poll_ms``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    while True:
        commit = commits.next()
        answer = await ask()
        left = deadline - loop.time()
        if not answer.is_empty or left <= 0:
            return answer
        await _wait(commit, min(left, poll_ms / 1000))


async def _wait(commit: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await commit.wait()
    except TimeoutError:
        return
