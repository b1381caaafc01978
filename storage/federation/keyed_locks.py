"""Locks by name within this process; a lock that nobody uses takes no memory."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from weakref import WeakValueDictionary


class KeyedLocks:
    """One `asyncio.Lock` for each name in use."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a name; the caller holds the reference while it uses the lock."""
        found = self._locks.get(name)
        if found is None:
            found = self._locks[name] = asyncio.Lock()
        return found

    async def released(self, names: Iterable[str], seconds: float) -> None:
        """Wait until those who have the locks of these names now release them, for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for name in names:
                    if (lock := self._locks.get(name)) is not None:
                        async with lock:
                            pass
