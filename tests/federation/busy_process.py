"""Two homeservers in one process talk in one room, until the process is killed.

Their senders keep a few events of a queue and then the latest of the room only, as Synapse does for
a server that was away. So the receivers have many gaps to fill.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from storage import EventId, RoomId, ServerName
from storage.database.connection import Observer
from storage.event import event_id
from storage.federation import ReceiverLimits, RemoteError, Sender, SenderLimits
from storage.queries.events import StoredEvent
from tests.federation.partial_process import Killer, serve
from tests.federation.peers import Homeserver, Json, as_json, start

TALKERS: Final = 3
LIMITS: Final = ReceiverLimits(
    request_seconds=60.0,
    missing_rounds_max=2,
    missing_events_max=5,
    backfill_max=10,
    key_retry_seconds=0.001,
)
SENDING: Final = SenderLimits(queue_max=4, retry_seconds=0.01, retry_seconds_max=0.01)


class BusyRoom:
    """One room of two servers, each with its sender."""

    def __init__(self, servers: list[Homeserver], room_id: RoomId) -> None:
        self.servers, self.room_id = servers, room_id
        self.senders = [
            Sender(one.store, partial(self._send, one), limits=SENDING) for one in servers
        ]
        self._arrived = asyncio.Condition()

    async def _send(
        self, origin: Homeserver, server: ServerName, _: str, events: list[StoredEvent]
    ) -> None:
        other = origin.network.servers[server]
        await other.receive(origin, [as_json(one) for one in events])
        async with self._arrived:
            self._arrived.notify_all()

    async def say(self, server: Homeserver, text: str) -> EventId:
        return EventId(event_id(await server.say(self.room_id, text), "12"))

    async def exchange(self) -> None:
        """Each server says something, and the other receives it."""
        for server, other in (self.servers, self.servers[::-1]):
            said = await self.say(server, "a marker")
            async with self._arrived:
                while await other.store.event(said) is None:
                    await self._arrived.wait()


@asynccontextmanager
async def busy_room(
    dsns: list[str], room_id: str, observer: Observer | None = None
) -> AsyncIterator[BusyRoom]:
    async with AsyncExitStack() as stack:
        servers = await start(stack, dsns, limits=LIMITS, observer=observer)
        room = BusyRoom(servers, RoomId(room_id))
        running = [asyncio.ensure_future(one.run()) for one in room.senders]
        try:
            yield room
        finally:
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def talk(dsns: list[str], room_id: str, seed: int, number: int, path: str) -> None:
    """Talk until the process is killed. A line of the file is an event that was acknowledged."""
    chance = random.Random(seed)
    with Path(path).open("ab", buffering=0) as acknowledged:
        async with busy_room(dsns, room_id, Killer(number, chance.choice((0, 0.5, 2, 8)))) as room:

            async def fails(body: Json) -> Json:
                if chance.random() < 0.2:
                    raise RemoteError("500: out of order")
                return body

            for server in room.servers:
                server.network.faults[server.name, "get_missing_events"] = fails

            async def speak(server: Homeserver) -> None:
                while True:
                    said = await room.say(server, "busy")
                    acknowledged.write(f"{said}\n".encode())

            talkers: list[Awaitable[None]] = [
                speak(one) for one in room.servers for _ in range(TALKERS)
            ]
            await asyncio.gather(*talkers)
    os._exit(1)  # it never stops by itself


if __name__ == "__main__":
    serve(talk)
