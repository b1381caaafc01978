"""Long loops that let other tasks of the event loop run in between."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

TURN: Final = 100
"""Items of one turn: some milliseconds, if each is an event whose signature is checked."""


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, and let other tasks run after each hundred."""
    for number, item in enumerate(items, 1):
        yield item
        if number % TURN == 0:
            await asyncio.sleep(0)
