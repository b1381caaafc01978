"""Steps of users of two servers in one room, in a fixed order or at random."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from tests.homeserver.agreement import agree, has, history, settled, until_membership
from tests.homeserver.conftest import World
from tests.homeserver.processes import ServerProcess, User

VISIBILITY: Final = "m.room.history_visibility"
LEVELS: Final = "m.room.power_levels"
EVENTS: Final = {"m.room.name": 50}


@dataclass
class Scenario:
    """One room. `sid` of the other server has made it; `alice` has joined it over federation."""

    world: World
    room: str
    levels: dict[str, int]
    rng: random.Random
    inside: list[User] = field(default_factory=list)
    said: int = 0

    @property
    def first(self) -> tuple[User, User]:
        """The two who have power and stay."""
        return self.world.alice, self.world.sid

    async def settle(self) -> None:
        await settled(self.room, *self.first)

    async def say(self, user: User) -> str:
        self.said += 1
        return await user.send(self.room, f"message {self.said} of {user.user_id}")

    async def fork(self, each: int = 3) -> None:
        """All users send at once, and both who may set the topic and the levels."""
        alice, sid = self.first
        one, other = (
            {"users": self.levels, "events": {**EVENTS, "m.room.topic": level}}
            for level in (50, 51)
        )
        await asyncio.gather(
            *(self.say(user) for user in [alice, sid, *self.inside] for _ in range(each)),
            alice.state(self.room, "m.room.topic", {"topic": f"ours {self.said}"}),
            sid.state(self.room, "m.room.topic", {"topic": f"theirs {self.said}"}),
            alice.state(self.room, LEVELS, one),
            sid.state(self.room, LEVELS, other),
        )

    async def enter(self, user: User, inviter: User) -> None:
        """Invite a user and let them join."""
        await inviter.act(self.room, "invite", user)
        await self.settle()
        await user.act(self.room, "join")
        self.inside.append(user)
        await self.settle()

    async def remove(self, user: User, act: str, by: User) -> None:
        await self.settle()
        await by.act(self.room, act, None if by is user else user)
        self.inside.remove(user)
        for one in self.first:  # no message is sent at the same time
            await until_membership(one, self.room, user, "ban" if act == "ban" else "leave")

    async def lose(self, server: ServerProcess, sender: User, count: int) -> None:
        """Lose transactions to a server. The next event shows it the gap."""
        await self.settle()
        before = server.gate.dropped
        server.gate.drops = True
        try:
            for _ in range(count):
                await self.say(sender)
            async with asyncio.timeout(60):
                while server.gate.dropped - before < count:  # noqa: ASYNC110  # it only counts
                    await asyncio.sleep(0.02)
        finally:
            server.gate.drops = False
        await self.settle()

    async def agree(self) -> None:
        await self.settle()
        for user in self.first:  # so that each has filled its gaps
            await history(user, self.room)
        await agree(self.world.dsn, self.room, *self.first)

    async def random_step(self) -> None:
        """One step that any order of steps allows."""
        world, rng = self.world, self.rng
        outside = [one for one in (world.anna, world.sue) if one not in self.inside]
        match rng.choice(("say", "say", "fork", "enter", "remove", "lose", "redact")):
            case "fork":
                await self.fork(rng.randint(1, 3))
            case "enter" if outside:
                await self.enter(rng.choice(outside), rng.choice(self.first))
            case "remove" if self.inside:
                user = rng.choice(self.inside)
                by, act = rng.choice([(user, "leave"), *((one, "kick") for one in self.first)])
                await self.remove(user, act, by)
            case "lose":
                server, sender = rng.choice([(world.ours, world.sid), (world.theirs, world.alice)])
                await self.lose(server, sender, rng.randint(1, 15))
            case "redact":
                target = await self.say(rng.choice(self.first))
                for user in self.first:
                    await has(user, self.room, target)
                path = f"/rooms/{self.room}/redact/{quote(target, safe='')}/{self.said}"
                await rng.choice(self.first).call("PUT", path, {"reason": "at random"})
            case _:
                await self.say(rng.choice([*self.first, *self.inside]))


async def begun(world: World, version: str, seed: int = 0) -> Scenario:
    """Let sid make a room with history, and alice join it."""
    sid, alice = world.sid, world.alice
    levels = {alice.user_id: 100} | ({} if version == "12" else {sid.user_id: 100})
    room = await sid.create_room(
        room_version=version,
        preset="private_chat",
        power_level_content_override={"users": levels, "events": EVENTS},
        initial_state=[{"type": VISIBILITY, "content": {"history_visibility": "shared"}}],
    )
    scenario = Scenario(world, room, levels, random.Random(seed))
    for _ in range(3):
        await scenario.say(sid)
    await sid.act(room, "invite", alice)
    await alice.join(room, sid)
    return scenario
