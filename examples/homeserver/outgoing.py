"""The queues to other servers. Their events come from the store's outbox, in its order."""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from storage import EventId, StorageError, Store

from .remote import Remote
from .web import Json, MatrixError, now_ms

logger: Final = logging.getLogger(__name__)
CURSOR: Final = "federation"
POLL_S, PAUSE_S, PAUSE_S_MAX = 1.0, 0.5, 60.0
PDUS_MAX: Final = 50


@dataclass
class Queue:
    """The events that one server has yet to get, with their positions in the outbox."""

    pdus: deque[tuple[int, EventId]] = field(default_factory=deque)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Outgoing:
    """A queue for each server. The cursor stays before the first event that is not sent."""

    def __init__(self, store: Store, remote: Remote) -> None:
        self._store, self._remote = store, remote
        self._queues: dict[str, Queue] = {}
        self._news = asyncio.Event()
        self._read = self._saved = 0
        self._numbers = itertools.count(now_ms())

    def wake(self) -> None:
        """Look for new events now."""
        self._news.set()

    def is_up(self, server: str) -> None:
        """Send now to a server that was down: a request of it came."""
        if server in self._queues:
            self._queues[server].is_up.set()

    def pass_on(self, servers: Iterable[str], event_id: EventId) -> None:
        """Send an event that another server gave to this one."""
        for server in servers:
            if server != self._remote.name:
                self._put(server, self._read + 1, event_id)

    def _put(self, server: str, position: int, event_id: EventId) -> None:
        queue = self._queues.setdefault(server, Queue())
        queue.pdus.append((position, event_id))
        queue.news.set()
        queue.task = queue.task or asyncio.create_task(self._serve(server, queue))

    async def run(self) -> None:
        """Fill the queues, for as long as the server runs."""
        self._read = self._saved = await self._store.cursors.get(CURSOR)
        while True:
            listed = await self._store.outbox(self._read)
            for one in listed:
                for server in one.servers:
                    self._put(server, one.position, one.event_id)
            if self._read == listed.upto:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), POLL_S)
                self._news.clear()
            self._read = listed.upto
            await self._save()

    async def _serve(self, server: str, queue: Queue) -> None:
        pause = PAUSE_S
        while await queue.news.wait():
            queue.news.clear()
            queue.is_up.clear()
            try:
                while queue.pdus:
                    await self._send(server, queue)
                    pause = PAUSE_S
            except (MatrixError, StorageError) as error:
                logger.warning("%s gets nothing for %.1f s: %s", server, pause, error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(queue.is_up.wait(), pause)
                pause = min(2 * pause, PAUSE_S_MAX)
                queue.news.set()

    async def _send(self, server: str, queue: Queue) -> None:
        ids = [event_id for _, event_id in itertools.islice(queue.pdus, PDUS_MAX)]
        events = await self._store.events(ids)
        body: Json = {"origin": self._remote.name, "origin_server_ts": now_ms()}
        body["pdus"] = [events[one].json for one in ids if one in events]
        path = "v1", "send", str(next(self._numbers))
        answer = await self._remote.request(server, "PUT", *path, body=body)
        for event_id, result in answer.get("pdus", {}).items():
            if "error" in result:
                logger.warning("%s refused %s: %s", server, event_id, result["error"])
        for _ in ids:
            queue.pdus.popleft()
        await self._save()

    async def _save(self) -> None:
        unsent = [queue.pdus[0][0] - 1 for queue in self._queues.values() if queue.pdus]
        position = min([*unsent, self._read])
        if position > self._saved:
            self._saved = position
            await self._store.cursors.set(CURSOR, position)
