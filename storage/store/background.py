"""Background tasks of a store."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

logger: logging.Logger = logging.getLogger(__name__)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a background task during the block. Cancel and await it at the end.

    If the task fails, log the exception at once. The block goes on.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error(
            "the background task %s has failed, and stays away until the store is opened again",
            task.get_coro().__qualname__,  # type: ignore[union-attr]
            exc_info=error,
        )
