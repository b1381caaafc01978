"""The TCP client: follows the writes of the server's process, and sends a worker's commands.

    async with Client(store, "127.0.0.1", 9092) as client:
        await client.connected()

It reconnects without limit when the connection is lost; missed rows are read from the tables.
"""

import asyncio
import logging
import ssl as tls
from collections.abc import Callable
from typing import Self

from storage.errors import ProtocolError, StorageClosed, StorageError
from storage.observability.counters import Outage
from storage.replication import transport
from storage.replication.commands import Command, Error, Name, Ping, ServerCommand
from storage.replication.connection import CHUNK_BYTES, LineConnection
from storage.replication.follower import Backoff
from storage.replication.peer import ReplicatedStore, ReplicationPeer
from storage.replication.transport import Handlers, Link, Subscriber, Subscribers

logger: logging.Logger = logging.getLogger(__name__)


class ClientTransport:
    """One connection at a time, opened again when it is lost.

    See `storage.replication.transport.Transport`.
    """

    is_shared = False

    def __init__(
        self,
        host: str,
        port: int,
        *,
        name: str,
        server_name: str | None,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._address = (host, port)
        self._name = name
        self._server_name = server_name
        self._limits = transport.LIMITS
        self._ssl = ssl
        self._subscribers = Subscribers()
        self._outage = Outage(logger, f"the connection with {host}:{port}")
        self._backoff = Backoff.of(self._limits)
        self._connection: LineConnection | None = None
        self._greeted = False
        self._state_changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.last_error: StorageError | OSError | None = None
        """Why the last attempt or connection failed."""

    @property
    def links(self) -> list[Link]:
        return [] if self._connection is None else [self._connection]

    def publish(self, *commands: Command) -> None:
        if self._connection is not None:
            self._connection.send(*commands)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        return self._subscribers.add(subscriber, self.links)

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = asyncio.create_task(self._stay_connected(), name="replication-client")

    async def connected(self) -> None:
        """Wait for a server of the right name.

        Raise `ProtocolError` if one of another name answers, `StorageClosed` after `close`.
        """
        while not self._greeted:
            if self._closed:
                raise StorageClosed("replication client")
            await self._state_changed.wait()
            if isinstance(self.last_error, ProtocolError):
                raise self.last_error

    async def attempted(self) -> None:
        """Wait until the next attempt to connect has ended, successful or not."""
        await self._state_changed.wait()

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            self._connection.end("closed")
        elif self._task is not None:
            self._task.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None
        self._tell_waiting(None)

    async def _stay_connected(self) -> None:
        while not self._closed:
            try:
                async with asyncio.timeout(self._limits.connect_timeout_ms / 1000):
                    streams = await asyncio.open_connection(
                        *self._address, ssl=self._ssl, limit=CHUNK_BYTES
                    )
            except OSError as error:  # TimeoutError and TLS errors are subclasses
                host, port = self._address
                reason = str(error) or type(error).__name__
                self._outage.failed(f"no connection with {host}:{port}: {reason}")
                self._tell_waiting(error)
            else:
                try:
                    await self._converse(*streams)
                except Exception:
                    logger.exception("a session with %s:%s has failed", *self._address)
            if not self._closed:
                await asyncio.sleep(self._backoff.next())

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._connection = LineConnection(reader, writer, side="client")
        self._greeted = False
        try:
            connection.send(Name(self._name))
            self._subscribers.connected(connection)
            reason = await connection.run(lambda command: self._received(command, connection))
            logger.info("the connection with %s has ended: %s", connection.name, reason)
        finally:
            self._connection = None
            self._greeted = False
            writer.close()  # a session that fails at its start has not closed it
            self._subscribers.disconnected(connection)

    def _received(self, command: Command, connection: LineConnection) -> None:
        if isinstance(command, ServerCommand):
            self._greet(command, connection)
        elif not self._greeted and not isinstance(command, Ping | Error):
            raise ProtocolError(f"{command.NAME} before SERVER")
        self._subscribers.received(command, connection)

    def _greet(self, command: ServerCommand, connection: LineConnection) -> None:
        if self._server_name not in {None, command.server_name}:
            error = ProtocolError(
                f"connected to {command.server_name}, wanted was {self._server_name}"
            )
            self._tell_waiting(error)
            raise error
        connection.peer_name = f"{command.server_name} at {connection.peer_name}"
        self._greeted = True
        self._outage.recovered()
        self._backoff.reset()
        self._tell_waiting(None)

    def _tell_waiting(self, error: StorageError | OSError | None) -> None:
        self.last_error = error
        self._state_changed.set()
        self._state_changed = asyncio.Event()


class Client:
    """A reader of one server.

    With a store it advances the store's streams; with handlers it passes each `Advance` and command
    to them.

    ``server_name`` is the expected name of the server; default: that of the store.
    """

    def __init__(
        self,
        store: ReplicatedStore | Handlers,
        host: str,
        port: int,
        *,
        ssl: tls.SSLContext | None = None,
        server_name: str | None = None,
        instance_name: str = "client",
        handlers: Handlers | None = None,
    ) -> None:
        if not isinstance(store, Handlers):
            server_name = server_name or store.server_name
            instance_name = store.instance_name
        self._transport = ClientTransport(
            host, port, name=instance_name, server_name=server_name, ssl=ssl
        )
        self.exchange: ReplicationPeer = ReplicationPeer(
            store,
            self._transport,
            handlers=handlers,
            announces="none",
            instance_name=instance_name,
        )

    def start(self) -> None:
        """Connect, and follow from now on; needs a running event loop.

        Entering the client as a context manager does it.
        """
        self.exchange.start()

    async def close(self) -> None:
        """Close the connection."""
        await self.exchange.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connected(self) -> None:
        """Wait for a server of the right name.

        Raise `ProtocolError` if one of another name answers, `StorageClosed` after `close`.
        """
        await self._transport.connected()

    async def attempted(self) -> None:
        """Wait until the next attempt to connect has ended; `last_error` has the result."""
        await self._transport.attempted()

    @property
    def last_error(self) -> StorageError | OSError | None:
        """Return why the last attempt to connect failed; None after a successful one."""
        return self._transport.last_error

    @property
    def handlers(self) -> Handlers:
        """Return the handlers of received commands."""
        return self.exchange.handlers

    def publish(self, *commands: Command) -> None:
        """Send these to the server; while there is no connection they are lost."""
        self.exchange.publish(*commands)

    def user_syncs(
        self, user_id: str, device_id: str | None = None, *, syncing: bool, at_ms: int | None = None
    ) -> None:
        """Send that a user has started or stopped syncing here; repeat it after each reconnect.

        Raise `ProtocolError`, and keep nothing, if the ids cannot be sent.
        """
        self.exchange.user_syncs(user_id, device_id, syncing=syncing, at_ms=at_ms)

    def acknowledge(self, token: int) -> None:
        """Send that this process has sent to other servers everything up to ``token``.

        It is repeated after each reconnect.
        """
        self.exchange.acknowledge(token)
