"""The transport of commands: one interface for TCP, Redis and a single process.

A `Transport` is one participant's access. Its published commands reach the others and not itself,
in order. Nothing is kept for absent ones, so a lost command is lost. That is harmless for streams:
their tokens reveal missing rows (`storage.replication.follower`). Commands arrive by a `Link`,
which also leads back to the sender. Over TCP and within a process a link leads to one peer; over
Redis to all. Subscribers also learn about connections: after `disconnected`, nothing that was
received over the link is certain.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from storage.errors import ProtocolError
from storage.replication.commands import Command

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
