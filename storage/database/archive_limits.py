"""Limits for reads of the archive, so that a store that does not answer stops nothing else.

A read of archived events keeps its connection until the bytes are there. A store that hangs, such
as a network file system without its server, would take one connection after the other. So

* a read that takes longer than `Config.archive_timeout_ms` raises `ArchiveUnavailable`;
* then all reads of the folder do so at once, and after PAUSE_S one of them tries it again;
* half of the connections may wait as long as that, and further ones for SLOW_MS.

Reads have threads of their own, since a thread that hangs cannot be ended. Those of the event loop
are for the homeserver.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Final, NamedTuple, TypeVar

from storage.config import Config
from storage.errors import ArchiveUnavailable
from storage.observability.outages import Outage

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

SLOW_MS: Final = 1_000
"""A store answers within milliseconds; a failure that took longer is an outage."""
PAUSE_S: Final = 5.0
POOL_SMALL: Final = 2
"""All connections of such a pool may wait long: it is that of a command."""
MAINTENANCE_MS: Final = 300_000
"""The timeout of commands and jobs, which read many events at once and keep nobody waiting."""


class ArchiveLimits:
    """The limits of one pool of connections, and the reads that go on."""

    def __init__(self, config: Config) -> None:
        self._timeout_ms = config.archive_timeout_ms
        self._most = max(POOL_SMALL, config.pool_size_max // 2)
        self._numbers = count()
        self._waiting: dict[int, float] = {}
        """When each read that goes on began."""
        self._folders: dict[str, _Folder] = {}

    async def read(self, folder: str, work: Callable[[], T]) -> T:
        """Return the result of ``work``, a blocking read of this folder.

        Raise `ArchiveUnavailable`.
        """
        store = self._folders.get(folder)
        if store is None:
            store = self._folders[folder] = _Folder(folder, self._most)
        begun, limit_ms = time.monotonic(), self._limit_ms(folder)
        store.enter(begun, limit_ms)
        number = next(self._numbers)
        self._waiting[number] = begun
        try:
            found = await _read(store, work, limit_ms)
        except ArchiveUnavailable as error:
            if time.monotonic() - begun < SLOW_MS / 1000:
                store.try_again()
            elif limit_ms == self._timeout_ms:
                store.rest(error)
            raise
        finally:
            del self._waiting[number]
        store.answered()
        return found

    def _limit_ms(self, folder: str) -> int:
        """Return how long a new read may take. Raise `ArchiveUnavailable` if it may not begin."""
        if len(self._waiting) < self._most:
            return self._timeout_ms
        if time.monotonic() - min(self._waiting.values()) >= SLOW_MS / 1000:
            raise ArchiveUnavailable("too many reads wait for it", url=folder)
        return min(SLOW_MS, self._timeout_ms)


async def _read(store: "_Folder", work: Callable[[], T], limit_ms: int) -> T:
    try:
        async with asyncio.timeout(limit_ms / 1000):
            return await asyncio.get_running_loop().run_in_executor(store.threads, work)
    except TimeoutError as error:
        raise ArchiveUnavailable(f"no answer within {limit_ms} ms", url=store.url) from error


class _Folder:
    """A folder of the archive: its threads, and whether it answers."""

    def __init__(self, url: str, threads: int) -> None:
        self.url = url
        self.threads = ThreadPoolExecutor(threads, "archive")
        self._outage = Outage(logger, f"the archive {url}")
        self._rests_until: float | None = None

    def enter(self, now: float, limit_ms: int) -> None:
        """Raise `ArchiveUnavailable` while it rests; the first read after that tries it for all."""
        if self._rests_until is None:
            return
        if now < self._rests_until:
            raise ArchiveUnavailable("it did not answer a moment ago", url=self.url)
        self._rests_until = now + limit_ms / 1000

    def rest(self, error: ArchiveUnavailable) -> None:
        """Note an outage."""
        self._rests_until = time.monotonic() + PAUSE_S
        self._outage.failed(str(error))

    def try_again(self) -> None:
        """Note that it answers, if only with an error: nobody has to wait for it."""
        self._rests_until = None

    def answered(self) -> None:
        """Note the end of an outage, if there was one."""
        self.try_again()
        self._outage.recovered()


class ArchiveAccess(NamedTuple):
    """The knowledge of a session about the archive."""

    limits: ArchiveLimits
    urls: dict[int, str]
    """Where packs are; they never change, and a session has one database."""


def open_access(limits: ArchiveLimits | None = None) -> ArchiveAccess:
    """Return the access of a new session; without ``limits`` it shares nothing with others."""
    return ArchiveAccess(limits or ArchiveLimits(Config()), {})
