"""One participant in replication, over any transport: publishes own commits and follows others.

    async with ReplicationPeer(store, transport):
        …

A participant has two sides. It *announces*: "own" facts, on transports where all receive all; "all"
known facts, as the hub of others (the TCP server); "none" (the TCP client). And it *follows*, or
not. On every new link both sides send their state, so that anything lost before is recovered.

On a shared transport, "all" is what no participant sends: own facts, and those of writers that do
not take part. Each participant that sends its own facts repeats its NAME. Only who has sent a fact
knows which ones went before it on the channel: a follower that had a position from another, which
is behind, would take the writer's next fact for the one after that.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import groupby
from typing import Final, Literal, Protocol, Self

from storage.database.connection import Database
from storage.errors import StorageError
from storage.replication import transport as limits
from storage.replication.commands import (
    LINE_BYTES_MAX,
    ClearUserSync,
    Command,
    FederationAck,
    LockReleased,
    Name,
    Position,
    Rdata,
    RemoteServerUp,
    Replicate,
    UserSync,
    encode,
)
from storage.replication.follower import Follower, FollowTarget, HandlersTarget, StreamsTarget
from storage.replication.syncing import Acknowledgements, Session, Syncing, WorkerNames
from storage.replication.transport import Handlers, Link, Transport
from storage.streams.feed import Advance, StreamRow
from storage.streams.registry import Streams

# --------------------------------------------------------------------------------------------------
# The commands for an `Advance` (RDATA and POSITION), and the positions that answer REPLICATE.


class HasPositions(Protocol):
    """The part of a stream that is needed here."""

    def positions(self) -> Mapping[str, int]:
        """Return the position of each writer."""


def advance_commands(advance: Advance, *, batches: bool = True) -> Iterator[Command]:
    """Yield the commands that publish an advance.

    There is one RDATA per fact; where several share a stream id all but the last have the token
    "batch". A POSITION follows where the position is beyond the last fact, or there are no facts. A
    fact that does not fit a line is not sent: a POSITION from its own id makes the readers see a
    hole, and fetch it from the table. Without ``batches``, the same is done for facts that share an
    id.
    """
    stream_name, instance_name, sent = advance.stream_name, advance.instance_name, advance.previous
    for stream_id, group in groupby(advance.rows, _stream_id):
        if not sent < stream_id <= advance.current:
            continue
        rows = list(group)
        commands: list[Command] = [
            Rdata(stream_name, instance_name, None, row.row) for row in rows[:-1]
        ]
        commands.append(Rdata(stream_name, instance_name, stream_id, rows[-1].row))
        if (batches or len(commands) == 1) and all(_fits(command) for command in commands):
            yield from commands
        else:
            yield Position(stream_name, instance_name, stream_id, stream_id)
        sent = stream_id
    if sent < advance.current:
        yield Position(stream_name, instance_name, sent, advance.current)


def positions(
    streams: Mapping[str, HasPositions], instance_name: str | None = None
) -> Iterator[Position]:
    """Yield a POSITION for each writer of each stream, or for the given writer only."""
    for name, stream in streams.items():
        for writer, position in sorted(stream.positions().items()):
            if instance_name in {None, writer}:
                yield Position(name, writer, position, position)


def _stream_id(row: StreamRow) -> int:
    return row.stream_id


def _fits(command: Command) -> bool:
    return len(str(command)) <= LINE_BYTES_MAX  # JSON is in ASCII, names are short


logger: logging.Logger = logging.getLogger(__name__)

Announces = Literal["own", "all", "none"]
BY_NAME: Final = (UserSync, ClearUserSync, FederationAck, LockReleased)
"""The commands in which a worker reports its own state, by its name."""


class ReplicatedStore(Protocol):
    """The part of a store that replication needs."""

    @property
    def streams(self) -> Streams:
        """Return its streams, with their feed."""

    @property
    def database(self) -> Database:
        """Return its database, for the limits; rows are read through the streams."""

    @property
    def server_name(self) -> str:
        """Return the homeserver's name."""

    @property
    def instance_name(self) -> str:
        """Return this writer's name."""

    async def server_up(self, server_name: str) -> None:
        """Handle that another homeserver is reachable again."""


