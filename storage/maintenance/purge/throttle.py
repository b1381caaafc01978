"""Limit what a purge costs others: bounded time under the room's lock, and pauses between."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Final

from storage.config import Config
from storage.maintenance.purge.job import PurgeJob
from storage.observability.progress import Progress, Report, silent

BATCH_MIN: Final = 20
BATCH_MAX: Final = 500
HOLD_MS: Final = 50  # the time that a transaction should block the room's writers

Watcher = Callable[[PurgeJob], Awaitable[None]]


class PurgeThrottle:
    """Batches as large as fit into `HOLD_MS`, and `Config.purge_pause_ms` after each.

    ``watcher`` is awaited with the job after each commit.
    """

    def __init__(
        self, config: Config, watcher: Watcher | None = None, report: Report = silent
    ) -> None:
        self.report = report
        self.expected: int | None = None
        """The number of events that the job takes, if it was counted."""
        self.batch: int = min(max(BATCH_MAX // 4, BATCH_MIN), BATCH_MAX)
        self._pause_ms = config.purge_pause_ms
        self._watcher = watcher
        self._start = self._waited_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure one transaction; set the next batch size by its time under the lock (`held`)."""
        start = self._start = perf_counter()
        yield
        took_ms = (perf_counter() - self._start) * 1000
        self._waited_s = self._start - start
        if took_ms > HOLD_MS:
            self.batch = max(self.batch // 2, min(BATCH_MIN, BATCH_MAX))
        elif took_ms < HOLD_MS / 2:
            self.batch = min(self.batch * 2, BATCH_MAX)

    def held(self) -> None:
        """Start the clock: the room is locked from now on, and the wait for it does not count."""
        self._start = perf_counter()

    def _progress(self, job: PurgeJob) -> Progress:
        if job.phase == "sweep":
            # some of them stay
            return Progress(
                "purge state", job.swept_count, job.set_aside_count, "events", is_estimate=True
            )
        done = job.deleted_count + job.set_aside_count
        return Progress("purge", done, self.expected, "events")

    async def rest(self, job: PurgeJob) -> None:
        """Pause, for at least as long as this transaction waited for other writers of the room."""
        self.report(self._progress(job))
        if self._watcher is not None:
            await self._watcher(job)
        await asyncio.sleep(max(self._pause_ms / 1000, self._waited_s))
