"""Long loops that let other tasks of the event loop run in between.

A loop weighs its items in bytes of JSON, and a turn ends after `TURN_BYTES` of them. So nothing
depends on a clock. The largest event takes a turn of its own.

The objects of a large request are many, and a full garbage collection visits them all at once.
There is none from the first end of a turn to the end of the request (`Request`).
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")

TURN_BYTES: Final = 65_536
"""Bytes of one turn, the size of the largest event: some milliseconds of parsing."""
ITEM_BYTES: Final = 640
"""The least weight of an item: a hundred short ones are a turn."""
TURN_ROWS: Final = 2_000
"""Rows or ids of one turn that are only copied, checked or sent: some milliseconds."""


NEVER: Final = 2**31 - 1
"""The threshold of the oldest generation while a large request runs."""


class FullCollections:
    """Full garbage collections of the process, which large requests of any thread put off.

    Young objects are collected all the time. A threshold that was set meanwhile stays.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._usual = 0
        self._lock = Lock()

    def put_off(self) -> None:
        """Begin a large request."""
        with self._lock:
            self._requests += 1
            if self._requests == 1:
                young, middle, self._usual = gc.get_threshold()
                gc.set_threshold(young, middle, NEVER)

    def allow(self) -> None:
        """End a large request."""
        with self._lock:
            self._requests -= 1
            young, middle, old = gc.get_threshold()
            if self._requests == 0 and old == NEVER:
                gc.set_threshold(young, middle, self._usual)


FULL_COLLECTIONS: Final = FullCollections()


class Request:
    """One request, as a block; within another one it does nothing. It is large after a turn."""

    __slots__ = ("is_large", "is_outermost", "is_over")

    def __enter__(self) -> None:
        """Begin the request."""
        self.is_large = self.is_over = False
        self.is_outermost = _request.get() is None
        if self.is_outermost:
            _request.set(self)

    def __exit__(self, *_: object) -> None:
        """End the request."""
        if self.is_outermost:
            _request.set(None)
            self.is_over = True
            if self.is_large:
                FULL_COLLECTIONS.allow()


_request: ContextVar[Request | None] = ContextVar("request", default=None)


def as_request(
    work: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Decorate a coroutine function that is a request."""

    @wraps(work)
    async def call(*args: P.args, **how: P.kwargs) -> R:
        with Request():
            return await work(*args, **how)

    return call


async def others() -> None:
    """Let other tasks run: the end of a turn."""
    request = _request.get()
    # a task that a request has left behind has its context
    if request is not None and not request.is_large and not request.is_over:
        request.is_large = True
        FULL_COLLECTIONS.put_off()
    await asyncio.sleep(0)


class Turns:
    """The turns of one loop."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = TURN_BYTES

    async def took(self, size: int = 0) -> None:
        """Note an item of so many bytes; let other tasks run if the turn is over."""
        self._left -= ITEM_BYTES + size
        if self._left <= 0:
            await others()
            self._left = TURN_BYTES


async def in_turns(items: Iterable[T], size: Callable[[T], int] | None = None) -> AsyncIterator[T]:
    """Yield the items, and let other tasks run after each turn. ``size``: the bytes of an item."""
    left = TURN_BYTES
    for item in items:
        yield item
        left -= ITEM_BYTES if size is None else ITEM_BYTES + size(item)
        if left <= 0:
            await others()
            left = TURN_BYTES


async def parts(items: Sequence[T], most: int = TURN_ROWS) -> AsyncIterator[Sequence[T]]:
    """Yield the items in parts of at most so many, and let other tasks run in between."""
    if len(items) <= most:
        yield items
        return
    for start in range(0, len(items), most):
        yield items[start : start + most]
        await others()


async def mapped(make: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what ``make`` makes of each item, in `parts`."""
    if len(items) <= TURN_ROWS:
        return list(map(make, items))
    return [one async for part in parts(items) for one in map(make, part)]


def has_long_list(arguments: Iterable[object]) -> bool:
    """Return whether a list among the arguments takes milliseconds to check or encode."""
    return any(type(one) is list and len(one) > TURN_ROWS for one in arguments)


async def pause_if_long(*arguments: object) -> None:
    """Let other tasks run if there is such a list."""
    if has_long_list(arguments):
        await others()
