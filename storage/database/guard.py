"""Whether the sessions of a pool lead to the database that its user has entered, or to one that took its place.

A standby that is promoted, or a restored backup, may lack what was committed last. Whatever a process remembers is of the old database then.
So each new session is checked, and where the check fails nobody gets a session, to write or to read, until the user has entered again.

    current   check fails     -> replaced    all sessions end, and callers wait
    replaced  `enter_again`   -> current     callers go on

`era` counts these steps. What was planned, or sent, in one era is not valid in the next.
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
        self.era = 0
        self.reason = ""
        """Why the database could not be entered again so far."""
        self._current = asyncio.Event()
        self._current.set()
        self._replaced = asyncio.Event()

    @property
    def is_current(self) -> bool:
        """Whether sessions may be lent out."""
        return self._current.is_set()

    def replaced(self) -> None:
        """Lend out nothing from now on."""
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
        """Have nobody wait any more."""
        self._current.set()

    async def until_replaced(self) -> None:
        """Wait until the database is found to be another one."""
        await self._replaced.wait()

    async def until_current(self, seconds: float) -> None:
        """Wait until the database is entered again. `DatabaseReplaced` if it is not in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._current.wait()
        except TimeoutError:
            raise self.error() from None

    def error(self) -> DatabaseReplaced:
        """The error for whoever cannot wait."""
        return DatabaseReplaced(f"{REPLACED}: {self.reason}" if self.reason else REPLACED)
