"""Three servers in one room do random things, lose transactions, fail and are interrupted.

At the end the network heals. All servers then have the same state, a causal order, and the same
visible history. `STORAGE_EXAMPLES` is the number of seeds.
"""

import asyncio
import os
import random
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from storage import AuthDenied, RoomId
from storage.federation import ReceiverLimits
from tests.federation.hanging import hang
from tests.federation.peers import Homeserver, Json, fail, start
from tests.federation.rooms import agree, shared_room

SEEDS: Final = int(os.environ.get("STORAGE_EXAMPLES", "3"))
STEPS: Final = 40
VERSIONS: Final = ("12", "11", "6", "9", "3", "10")
LIMITS: Final = ReceiverLimits(
    request_seconds=60.0,
    missing_rounds_max=2,
    missing_events_max=4,
    key_retry_seconds=0.001,
)
REQUESTS: Final = ("get_missing_events", "state_ids", "event", "state", "backfill", "event_auth")


class FaultyRoom:
    """A room of three servers, and what each of them has not received yet."""

    def __init__(self, seed: int, servers: list[Homeserver], room_id: RoomId, version: str) -> None:
        self.version = version
        self.random = random.Random(seed)
        self.servers = servers
        self.network = servers[0].network
        self.room_id = room_id
        self.undelivered: dict[str, list[tuple[Homeserver, Json]]] = {
            one.name: [] for one in servers
        }

    async def step(self) -> None:
        action = self.random.choices(
            [self.speak, self.rename, self.moderate, self.deliver, self.drop, self.fault],
            [8, 3, 2, 6, 3, 3],
        )[0]
        await action()

    async def send(self, server: Homeserver, type_: str, content: Json, **how: Any) -> None:
        try:
            event = await server.do(self.room_id, "user", type_, content, **how)
        except AuthDenied:
            return
        for other in self.servers:
            if other is not server:
                self.undelivered[other.name].append((server, event))

    async def speak(self) -> None:
        server = self.random.choice(self.servers)
        for _ in range(self.random.randint(1, 6)):
            await self.send(server, "m.room.message", {"body": str(self.random.random())})

    async def rename(self) -> None:
        server = self.random.choice(self.servers)
        kind = self.random.choice(["m.room.name", "m.room.topic"])
        await self.send(server, kind, {kind[7:]: str(self.random.random())}, state_key="")

    async def moderate(self) -> None:
        """The creator changes power levels, or kicks or bans a user who is in no server's name."""
        one, *others = self.servers
        if self.random.random() < 0.4:
            users = {other.user(): self.random.choice([0, 50]) for other in others}
            if int(self.version) < 12:
                users[one.user()] = 100
            content = {"users": users, "state_default": self.random.choice([0, 50])}
            await self.send(one, "m.room.power_levels", content, state_key="")
            return
        guest = self.random.choice(others).user("guest")
        membership = self.random.choice(["invite", "leave", "ban"])
        await self.send(one, "m.room.member", {"membership": membership}, state_key=guest)

    async def deliver(self) -> None:
        """Deliver a part of what waits, perhaps twice, out of order, or with an interruption."""
        server = self.random.choice(self.servers)
        waiting = self.undelivered[server.name]
        if not waiting:
            return
        taken = waiting[-self.random.randint(1, 8) :]
        del waiting[-len(taken) :]
        if self.random.random() < 0.3:
            self.random.shuffle(taken)
        by_origin: dict[str, list[Json]] = {}
        for origin, event in taken:
            by_origin.setdefault(origin.name, []).append(event)
        jobs = [
            asyncio.ensure_future(server.receive(self.network.servers[name], events))
            for name, events in by_origin.items()
        ]
        if self.random.random() < 0.25:
            for _ in range(self.random.randint(0, 30)):
                await asyncio.sleep(0)
            for job in jobs:
                job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for job in jobs:
            assert job.cancelled() or job.exception() is None, job.exception()

    async def drop(self) -> None:
        server = self.random.choice(self.servers)
        self.undelivered[server.name].clear()

    async def fault(self) -> None:
        """Let a request fail, answer late, answer with half, or work again."""
        key = self.random.choice(self.servers).name, self.random.choice(REQUESTS)
        self.network.faults.pop(key, None)
        # half a list of state ids would be another state, which nobody can recognise
        faults = [None, fail, hang, half] if key[1] != "state_ids" else [None, fail, hang]
        how = self.random.choice(faults)
        if how is not None:
            self.network.faults[key] = how

    async def heal(self) -> None:
        """Let everything work; each server's last event reaches all, until there is one end."""
        self.network.faults.clear()
        for _ in range(3):
            for server in self.servers:
                event = await server.say(self.room_id, "the last of this server")
                for other in self.servers:
                    if other is not server:
                        await other.receive(server, [event])
                        await other.fill(self.room_id)


async def half(body: Json) -> Json:
    """Half of each list in a response."""
    return {
        key: value[: len(value) // 2] if isinstance(value, list) else value
        for key, value in body.items()
    }


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_servers_agree_when_the_network_heals(
    seed: int, dsn: str, another_dsn: str, third_dsn: str
) -> None:
    async with AsyncExitStack() as stack:
        servers = await start(stack, [dsn, another_dsn, third_dsn], limits=LIMITS)
        version = VERSIONS[seed % len(VERSIONS)]
        room_id = await shared_room(servers[0], *servers[1:], version=version)
        room = FaultyRoom(seed, servers, room_id, version)
        for _ in range(STEPS):
            await room.step()
        await room.heal()
        await agree(room_id, *servers)
        for server in servers:
            assert len(await server.store.forward_extremities(room_id)) == 1
