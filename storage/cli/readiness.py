"""Whether `serve` is ready: it reaches the database, follows the streams and has its transport.

A load balancer, systemd or Kubernetes asks for it at `/readyz`. A part that is not ready has a
short reason without addresses, because the port of `/readyz` may be open to others. The log has
the whole error.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, LiteralString

from storage.errors import StorageError
from storage.replication import ReplicationPeer
from storage.store.facade import Store

PROBE_SECONDS: Final = 2.0
"""Longest wait for the database; probes of load balancers usually wait longer."""

STREAM_SECONDS: Final = 5.0
"""A stream counts as unavailable this long after the poll that should have read its position."""

SQL_PROBE: Final[LiteralString] = "SELECT 1"


class Readiness:
    """The checks of one process.

    ``redis`` is its part in replication over Redis, if there is one. `parts` lists the checked
    parts.
    """

    def __init__(
        self,
        store: Store,
        redis: ReplicationPeer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._redis = redis
        self._clock = clock
        self._probes: set[asyncio.Task[None]] = set()
        self.parts: list[str] = ["database", "streams", *(["redis"] if redis is not None else [])]

    async def not_ready(self) -> dict[str, str]:
        """Return the parts that are not ready, each with the reason."""
        reasons = {
            "database": await self._database(),
            "streams": self._streams(),
            "redis": self._over_redis(),
        }
        return {part: reason for part, reason in reasons.items() if reason is not None}

    async def _database(self) -> str | None:
        """Send a statement over the pool that all calls use."""
        probe = asyncio.create_task(self._probe(), name="readiness-probe")
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)
        await asyncio.wait([probe], timeout=PROBE_SECONDS)
        if not probe.done():
            probe.cancel()  # not awaited: its connection waits for the end of the statement
            return f"no answer within {PROBE_SECONDS:g} s"
        error = probe.exception()
        if error is not None and not isinstance(error, StorageError):
            raise error
        return None if error is None else type(error).__name__

    async def _probe(self) -> None:
        async with self._store.database.connection() as conn:
            await conn.execute(SQL_PROBE)

    async def close(self) -> None:
        """Wait for the end of abandoned probes."""
        if self._probes:
            await asyncio.wait(self._probes)

    def _streams(self) -> str | None:
        """Compare the age of the last poll of all positions with the interval of the polls."""
        age = self._clock() - self._store.measures.streams_polled_at
        allowed = self._store.database.config.follow_ms / 1000 + STREAM_SECONDS
        return None if age <= allowed else f"positions last read {age:.1f} s ago"

    def _over_redis(self) -> str | None:
        if self._redis is None or self._redis.transport.links:
            return None
        return "no connection"