class ReplicationPeer:
    """A participant.

    ``store`` may be handlers instead: then nothing is announced, and received commands only go to
    them.

    `syncing` has the syncing users of each worker, `acknowledged` the position of each sending
    worker, `handlers` the handlers of commands.
    """

    handlers: Handlers
    instance_name: str

    def __init__(
        self,
        store: ReplicatedStore | Handlers,
        transport: Transport,
        *,
        handlers: Handlers | None = None,
        announces: Announces = "own",
        follows: bool = True,
        instance_name: str = "client",
    ) -> None:
        self.transport = transport
        self._limits = limits.LIMITS
        if isinstance(store, Handlers):
            self.handlers, self.instance_name = store, instance_name
            self._streams, self._announces, self._server_up = None, "none", None
            target: FollowTarget = HandlersTarget(store)
        else:
            self.handlers, self.instance_name = handlers or Handlers(), store.instance_name
            self._streams, self._announces, self._server_up = (
                store.streams,
                announces,
                store.server_up,
            )
            target = StreamsTarget(store.streams)
        self.syncing: Syncing = Syncing(self._limits.sessions_max)
        self.acknowledged: Acknowledgements = Acknowledgements(self._limits.ack_keep_ms)
        self._is_hub = announces == "all" and not transport.is_shared
        own = self.instance_name if self._is_hub else None
        self._names = WorkerNames(own, self._limits.names_max, self._limits.ping_ms, self._forget)
        self._follower = Follower(target, is_shared=transport.is_shared) if follows else None
        self._own_syncs: dict[Session, int] = {}
        self._own_acknowledgement: int | None = None
        self._heard: dict[str, float] = {}
        self._present: dict[str, float] = {}
        """The participants that send their own facts, and when each has last said so."""

        self._unsubscribes: list[Callable[[], None]] = []
        self._beating: asyncio.Task[None] | None = None
        self._noting: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Take part from now on; needs a running event loop."""
        if self._streams is not None and self._announces != "none":
            self._unsubscribes.append(self._streams.feed.subscribe(self._advanced))
        if self._server_up is not None:
            self._unsubscribes.append(self.handlers.on(RemoteServerUp, self._note_up))
        self._unsubscribes.append(self.transport.subscribe(self))
        self.transport.start()
        if self.transport.is_shared:
            self._beating = asyncio.create_task(self._beat(), name="replication-beat")

    async def close(self) -> None:
        """Stop taking part. Pending commands are still sent; the transport is closed."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])
        if self._own_syncs:
            self.transport.publish(ClearUserSync(self.instance_name))
        for end in self._unsubscribes:
            end()
        self._unsubscribes.clear()
        await self.transport.close()
        if self._noting:
            await asyncio.wait(self._noting)
        if self._follower is not None:
            await self._follower.close()

    # ---------------------------------------------------------------------------------------------
    # commands of this process

    def publish(self, *commands: Command) -> None:
        """Send commands such as REMOTE_SERVER_UP, USER_IP or LOCK_RELEASED to all others.

        Each receives them at most once; absent ones miss them.
        """
        self.transport.publish(*commands)

    def user_syncs(
        self, user_id: str, device_id: str | None = None, *, syncing: bool, at_ms: int | None = None
    ) -> None:
        """Send that a user has started or stopped syncing here; repeat it on each new link.

        Raise `ProtocolError`, and keep nothing, if the ids cannot be sent.
        """
        at = time.time_ns() // 1_000_000 if at_ms is None else at_ms
        command = UserSync(self.instance_name, user_id, device_id, syncing, at)
        encode(command)  # each new link sends it again, and must not fail then
        self._own_syncs.pop((user_id, device_id), None)
        if syncing:
            self._own_syncs[user_id, device_id] = at
        self.transport.publish(command)

    def acknowledge(self, token: int) -> None:
        """Send that this process has sent to other servers everything up to ``token``.

        It is repeated on each new link.
        """
        self._own_acknowledgement = max(token, self._own_acknowledgement or token)
        self.transport.publish(FederationAck(self.instance_name, self._own_acknowledgement))

    def _advanced(self, advance: Advance) -> None:
        """Publish an advance of the feed.

        All others must know a new writer before they receive later facts.
        """
        is_new_writer = not advance.previous and not advance.rows
        of_others = self._announces == "all" and (
            self._is_hub or not (self._was_received() or advance.instance_name in self._present)
        )
        if self.transport.links and (advance.local or is_new_writer or of_others):
            # the writer itself may be on a shared link, and its batches must not mix with these
            batches = advance.local or self._is_hub
            self.transport.publish(*advance_commands(advance, batches=batches))

    def _was_received(self) -> bool:
        return self._follower is not None and self._follower.is_advancing

    def _positions(self, *, own: bool = False) -> Iterator[Command]:
        if self._streams is None or self._announces == "none":
            return
        if self.transport.is_shared:
            yield Name(self.instance_name)
        own = own or self._announces == "own"
        for position in positions(self._streams, self.instance_name if own else None):
            if (
                position.instance_name == self.instance_name
                or position.instance_name not in self._present
            ):
                yield position

    def _own_state(self) -> Iterator[Command]:
        for (user_id, device_id), at in self._own_syncs.items():
            yield UserSync(self.instance_name, user_id, device_id, is_syncing=True, last_sync_ms=at)
        if self._own_acknowledgement is not None:
            yield FederationAck(self.instance_name, self._own_acknowledgement)

    async def _beat(self) -> None:
        """Show that this process is alive, and drop silent workers.

        This is needed where a link does not end with its peer. The positions that it sends also
        reveal lost commands, and what a writer has not sent that has gone.
        """
        while True:
            await asyncio.sleep(self._limits.ping_ms / 1000)
            self.transport.publish(*self._positions(own=True))
            silent_since = time.monotonic() - self._limits.timeout_ms / 1000
            for instance_name in [name for name, at in self._heard.items() if at < silent_since]:
                del self._heard[instance_name]
                self.syncing.clear(instance_name)
                self.acknowledged.lost([instance_name])
            silent = [name for name, at in self._present.items() if at < silent_since]
            for instance_name in silent:
                del self._present[instance_name]
            if silent:
                self.transport.publish(*self._positions())

    # ---------------------------------------------------------------------------------------------
    # commands of the others

    def connected(self, link: Link) -> None:
        """See `Subscriber`."""
        if self._follower is not None:
            link.send(Replicate())
        if not self._is_hub:
            link.send(*self._positions(), *self._own_state())

    def disconnected(self, link: Link) -> None:
        """See `Subscriber`."""
        self.syncing.lost(link)
        self.acknowledged.lost(self._names.lost(link))
        if self._follower is not None:
            self._follower.lost(link)

    def received(self, command: Command, link: Link) -> None:
        """See `Subscriber`.

        Raise `ProtocolError` for a command in the name of a worker that belongs to another link.
        """
        self._note_name(command, link)
        match command:
            case Rdata():
                if self._follower is not None:
                    self._follower.rdata(command, link)
            case Position():
                if self._follower is not None:
                    self._follower.position(command, link)
            case Replicate():
                link.send(*self._positions(), *(() if self._is_hub else self._own_state()))
            case Name() if self.transport.is_shared:
                self._present[command.name] = time.monotonic()
            case UserSync():
                self.syncing.record(command, link)
            case ClearUserSync():
                self.syncing.clear(command.instance_name)
            case FederationAck():
                self.acknowledged.record(command)
            case _:
                pass  # only for handlers
        self.handlers.tell(command)

    def _note_name(self, command: Command, link: Link) -> None:
        """Note the sender; raise `ProtocolError` where another link has that name."""
        if isinstance(command, BY_NAME):
            self._names.claim(command.instance_name, link)
        if not self.transport.is_shared or _is_of_an_idle_writer(command):
            return
        if isinstance(command, Rdata | Position | UserSync | ClearUserSync | FederationAck):
            self._heard[command.instance_name] = time.monotonic()

    def _forget(self, instance_name: str) -> None:
        """Drop a name: there were too many, or its worker is back over another link."""
        self.syncing.clear(instance_name)
        self.acknowledged.lost([instance_name])
        self._heard.pop(instance_name, None)

    def _note_up(self, command: RemoteServerUp) -> None:
        """Have the store request missing events from that server again."""
        if self._server_up is not None:
            task = asyncio.create_task(
                _note_up(self._server_up, command.server_name), name="replication-server-up"
            )
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)


def _is_of_an_idle_writer(command: Command) -> bool:
    """Return whether a command says that a writer has written nothing.

    Others send this of a worker that has ended. One that runs repeats its own position.
    """
    return isinstance(command, Position) and command.prev_token < command.new_token


async def _note_up(server_up: Callable[[str], Awaitable[None]], server_name: str) -> None:
    try:
        await server_up(server_name)
    except StorageError as error:  # no harm: a later retry requests it anyway
        logger.warning("it was not recorded that %s is up again: %s", server_name, error)
