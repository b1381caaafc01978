"""A fresh database for each example of a state machine."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import asyncpg


class ExampleDatabases:
    """Makes databases one after the other, on an event loop of its own."""

    def __init__(self, fresh: Callable[[], AbstractAsyncContextManager[str]]) -> None:
        self._fresh = fresh
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()

    def open(self, sql: str = "") -> str:
        """Return the DSN of a new database, in which ``sql`` was executed."""
        self._runner, self._stack = asyncio.Runner(), AsyncExitStack()
        dsn = self._runner.run(self._stack.enter_async_context(self._fresh()))
        if sql:
            self._runner.run(execute(dsn, sql))
        return dsn

    def close(self) -> None:
        """Drop it."""
        self._runner.run(self._stack.aclose())
        self._runner.close()


async def execute(dsn: str, sql: str) -> None:
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(sql)
    finally:
        await conn.close()
