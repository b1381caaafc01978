"""The transport inside one process, on one event loop.

It links several stores, or a store and other parts of a homeserver.

    hub = Hub()
    async with (
        ReplicationPeer(store, hub.join("main")),
        ReplicationPeer(other_store, hub.join("worker")),
    ):
        …
"""

import asyncio
from collections.abc import Callable

from storage.replication.commands import Command, Position, Rdata, Replicate
from storage.replication.transport import Link, Subscriber, Subscribers


class Hub:
    """The hub that links the participants of one process."""

    def __init__(self) -> None:
        self._participants: list[InProcessTransport] = []

    def join(self, name: str) -> "InProcessTransport":
        """Return a new participant, linked to all existing ones."""
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
        return list(self._links.values())

    def start(self) -> None:
        """See `Transport`. It is connected already."""

    def publish(self, *commands: Command) -> None:
        for link in self._links.values():
            link.send(
                *(
                    command
                    for command in commands
                    if link.replicates or not isinstance(command, Rdata | Position)
                )
            )

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        return self._subscribers.add(subscriber, self.links)

    async def close(self) -> None:
        """See `Transport`. The others receive pending commands, and then the end of the link."""
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
        """End the links with another participant, and create new ones."""
        if peer not in self._links:
            return
        self.disconnect(peer)
        peer.disconnect(self)
        self.connect(peer)
        peer.connect(self)

    def deliver(self, command: Command, sender: "InProcessTransport") -> None:
        """Take a command from another participant, unless one of both has gone meanwhile."""
        link = self._links.get(sender)
        if link is not None:
            link.replicates |= isinstance(command, Replicate)
            self._subscribers.received(command, link)


class InProcessLink:
    """The link from one participant to another."""

    def __init__(self, owner: InProcessTransport, peer: InProcessTransport) -> None:
        self._owner = owner
        self._peer = peer
        self.replicates = False
        """Whether the peer has requested rows (REPLICATE)."""

    @property
    def name(self) -> str:
        return self._peer.name

    def silent_s(self) -> float:
        return 0.0

    def send(self, *commands: Command) -> None:
        """See `Link`.

        It is delivered in a later turn of the event loop, so that nobody is called in the middle of
        other work.
        """
        loop = asyncio.get_running_loop()
        for command in commands:
            loop.call_soon(self._peer.deliver, command, self._owner)

    # it was logged; nobody else has to know
    def refuse(self, reason: str) -> None:  # noqa: ARG002
        """See `Link`. Both sides get new links, as after a lost connection."""
        asyncio.get_running_loop().call_soon(self._owner.begin_anew, self._peer)
