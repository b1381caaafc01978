"""Locks by name within this process; a lock that nobody uses takes no memory."""

import asyncio
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
