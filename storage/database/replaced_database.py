"""The check that a pool's sessions lead to the database that was entered, not to a replacement.

A promoted standby, or a restored backup, may lack the last commits. The memory of a process then
belongs to the old database. So each new session is checked. If the check fails, nobody gets a
session, to write or to read, until the user of the pool has entered again.

    current   check fails     -> replaced    all sessions end, and callers wait
    replaced  `enter_again`   -> current     callers go on

`era` counts these steps. A plan or request of one era is not valid in the next.
"""

import asyncio
from typing import Final

from storage.errors import DatabaseReplaced

REPLACED: Final = (
    "the database was restored, or a standby took over, and this process has not entered it again"
)


class Guard:
    """The state of one pool."""

    def __init__(self) -> None:
        self.era: int = 0
        self.reason: str = ""
        """Why the database could not be entered again so far."""
        self._current = asyncio.Event()
        self._current.set()
        self._replaced = asyncio.Event()

    @property
    def is_current(self) -> bool:
        """Return whether sessions may be lent out."""
        return self._current.is_set()

    def replaced(self) -> None:
        """Lend out no session from now on."""
        if self._current.is_set():
            self.era += 1
            self._current.clear()
            self._replaced.set()

    def enter_again(self) -> None:
        """Lend out sessions again."""
        self.era += 1
        self.reason = ""
        self._replaced.clear()
        self._current.set()

    def close(self) -> None:
        """Release all waiting callers."""
        self._current.set()

    async def until_replaced(self) -> None:
        await self._replaced.wait()

    async def until_current(self, seconds: float) -> None:
        """Wait until the database is entered again. Raise `DatabaseReplaced` on a timeout."""
        try:
            async with asyncio.timeout(seconds):
                await self._current.wait()
        except TimeoutError:
            raise self.error() from None

    def error(self) -> DatabaseReplaced:
        """Return the error for callers that cannot wait."""
        return DatabaseReplaced(f"{REPLACED}: {self.reason}" if self.reason else REPLACED)
