"""`Sender`: the events of local users, to each server that must have them.

It reads the outbox from a cursor, and has a queue for each server. So a slow server does not delay
the others. The cursor stays before the first event that a server lacks: after a restart the sender
sends again from there, and other servers ignore duplicates. Events of other servers that it passes
on are facts of the stream "relay", with a cursor of their own. So a restart loses none of them.

A transaction that another server refuses, or that has a damaged event, is sent in smaller parts.
One event that cannot be sent is logged and dropped. The next one is dropped after a pause only,
unless another was sent meanwhile: a server that refuses everything for a while loses few events.

A queue that becomes too long keeps the latest event of each room. Other servers request the events
before it, because it names them as parents.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count, islice
from typing import Final, NamedTuple

from storage import arguments as args
from storage.errors import StorageClosed, StorageCorrupt, StorageError
from storage.federation.remote import RemoteError, check_limits
from storage.ids import EventId, RoomId, ServerName
from storage.queries.events import StoredEvent
from storage.store.facade import Store
from storage.streams.feed import Advance

logger: Final = logging.getLogger(__name__)

RELAY: Final = "relay"
RELAY_KEEP_MS: Final = 7 * 24 * 3_600_000
"""Events of other servers are passed on for so long to a server that does not answer."""
RELAY_ROWS: Final = 100
PASSING: Final = frozenset({401, 403, 404, 408, 429})
"""Refusals (HTTP status) that are not of the events, so the transaction is sent again."""

SendTransaction = Callable[[ServerName, str, list[StoredEvent]], Awaitable[None]]
"""PUT /_matrix/federation/v1/send/{txnId}: the server, a transaction id, and the events."""


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """The bounds on the work of a `Sender`.

    ``pdus_max`` is the number of events in a transaction, 50 by the specification. A queue of more
    than ``queue_max`` events keeps the latest of each room. A server that fails is tried again
    after ``retry_seconds``, then after twice as long, up to ``retry_seconds_max``. A transaction
    without an answer within ``send_seconds`` has failed. The outbox is read after ``poll_seconds``
    if no event of this process or of replication comes before.
    """

    pdus_max: int = 50
    queue_max: int = 1_000
    retry_seconds: float = 0.5
    retry_seconds_max: float = 60.0
    send_seconds: float = 60.0
    poll_seconds: float = 1.0

    def __post_init__(self) -> None:
        check_limits(self)


class QueuedEvent(NamedTuple):
    """An event to send, with its position in the outbox.

    ``is_passed_on``: it is of another server, and the position is in the stream "relay".
    """

    position: int
    room_id: RoomId
    is_passed_on: bool


@dataclass(slots=True)
class Destination:
    """The events that one server has yet to get.

    ``has_new_events`` ends the wait for events, ``is_up`` the pause after a failure. A transaction
    has up to ``pdus_max`` events. ``may_drop``: since one was dropped, one was sent, or there was a
    pause.
    """

    pdus_max: int
    queue: dict[EventId, QueuedEvent] = field(default_factory=dict)
    has_new_events: asyncio.Event = field(default_factory=asyncio.Event)
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    may_drop: bool = True

    def put(self, event_id: EventId, event: QueuedEvent, most: int) -> None:
        self.queue.setdefault(event_id, event)
        if len(self.queue) > most:
            latest = {queued.room_id: event_id for event_id, queued in self.queue.items()}
            kept = set(latest.values())
            self.queue = {event_id: at for event_id, at in self.queue.items() if event_id in kept}
        self.has_new_events.set()

    def first(self, *, is_passed_on: bool) -> int | None:
        """Return the first position of one kind. Each kind is in order."""
        kind = (
            event.position for event in self.queue.values() if event.is_passed_on == is_passed_on
        )
        return next(kind, None)


class Sender:
    """Sends the events of local users to other servers. Make one for each store; run it once."""

    def __init__(
        self,
        store: Store,
        send: SendTransaction,
        *,
        cursor: str = "federation",
        limits: SenderLimits | None = None,
    ) -> None:
        """Prepare to send.

        ``send`` sends a transaction, and raises `RemoteError` if the server did not take it. It is
        cancelled after `SenderLimits.send_seconds`.
        ``cursor`` is the name of the position in ``store.cursors``.
        """
        self._store, self._send, self._cursor = store, send, args.text(cursor)
        checked_limits = SenderLimits() if limits is None else limits
        self._limits = args.instance(checked_limits, SenderLimits, "limits")
        self._servers = defaultdict[ServerName, Destination](self._destination)
        self._tasks: dict[ServerName, asyncio.Task[None]] = {}
        self._relay = store.define_stream(RELAY, keep_ms=RELAY_KEEP_MS)
        self._has_new_events = asyncio.Event()
        self._read = {False: 0, True: 0}  # by `QueuedEvent.is_passed_on`
        self._saved = dict(self._read)
        self._transactions = count(time.time_ns())

    def is_up(self, server: str) -> None:
        """Try a server now that failed before. Call it for each request of the server."""
        if (name := args.server(server)) in self._servers:
            self._servers[name].is_up.set()

    async def pass_on(self, servers: Iterable[str], event: StoredEvent) -> None:
        """Send an event that the outbox does not have for these servers.

        It is of another server's user, such as a join that this server accepted, or from before a
        server joined.

        When this returns, a restart does not lose it. Call it before you answer that server, which
        repeats a request without an answer.
        """
        passed, names = args.instance(event, StoredEvent, "event"), args.listed(servers, "servers")
        to = sorted({*map(args.server, names)})
        # a key for each list of servers: the latest fact of a key replaces the others
        key = sha256("\n".join([passed.event_id, *to]).encode()).hexdigest()
        value = {"event_id": passed.event_id, "room_id": passed.room_id, "servers": to}
        await self._relay.publish(key, value)

    async def run(self) -> None:
        """Send until it is cancelled. Errors of the database and of servers are logged.

        Raise `StorageClosed` after the store was closed.
        """
        unsubscribe = self._store.streams.feed.subscribe(self._advanced)
        try:
            await self._read_outbox()
        finally:
            unsubscribe()
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _destination(self) -> Destination:
        return Destination(self._limits.pdus_max)

    def _advanced(self, advance: Advance) -> None:
        if advance.stream_name in ("events", RELAY):
            self._has_new_events.set()

    async def _read_outbox(self) -> None:
        has_begun = False
        while True:
            self._has_new_events.clear()
            try:
                if not has_begun:
                    await self._read_cursors()
                    has_begun = True
                is_whole = await self._read_page() & await self._read_relay()
                await self._save()
            except StorageClosed:
                raise
            except StorageError as error:
                logger.warning("the outbox cannot be read: %s", error)
                is_whole = True
            if is_whole:
                await _wait(self._has_new_events, self._limits.poll_seconds)

    async def _read_cursors(self) -> None:
        """Begin after what was sent before this process started."""
        await self._relay
        for kind in self._read:
            self._read[kind] = self._saved[kind] = await self._store.cursors.get(self._name(kind))

    async def _read_page(self) -> bool:
        """Put a page of the outbox into the queues. Return whether there is no more."""
        page = await self._store.outbox(self._read[False])
        for outgoing in page:
            event = QueuedEvent(outgoing.position, outgoing.room_id, is_passed_on=False)
            self._put(outgoing.servers, outgoing.event_id, event)
        is_whole, self._read[False] = page.upto == self._read[False], page.upto
        return is_whole

    async def _read_relay(self) -> bool:
        """Put events of other servers into the queues. Return whether there is no more."""
        upto = self._store.streams[RELAY].linear()
        rows = await self._relay.rows(self._read[True], upto, limit=RELAY_ROWS)
        for row in rows:
            event = QueuedEvent(row.stream_id, RoomId(row.value["room_id"]), is_passed_on=True)
            event_id = EventId(row.value.get("event_id", row.key))  # the key until 0.2
            self._put(map(ServerName, row.value["servers"]), event_id, event)
        is_whole = len(rows) < RELAY_ROWS
        self._read[True] = max(self._read[True], upto if is_whole else rows[-1].stream_id)
        return is_whole

    def _name(self, kind: bool) -> str:
        """Return the name of the cursor of outgoing events (False) or of passed on ones."""
        return f"{self._cursor} {RELAY}" if kind else self._cursor

    def _put(self, servers: Iterable[ServerName], event_id: EventId, event: QueuedEvent) -> None:
        for server in servers:
            if server != self._store.server_name:
                self._servers[server].put(event_id, event, self._limits.queue_max)
                if server not in self._tasks:
                    self._tasks[server] = asyncio.create_task(self._serve(server))

    async def _save(self) -> None:
        """Move each cursor to the first event that a server lacks."""
        for kind, read in self._read.items():
            unsent = (to.first(is_passed_on=kind) for to in self._servers.values())
            waiting = [position for position in unsent if position is not None]
            sent_upto = min(waiting, default=read + 1) - 1
            if sent_upto > self._saved[kind]:
                self._saved[kind] = await self._store.cursors.set(self._name(kind), sent_upto)

    async def _serve(self, server: ServerName) -> None:
        to, pause = self._servers[server], self._limits.retry_seconds
        while True:
            to.has_new_events.clear()
            to.is_up.clear()
            try:
                while to.queue:
                    await self._send_first(server, to)
                pause = self._limits.retry_seconds
                await self._save()
                await to.has_new_events.wait()
            except Exception as error:  # of the caller's `send`, logged
                unexpected = not isinstance(error, RemoteError | StorageError)
                logger.warning("%s gets no events: %s", server, error, exc_info=unexpected)
                await _wait(to.is_up, pause)
                pause = min(2 * pause, self._limits.retry_seconds_max)

    async def _send_first(self, server: ServerName, to: Destination) -> None:
        """Send the first events of a queue, and take them out of it.

        Send half as many the next time if they cannot be sent. Drop one that cannot be sent alone,
        but raise the error if the one before was dropped as well, without a pause in between.
        """
        ids = list(islice(to.queue, to.pdus_max))
        try:
            await self._send_events(server, ids)
            to.may_drop = True
        except (RemoteError, StorageCorrupt) as error:
            if not _is_final(error):
                raise
            if len(ids) > 1:
                to.pdus_max = len(ids) // 2
                return
            if not to.may_drop:
                to.may_drop = True
                raise
            to.may_drop = False
            logger.error("%s never gets %s, which cannot be sent: %s", server, ids[0], error)  # noqa: TRY400
        to.pdus_max = min(2 * to.pdus_max, self._limits.pdus_max)
        for event_id in ids:
            to.queue.pop(event_id, None)

    async def _send_events(self, server: ServerName, ids: list[EventId]) -> None:
        stored = await self._store.events(ids)
        events = [stored[event_id] for event_id in ids if event_id in stored]
        if not events:
            return
        limit = asyncio.timeout(self._limits.send_seconds)
        try:
            async with limit:
                await self._send(server, str(next(self._transactions)), events)
        except TimeoutError as error:
            if not limit.expired():
                raise  # of the caller's `send`
            raise RemoteError(f"no answer in {self._limits.send_seconds:g} s") from error


def _is_final(error: RemoteError | StorageCorrupt) -> bool:
    """Return whether the same events would fail again: damaged here, or refused there."""
    if isinstance(error, StorageCorrupt):
        return True
    return error.status is not None and 400 <= error.status < 500 and error.status not in PASSING


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):  # unlike `wait_for`, it never loses a cancellation
            await event.wait()
