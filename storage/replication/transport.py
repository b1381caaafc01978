"""The transport of commands: one interface for TCP, Redis and a single process.

A `Transport` is one participant's access. Its published commands reach the others and not itself,
in order. Nothing is kept for absent ones, so a lost command is lost. That is harmless for streams:
their tokens reveal missing rows (`storage.replication.follower`). Commands arrive by a `Link`,
which also leads back to the sender. Over TCP and within a process a link leads to one peer; over
Redis to all. Subscribers also learn about connections: after `disconnected`, nothing that was
received over the link is certain.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from storage.errors import ProtocolError
from storage.replication.commands import Command
from storage.streams.feed import StreamRow

logger: logging.Logger = logging.getLogger(__name__)


class Link(Protocol):
    """A link to one peer, or to all at once."""

    @property
    def name(self) -> str:
        """Return its name, for people."""

    def send(self, *commands: Command) -> None:
        """Send these, in order. Never block; a link that has ended sends nothing."""

    def silent_s(self) -> float:
        """Return for how many seconds nothing was received by it.

        Return 0 where a link does not end with its peer, or cannot be lost.
        """

    def refuse(self, reason: str) -> None:
        """End the link because a received command was wrong, and send the reason."""


class Subscriber(Protocol):
    """A subscriber of a transport. Called in the event loop; must not block."""

    def connected(self, link: Link) -> None:
        """Handle a new link."""

    def received(self, command: Command, link: Link) -> None:
        """Handle a command. `ProtocolError` refuses it, and ends the link."""

    def disconnected(self, link: Link) -> None:
        """Handle the end of a link."""


class Transport(Protocol):
    """A participant's access to the others."""

    @property
    def is_shared(self) -> bool:
        """Return whether a link leads to all, and so does not end when one of them goes."""

    @property
    def links(self) -> list[Link]:
        """Return the current links."""

    def start(self) -> None:
        """Begin to connect. Needs a running event loop."""

    def publish(self, *commands: Command) -> None:
        """Send to all others.

        Never block.

        Rows and positions go to those who requested them (REPLICATE), other commands to all.
        """

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add a subscriber and call it for the existing links; return a function to remove it."""

    async def close(self) -> None:
        """End all links.

        Commands published before are still sent, as far as the others read them in time.
        """


class Subscribers:
    """The subscribers of one transport."""

    def __init__(self) -> None:
        self._all: dict[Subscriber, None] = {}

    def add(self, subscriber: Subscriber, links: list[Link]) -> Callable[[], None]:
        self._all[subscriber] = None
        for link in links:
            subscriber.connected(link)
        return lambda: self._all.pop(subscriber, None)

    def connected(self, link: Link) -> None:
        for subscriber in list(self._all):
            subscriber.connected(link)

    def received(self, command: Command, link: Link) -> None:
        """See `Subscriber`; a refused command ends the link."""
        try:
            for subscriber in list(self._all):
                subscriber.received(command, link)
        except ProtocolError as error:
            logger.warning("from %s: %s", link.name, error)
            link.refuse(error.reason)

    def disconnected(self, link: Link) -> None:
        for subscriber in list(self._all):
            subscriber.disconnected(link)


# --------------------------------------------------------------------------------------------------
# Handlers of a homeserver: functions registered by the type of their argument.
#
#     handlers = Handlers()
#     handlers.on(RemoteServerUp, lambda command: retries.reset(command.server_name))
#     handlers.on(UserIp, clients.seen)
#
# You can register for every received command, and for `Advance` (storage.streams.feed): rows of a
# stream, complete and in order. A handler runs in the event loop and must not block. If one raises,
# that is logged, and the others are still called.

T = TypeVar("T")

Fetch = Callable[[str, str, int, int, int], Awaitable[list[StreamRow]]]
"""Fetch missed rows where there is no store.

(stream name, writer, after, up to, limit) -> the facts of that writer, in order.
"""


class Handlers:
    """A registry.

    ``fetch`` is only for a client without a store; without it such a client cannot recover missed
    rows.
    """

    def __init__(self, *, fetch: Fetch | None = None) -> None:
        self.fetch = fetch
        self._handlers: dict[type, dict[Callable[[Any], None], None]] = {}

    def on(self, kind: type[T], handler: Callable[[T], None]) -> Callable[[], None]:
        """Call ``handler`` with each received ``kind``; return a function that unregisters it."""
        handlers = self._handlers.setdefault(kind, {})
        handlers[handler] = None
        return lambda: handlers.pop(handler, None)

    def tell(self, what: object) -> None:
        """Call all handlers for the type of this."""
        for handler in list(self._handlers.get(type(what), ())):
            try:
                handler(what)
            except Exception:
                logger.exception("a handler of %s failed", type(what).__name__)


# --------------------------------------------------------------------------------------------------
# Times and sizes of replication: parts of the protocol, so no settings.
#
# Each participant, transport and connection reads `LIMITS` when it is made.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationLimits:
    """Times and sizes of replication."""

    ping_ms: int = 5_000
    """Interval of the PINGs of a connection."""

    timeout_ms: int = 15_000
    """A side that has sent a PING and then nothing for this time counts as gone."""

    buffer_bytes_max: int = 16_777_216
    """Most unsent data for one peer; beyond it the peer is disconnected."""

    close_ms: int = 5_000
    """Longest wait, at the end of a connection, for the peer to read what was sent to it."""

    connect_timeout_ms: int = 10_000
    """Longest wait for a new connection."""

    page_rows_max: int = 1_000
    """Rows read from a table at once, where a reader has missed some."""

    batch_rows_max: int = 10_000
    """Rows under one token that a reader buffers; larger batches are read from the table."""

    names_max: int = 100
    """Worker names per connection; above it the oldest are dropped."""

    sessions_max: int = 50_000
    """Syncing users and devices per connection; above it the oldest are dropped."""

    ack_keep_ms: int = 86_400_000
    """How long an acknowledged position is kept after its connection has ended (a day)."""

    retry_ms_first: int = 100
    """Upper bound of the random pause before a lost connection is retried; it doubles each time."""

    retry_ms_max: int = 10_000
    """Largest upper bound of that pause."""


LIMITS: ReplicationLimits = ReplicationLimits()
