"""The TCP server: sends all stream advances to clients that request them, and receives commands.

    async with await Server(store).serve(port=9092) as server:
        …

You can also use it by hand: `nc localhost 9092`, then type REPLICATE.
"""

import asyncio
import logging
import ssl as tls
from collections.abc import Callable
from typing import Final, Self

from storage.replication import commands
from storage.replication.commands import (
    CancelTask,
    Command,
    LockReleased,
    Name,
    NewActiveTask,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    encode,
)
from storage.replication.connection import CHUNK_BYTES, LineConnection
from storage.replication.federation_ack import Acknowledgements
from storage.replication.handlers import Handlers
from storage.replication.peer import ReplicatedStore, ReplicationPeer
from storage.replication.syncing import Syncing
from storage.replication.transport import Link, Subscriber, Subscribers

logger: logging.Logger = logging.getLogger(__name__)

FOR_EVERYBODY: Final = (RemoteServerUp, LockReleased, NewActiveTask, CancelTask)
"""Commands of one client that the other clients also receive."""


class ServerTransport:
    """The hub of any number of connections. See `storage.replication.transport.Transport`."""

    is_shared = False

    def __init__(self, server_name: str) -> None:
        self._server_name = server_name
        self._subscribers = Subscribers()
        self._connections: dict[LineConnection, None] = {}
        self._server: asyncio.Server | None = None

    @property
    def links(self) -> list[Link]:
        return list(self._connections)

    @property
    def connections(self) -> list[LineConnection]:
        """Return the connected clients."""
        return list(self._connections)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return the hosts and ports on which it listens; empty while it does not."""
        return (
            []
            if self._server is None
            else [socket.getsockname()[:2] for socket in self._server.sockets]
        )

    async def listen(self, host: str, port: int, ssl: tls.SSLContext | None) -> None:
        """Listen. Raise OSError if the address cannot be used."""
        if self._server is not None:
            raise RuntimeError("this server listens already")
        self._server = await asyncio.start_server(
            self._accept, host, port, ssl=ssl, limit=CHUNK_BYTES
        )

    def start(self) -> None:
        """See `Transport`. `listen` does it."""

    def publish(self, *commands: Command) -> None:
        self._pass_on(commands, besides=None)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        return self._subscribers.add(subscriber, self.links)

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in self.connections:
            connection.end("server stopping")
        for connection in self.connections:
            await connection.gone.wait()
        await self._server.wait_closed()
        self._server = None

    def _pass_on(self, some: tuple[Command, ...], *, besides: LineConnection | None) -> None:
        """Send commands; each line is encoded once for all connections."""
        replicating = [one for one in self._connections if one.replicates and one is not besides]
        for_all = [command for command in some if not isinstance(command, Rdata | Position)]
        if for_all:
            lines = b"".join(map(encode, for_all))
            for connection in self._connections:
                if connection is not besides:
                    connection.send_lines(lines)
        if replicating and len(for_all) < len(some):
            lines = b"".join(
                encode(command) for command in some if isinstance(command, Rdata | Position)
            )
            for connection in replicating:
                connection.send_lines(lines)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = LineConnection(reader, writer, side="server")
        self._connections[connection] = None
        logger.info("%s has connected", connection.name)
        connection.send(commands.ServerCommand(self._server_name))
        self._subscribers.connected(connection)
        try:
            reason = await connection.run(lambda command: self._received(command, connection))
            logger.info("%s is gone: %s", connection.name, reason)
        finally:
            del self._connections[connection]
            self._subscribers.disconnected(connection)
            connection.gone.set()

    def _received(self, command: Command, connection: LineConnection) -> None:
        if isinstance(command, Replicate):
            connection.replicates = True
        elif isinstance(command, Name):
            connection.peer_name = f"{command.name} at {connection.peer_name}"
        self._subscribers.received(command, connection)
        if isinstance(command, FOR_EVERYBODY) and connection.refused is None:
            self._pass_on((command,), besides=connection)


class Server:
    """Replication of one store over TCP.

    Each client that sends REPLICATE gets the positions of all writers, and then all later changes.
    """

    def __init__(self, store: ReplicatedStore, *, handlers: Handlers | None = None) -> None:
        self._transport = ServerTransport(store.server_name)
        self.exchange: ReplicationPeer = ReplicationPeer(
            store, self._transport, handlers=handlers, announces="all", follows=False
        )

    async def serve(
        self, host: str = "127.0.0.1", port: int = 0, ssl: tls.SSLContext | None = None
    ) -> Self:
        """Listen, and return at once; `address` has the host and port.

        Port 0 is a free one. `storage.replication.tls` creates the context.
        """
        await self._transport.listen(host, port, ssl)
        self.exchange.start()
        return self

    async def close(self) -> None:
        """Send the clients an ERROR, and stop."""
        await self.exchange.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port. Raise RuntimeError while it does not listen."""
        if not self._transport.addresses:
            raise RuntimeError("the server does not listen")
        return self._transport.addresses[0]

    @property
    def port(self) -> int:
        """Return the port of `address`."""
        return self.address[1]

    @property
    def connections(self) -> list[LineConnection]:
        """Return the connected clients."""
        return self._transport.connections

    @property
    def handlers(self) -> Handlers:
        """Return the handlers of received commands."""
        return self.exchange.handlers

    @property
    def syncing(self) -> Syncing:
        """Return the syncing users of each worker."""
        return self.exchange.syncing

    @property
    def acknowledged(self) -> Acknowledgements:
        """Return the acknowledged position of each sending worker."""
        return self.exchange.acknowledged

    def publish(self, *some: Command) -> None:
        """Send these to every client."""
        self.exchange.publish(*some)
