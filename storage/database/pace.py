"""The pace of long work beside servers: the size of its batches, and the pauses between them.

Jobs, purges, `censor` and the archive work in batches, each a transaction or a statement of its
own. A batch is as large as fits into a time, so it blocks others for that long. A pause follows it,
for as long as the batch took or for a fixed time, so the work leaves others a share of the server.
The work itself remembers where it is, and reports its progress.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(slots=True)
class Pace:
    """The pauses of one piece of work. ``pause_s`` None: as long as the last batch took."""

    pause_s: float | None = None
    clock: Callable[[], float] = perf_counter
    took_s: float = 0.0
    began: float = 0.0

    @contextmanager
    def batch(self) -> Iterator[None]:
        self.restart()
        yield
        self.took_s = self.clock() - self.began

    def restart(self) -> None:
        """Count the time of this batch from now on: what it waited for others does not count."""
        self.began = self.clock()

    async def rest(self, *, least_s: float = 0.0) -> None:
        """Pause after a batch."""
        pause = self.took_s if self.pause_s is None else self.pause_s
        await asyncio.sleep(max(pause, least_s))


async def in_batches(step: Callable[[], Awaitable[int | None]], pace: Pace) -> int:
    """Do one batch after the other, until one returns None; return the sum of their counts.

    There is no pause after a batch that did nothing.
    """
    total = 0
    while True:
        with pace.batch():
            done = await step()
        if done is None:
            return total
        total += done
        if done:
            await pace.rest()


def fitting(rows: int, seconds: float, *, goal_s: float, least: int = 1, most: int) -> int:
    """Return the number of rows for the next batch, after one that took so long.

    It doubles after a short batch and halves after a long one, within bounds.
    """
    if seconds > goal_s:
        return max(rows // 2, least)
    return min(rows * 2, most) if seconds < goal_s / 2 else rows
