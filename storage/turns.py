"""Long loops that let other tasks of the event loop run in between.

A loop weighs its items in bytes of JSON, and a turn ends after `TURN_BYTES` of them. So nothing
depends on a clock. The largest event takes a turn of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")
R = TypeVar("R")

TURN_BYTES: Final = 65_536
"""Bytes of one turn, the size of the largest event: some milliseconds of parsing."""
ITEM_BYTES: Final = 640
"""The least weight of an item: a hundred short ones are a turn."""
TURN_ROWS: Final = 2_000
"""Rows or ids of one turn that are only copied, checked or sent: some milliseconds."""


class Turns:
    """The turns of one loop."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = TURN_BYTES

    async def took(self, size: int = 0) -> None:
        """Note an item of so many bytes; let other tasks run if the turn is over."""
        self._left -= ITEM_BYTES + size
        if self._left <= 0:
            await asyncio.sleep(0)
            self._left = TURN_BYTES


async def in_turns(items: Iterable[T], size: Callable[[T], int] | None = None) -> AsyncIterator[T]:
    """Yield the items, and let other tasks run after each turn. ``size``: the bytes of an item."""
    left = TURN_BYTES
    for item in items:
        yield item
        left -= ITEM_BYTES if size is None else ITEM_BYTES + size(item)
        if left <= 0:
            await asyncio.sleep(0)
            left = TURN_BYTES


async def parts(items: Sequence[T], most: int = TURN_ROWS) -> AsyncIterator[Sequence[T]]:
    """Yield the items in parts of at most so many, and let other tasks run in between."""
    if len(items) <= most:
        yield items
        return
    for start in range(0, len(items), most):
        yield items[start : start + most]
        await asyncio.sleep(0)


async def mapped(make: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what ``make`` makes of each item, in `parts`."""
    if len(items) <= TURN_ROWS:
        return list(map(make, items))
    return [item async for part in parts(items) for item in map(make, part)]


def has_long_list(arguments: Iterable[object]) -> bool:
    """Return whether a list among the arguments takes milliseconds to check or encode."""
    for argument in arguments:  # noqa: SIM110  # a third of the time of any(): a write has 110
        if type(argument) is list and len(argument) > TURN_ROWS:
            return True
    return False


async def pause_if_long(*arguments: object) -> None:
    """Let other tasks run if there is such a list."""
    if has_long_list(arguments):
        await asyncio.sleep(0)
