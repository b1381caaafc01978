"""The transport inside one process: several stores, or a store and what a homeserver builds beside it, on one event loop.

hub = Hub()
async with Exchange(store, hub.join("main")), Exchange(other_store, hub.join("worker")): …
"""

import asyncio
from collections.abc import Callable

from storage.replication.commands import Command, Position, Rdata, Replicate
from storage.replication.transport import Link, Subscriber, Subscribers


class Hub:
    """Where the participants of one process meet."""

    def __init__(self) -> None:
        self._participants: list[InProcessTransport] = []

    def join(self, name: str) -> "InProcessTransport":
        """A new participant, linked to all that are there."""
        participant = InProcessTransport(name, self._leave)
        for other in self._participants:
            participant.connect(other)
            other.connect(participant)
        self._participants.append(participant)
        return participant

    def _leave(self, participant: "InProcessTransport") -> None:
        self._participants.remove(participant)
        for other in self._participants:
            other.disconnect(participant)


class InProcessTransport:
    """One participant. See `storage.replication.transport.Transport`."""

    def __init__(self, name: str, leave: Callable[["InProcessTransport"], None]) -> None:
        self.name = name
        self._leave = leave
        self._links: dict[InProcessTransport, InProcessLink] = {}
        self._subscribers = Subscribers()
        self._closed = False

    is_shared = False

    @property
    def links(self) -> list[Link]:
        """See `Transport`."""
        return list(self._links.values())

    def start(self) -> None:
        """See `Transport`. It is connected already."""

    def publish(self, *commands: Command) -> None:
        """See `Transport`."""
        for link in self._links.values():
            link.send(
                *(
                    command
                    for command in commands
                    if link.replicates or not isinstance(command, Rdata | Position)
                )
            )

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """See `Transport`."""
        return self._subscribers.add(subscriber, self.links)

    async def close(self) -> None:
        """See `Transport`. The others hear what was sent, and then that this one has gone."""
        if not self._closed:
            self._closed = True
            asyncio.get_running_loop().call_soon(self._leave, self)
            for peer in list(self._links):
                self.disconnect(peer)
            await asyncio.sleep(0)

    def connect(self, peer: "InProcessTransport") -> None:
        """Link to another participant."""
        link = InProcessLink(self, peer)
        self._links[peer] = link
        self._subscribers.connected(link)

    def disconnect(self, peer: "InProcessTransport") -> None:
        """End the link to another participant, if there is one."""
        link = self._links.pop(peer, None)
        if link is not None:
            self._subscribers.disconnected(link)

    def begin_anew(self, peer: "InProcessTransport") -> None:
        """End the links with another participant, and make new ones."""
        if peer not in self._links:
            return
        self.disconnect(peer)
        peer.disconnect(self)
        self.connect(peer)
        peer.connect(self)

    def deliver(self, command: Command, sender: "InProcessTransport") -> None:
        """Take what another participant sent, unless one of both has gone meanwhile."""
        link = self._links.get(sender)
        if link is not None:
            link.replicates |= isinstance(command, Replicate)
            self._subscribers.received(command, link)


class InProcessLink:
    """The way from one participant to another."""

    def __init__(self, owner: InProcessTransport, peer: InProcessTransport) -> None:
        self._owner = owner
        self._peer = peer
        self.replicates = False
        """Whether the peer has asked for rows."""

    @property
    def name(self) -> str:
        """See `Link`."""
        return self._peer.name

    def silent_s(self) -> float:
        """See `Link`."""
        return 0.0

    def send(self, *commands: Command) -> None:
        """See `Link`.

        Delivered when the event loop comes to it, so that nobody is called in the middle of what it
        does.
        """
        loop = asyncio.get_running_loop()
        for command in commands:
            loop.call_soon(self._peer.deliver, command, self._owner)

    def refuse(self, reason: str) -> None:  # noqa: ARG002  # it was logged; there is nobody else to tell
        """See `Link`. Both begin anew, as after a lost connection."""
        asyncio.get_running_loop().call_soon(self._owner.begin_anew, self._peer)
