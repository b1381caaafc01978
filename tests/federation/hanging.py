"""A request without an answer, whose time is over at once.

The other requests of the test have as much time as a busy machine may need. With a real limit that
a test can wait for, an honest answer would come too late there.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final

import pytest

from storage.federation import requests

_limit: Final[ContextVar[asyncio.Timeout]] = ContextVar("limit")


@asynccontextmanager
async def _noted(seconds: float) -> AsyncIterator[None]:
    """The limit of a request, as `asyncio.timeout` makes it."""
    async with asyncio.timeout(seconds) as limit:
        before = _limit.set(limit)
        try:
            yield
        finally:
            _limit.reset(before)


@pytest.fixture(autouse=True)
def limits_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `hang` know the limit of the request that it answers."""
    noting = SimpleNamespace(**{**vars(asyncio), "timeout": _noted})
    monkeypatch.setattr(requests, "asyncio", noting)


async def hang(_: dict[str, Any]) -> dict[str, Any]:
    """Give no answer. The limit of the request ends it, now."""
    _limit.get().reschedule(asyncio.get_running_loop().time())
    return await forever()


async def forever() -> dict[str, Any]:
    """Give no answer until somebody cancels the request."""
    await asyncio.Event().wait()
    return {}
