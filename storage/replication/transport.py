"""How commands travel: one interface for TCP, Redis and the inside of a process.

A `Transport` is one participant's access. What it publishes reaches the others and not itself, in
order; nothing is kept for those who are away, so a lost command is lost. That is no loss for
streams: their tokens show what is missing (`storage.replication.follower`). What comes in comes by
a `Link`, the way back to its sender. Over TCP and within a process a link leads to one peer; over
Redis to all. Who is connected is told as well: after `disconnected` nothing is certain that was
said over the link.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from storage.errors import ProtocolError
from storage.replication.commands import Command

logger = logging.getLogger(__name__)


class Link(Protocol):
    """A way to one peer, or to all at once."""

    @property
    def name(self) -> str:
        """For people."""

    def send(self, *commands: Command) -> None:
        """Send these, in order. Never blocks; a link that has ended sends nothing."""

    def silent_s(self) -> float:
        """Return for how many seconds nothing has come by it; 0 where a link does not end with its peer, or cannot be lost."""

    def refuse(self, reason: str) -> None:
        """Something is wrong with what came by this link: say so, and end it."""


class Subscriber(Protocol):
    """What is told of a transport. Called in the event loop; must not block."""

    def connected(self, link: Link) -> None:
        """A link begins."""

    def received(self, command: Command, link: Link) -> None:
        """A command has come. `ProtocolError` refuses it, and ends the link."""

    def disconnected(self, link: Link) -> None:
        """A link has ended."""


class Transport(Protocol):
    """A participant's access to the others."""

    @property
    def is_shared(self) -> bool:
        """Whether a link leads to everybody, and so does not end when one of them goes."""

    @property
    def links(self) -> list[Link]:
        """Those that are there now."""

    def start(self) -> None:
        """Begin to connect. Needs a running event loop."""

    def publish(self, *commands: Command) -> None:
        """To everybody else: rows and positions to those who asked for them (REPLICATE), other commands to all. Never blocks."""

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Tell this one from now on, beginning with the links that are there; the answer ends it."""

    async def close(self) -> None:
        """End all links.

        What was published before is still sent, as far as the others read it in time.
        """


class Subscribers:
    """The subscribers of one transport."""

    def __init__(self) -> None:
        self._all: dict[Subscriber, None] = {}

    def add(self, subscriber: Subscriber, links: list[Link]) -> Callable[[], None]:
        """See `Transport.subscribe`."""
        self._all[subscriber] = None
        for link in links:
            subscriber.connected(link)
        return lambda: self._all.pop(subscriber, None)

    def connected(self, link: Link) -> None:
        """See `Subscriber`."""
        for subscriber in list(self._all):
            subscriber.connected(link)

    def received(self, command: Command, link: Link) -> None:
        """See `Subscriber`; what is refused ends the link."""
        try:
            for subscriber in list(self._all):
                subscriber.received(command, link)
        except ProtocolError as error:
            logger.warning("from %s: %s", link.name, error)
            link.refuse(error.reason)

    def disconnected(self, link: Link) -> None:
        """See `Subscriber`."""
        for subscriber in list(self._all):
            subscriber.disconnected(link)
