"""Replication over Redis: lines are published on the channel of the server's name, to all.

    transport = RedisTransport("redis://localhost", store.server_name)
    async with ReplicationPeer(store, transport):
        …

Addresses of users (USER_IP) go to a channel of their own, `<server name>/USER_IP`, as with existing
workers. A session has two connections: one listens, one publishes. If either fails, or published
lines do not return, both are opened again. Queued lines are discarded then. A new link begins, all
participants send their state, and the positions reveal missing rows.

Redis sends a participant its own lines too. They arrive in the order they were sent, so they are
matched with the oldest expected one.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from storage.errors import ExtraMissing, InputError, ProtocolError, StorageClosed
from storage.observability.counters import Outage
from storage.replication import transport as limits
from storage.replication.commands import Command, Ping, UserIp, encode, is_command, parse
from storage.replication.follower import Backoff
from storage.replication.transport import Link, Subscriber, Subscribers

try:
    from redis.asyncio.connection import AbstractConnection, ConnectionPool
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import RedisError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        str(ExtraMissing("replication over Redis", "redis")), name=error.name
    ) from error

logger: logging.Logger = logging.getLogger(__name__)

LINES_AT_ONCE: Final = 500

CANCEL_SECONDS: Final = 0.1
"""Time for a cancelled task to end, before it is cancelled again."""


class RedisTransport:
    """See `storage.replication.transport.Transport`.

    ``url`` is redis://, rediss:// (TLS) or unix://.
    """

    is_shared = True

    def __init__(self, url: str, server_name: str) -> None:
        self._limits = limits.LIMITS
        timeout = self._limits.timeout_ms / 1000
        try:
            self._pool = ConnectionPool.from_url(
                url,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                socket_timeout=timeout,
                socket_connect_timeout=self._limits.connect_timeout_ms / 1000,
            )
        except ValueError as error:
            raise InputError(f"the address of Redis: {error}") from None
        self._channel = server_name
        self._subscribers = Subscribers()
        self._backoff = Backoff.of(self._limits)
        self._outage = Outage(logger, "Redis")
        self._queue: deque[tuple[str, bytes]] = deque()
        self._queue_bytes = 0
        self._too_slow = False
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()
        self._echoes: deque[bytes] = deque()
        self._link: RedisLink | None = None
        self._refused = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def links(self) -> list[Link]:
        """See `Transport`: one link to all, while Redis is connected."""
        return [] if self._link is None else [self._link]

    def publish(self, *commands: Command) -> None:
        if self._link is None or self._closed or self._too_slow:
            return
        for command in commands:
            channel = (
                f"{self._channel}/{command.NAME}" if isinstance(command, UserIp) else self._channel
            )
            line = encode(command)[:-1]
            self._queue.append((channel, line))
            self._queue_bytes += len(line)
        self._wake.set()
        if self._queue_bytes > self._limits.buffer_bytes_max:
            logger.warning(
                "Redis is too slow: %d bytes wait to be published; starting a new session",
                self._queue_bytes,
            )
            self._too_slow = True
            self.refuse()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        return self._subscribers.add(subscriber, self.links)

    def start(self) -> None:
        self._task = asyncio.create_task(self._stay_connected(), name="replication-redis")

    async def connected(self) -> None:
        """Wait until Redis is connected. Raise `StorageClosed` after `close`."""
        while self._link is None:
            if self._closed:
                raise StorageClosed("Redis transport")
            await self._state_changed.wait()

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.close_ms / 1000):
                    await self._sent.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._tell_waiting()

    # ---------------------------------------------------------------------------------------------
    # sessions

    async def _stay_connected(self) -> None:
        while not self._closed:
            listener, speaker = _connection(self._pool), _connection(self._pool)
            try:
                await self._begin(listener, speaker)
                if not self._closed:  # redis-py may lose a cancellation while it connects
                    await self._session(listener, speaker)
            except (RedisError, OSError) as error:
                reason = str(error) or type(error).__name__
                self._outage.failed(f"no connection with Redis: {reason}")
            except Exception:
                logger.exception("a session with Redis has failed")
            finally:
                self._end()
                await listener.disconnect(nowait=True)
                await speaker.disconnect(nowait=True)
            if not self._closed:
                await asyncio.sleep(self._backoff.next())

    async def _begin(self, listener: AbstractConnection, speaker: AbstractConnection) -> None:
        """Connect and subscribe; nothing is missed after Redis has confirmed it."""
        channels = (self._channel, f"{self._channel}/{UserIp.NAME}")
        for connection in (speaker, listener):
            await connection.connect()  # type: ignore[no-untyped-call]  # redis-py
        await listener.send_command("SUBSCRIBE", *channels)
        for _ in channels:
            await listener.read_response()
        link = self._link = RedisLink(self)
        self._outage.recovered()
        self._subscribers.connected(link)
        self._tell_waiting()

    async def _session(self, listener: AbstractConnection, speaker: AbstractConnection) -> None:
        """Run until either connection fails, or a received line is refused."""
        works = (self._listen(listener), self._speak(speaker), self._refused.wait())
        tasks = [asyncio.create_task(work) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _end_all(tasks)

    def _end(self) -> None:
        link, self._link = self._link, None
        self._queue.clear()
        self._queue_bytes = 0
        self._too_slow = False
        self._echoes.clear()
        self._refused.clear()
        if link is not None:
            self._subscribers.disconnected(link)

    def refuse(self) -> None:
        """End this session and begin another."""
        self._refused.set()

    def _tell_waiting(self) -> None:
        self._state_changed.set()
        self._state_changed = asyncio.Event()

    # ---------------------------------------------------------------------------------------------
    # lines

    async def _speak(self, speaker: AbstractConnection) -> None:
        every = self._limits.ping_ms / 1000
        while True:
            try:
                async with asyncio.timeout(every):
                    await self._wake.wait()
            except TimeoutError:
                self.publish(Ping(str(time.time_ns() // 1_000_000)))
            self._wake.clear()
            while self._queue:
                await self._send_some(speaker)
            if self._closed:
                self._sent.set()

    async def _send_some(self, speaker: AbstractConnection) -> None:
        some = [self._queue.popleft() for _ in range(min(len(self._queue), LINES_AT_ONCE))]
        self._queue_bytes -= sum(len(line) for _, line in some)
        self._echoes.extend(line for _, line in some)
        await speaker.send_packed_command(
            speaker.pack_commands([("PUBLISH", channel, line) for channel, line in some])
        )
        for _ in some:
            await speaker.read_response()

    async def _listen(self, listener: AbstractConnection) -> None:
        timeout = self._limits.timeout_ms / 1000
        while True:
            message = await listener.read_response(timeout=timeout)
            if message is None:
                raise RedisConnectionError(
                    f"nothing has come for {timeout:g} s, not even what was published here"
                )
            line = message[2]
            if self._echoes and self._echoes[0] == line:
                self._echoes.popleft()
                self._backoff.reset()
            else:
                self._received(line)

    def _received(self, data: bytes) -> None:
        """Pass on a line of another participant; ignore an unknown command of a newer worker."""
        link = self._link
        if link is None:
            return
        try:
            line = data.decode()
            if line.strip() and is_command(line):
                self._subscribers.received(parse(line), link)
            elif line.strip():
                logger.warning("unknown command on %s: %s", self._channel, line[:200])
        except (UnicodeDecodeError, ProtocolError) as error:
            link.refuse(str(error))


class RedisLink:
    """The link to all participants, for one session."""

    name = "Redis"

    def __init__(self, transport: RedisTransport) -> None:
        self._transport = transport

    def silent_s(self) -> float:
        return 0.0

    def send(self, *commands: Command) -> None:
        """See `Link`: all participants receive it."""
        if self in self._transport.links:
            self._transport.publish(*commands)

    def refuse(self, reason: str) -> None:
        """See `Link`: a new session begins, so that wrong rows are read from the tables."""
        logger.warning("from Redis: %s; starting a new session", reason)
        if self in self._transport.links:
            self._transport.refuse()


async def _end_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks until all have ended.

    redis-py sends with `asyncio.wait_for`, which may lose a cancellation on Python 3.11.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)
        await asyncio.gather(*ended, return_exceptions=True)  # their errors are known


def _connection(pool: ConnectionPool) -> AbstractConnection:
    # redis-py
    connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return connection
