"""Actions that take long: one at a time, in the background, with a result to look at later."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from storage.errors import InputError, StorageError

logger: logging.Logger = logging.getLogger(__name__)

LINES_MAX: Final = 200
TASKS_KEPT: Final = 10

Work = AsyncGenerator[str, None]
"""Yields lines of a result while it works."""


@dataclass(slots=True)
class BackgroundTask:
    """A running or finished action: its title, the last lines, and how it ended."""

    title: str
    started_ms: int
    lines: list[str] = field(default_factory=list)
    line_count: int = 0
    state: str = "running"


class Tasks:
    """The tasks of one inspector."""

    def __init__(self) -> None:
        self.known: list[BackgroundTask] = []
        self._running: asyncio.Task[None] | None = None

    def start(self, title: str, work: Work) -> BackgroundTask:
        """Start a task. `InputError` while another one runs."""
        if self._running is not None and not self._running.done():
            raise InputError("another action is running: wait for its end")
        task = BackgroundTask(title, time.time_ns() // 1_000_000)
        self.known = [task, *self.known[: TASKS_KEPT - 1]]
        self._running = asyncio.create_task(_run(task, work), name=f"inspector: {title}")
        return task

    async def ended(self) -> None:
        """Wait for the end of the running task, if there is one."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def close(self) -> None:
        """Cancel the running task and wait for its end."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])


async def _run(task: BackgroundTask, work: Work) -> None:
    try:
        async with aclosing(work) as lines:
            async for line in lines:
                task.line_count += 1
                task.lines = [*task.lines[-LINES_MAX + 1 :], line]
    except StorageError as error:
        task.state = f"failed: {error}"
    except asyncio.CancelledError:
        task.state = "cancelled"
        raise
    except Exception:
        logger.exception("the action %s failed", task.title)
        task.state = "failed: see the log"
    else:
        task.state = "done"
