"""The TCP server: sends all stream advances to clients that request them, and receives commands.

    async with await Server(store).serve(port=9092) as server:
        …

You can also use it by hand: `nc localhost 9092`, then type REPLICATE.
"""

import asyncio
import logging
import re
import ssl
import ssl as tls
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from storage.errors import InputError
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
from storage.replication.peer import ReplicatedStore, ReplicationPeer
from storage.replication.syncing import Acknowledgements, Syncing
from storage.replication.transport import Handlers, Link, Subscriber, Subscribers

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
            await connection.ended.wait()
        await self._server.wait_closed()
        self._server = None

    def _pass_on(self, some: tuple[Command, ...], *, besides: LineConnection | None) -> None:
        """Send commands; each line is encoded once for all connections."""
        replicating = [
            other for other in self._connections if other.replicates and other is not besides
        ]
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
            connection.ended.set()

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

        Port 0 is a free one. `storage.replication.server` creates the context.
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


# --------------------------------------------------------------------------------------------------
# TLS for replication, with client certificates if wanted.
#
# Rows name rooms and users: use it on any network but loopback.

OF_OPENSSL: Final = re.compile(r"^\[.*?\] | \(_ssl\.c:\d+\)$")
"""The parts of an error that name the library and its line of source."""


def server_context(
    certificate: Path, key: Path, *, client_authorities: Path | None = None
) -> ssl.SSLContext:
    """Build the context of a server, from PEM files.

    With ``client_authorities`` only clients with a certificate signed by them may connect.

    Raise `InputError` for files that cannot be read or do not match.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, certificate, key, client_authorities)
    if client_authorities is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    authorities: Path | None = None, *, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Build the context of a client, from PEM files.

    ``authorities`` may sign the server's certificate (None: the system's list); ``certificate`` and
    ``key`` are the client's own. Raise `InputError` for files that cannot be read or do not match.
    """
    context = ssl.create_default_context()
    _load(context, certificate, key, authorities)
    return context


def _load(
    context: ssl.SSLContext, certificate: Path | None, key: Path | None, authorities: Path | None
) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, key)
        if authorities is not None:
            context.load_verify_locations(authorities)
    except OSError as error:  # TLS errors are subclasses
        paths = [path for path in (certificate, key, authorities) if path is not None]
        for path in paths:
            _check_readable(path)
        names = ", ".join(map(str, paths))
        reason = OF_OPENSSL.sub("", str(error)).lower()
        raise InputError(
            f"TLS with {names}: {reason}: each file must be PEM, "
            "and the key that of the certificate"
        ) from None


def _check_readable(path: Path) -> None:
    """Raise `InputError` with the name of a file that cannot be read."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"the file {path} for TLS cannot be read: {error.strerror}") from None
