"""Steps of users of two servers: in one room, or the same at both, in order or at random."""

import asyncio
import json
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from tests.homeserver.agreement import ClientSide, agree, has, history, settled, until_membership
from tests.homeserver.conftest import World
from tests.homeserver.processes import ServerProcess, User

VISIBILITY: Final = "m.room.history_visibility"
LEVELS: Final = "m.room.power_levels"
EVENTS: Final = {"m.room.name": 50}
USERS: Final = 6
VERSIONS: Final = ("6", "10", "11", "12", "11", "12")
VISIBILITIES: Final = ("world_readable", "shared", "invited", "joined", None)


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


@dataclass
class RandomClients(ABC):
    """Six users in six rooms on both servers. They do the same, one after the other.

    `events` are those of each room by number, `members` is who is in which room.
    """

    world: World
    seed: int
    events: dict[str, list[Any]] = field(default_factory=dict)
    members: dict[tuple[str, str], str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.sides = ClientSide(self.world.ours), ClientSide(self.world.theirs)

    @property
    def users(self) -> list[str]:
        return list(self.sides[0].users)

    async def both(self, user: str, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """Send a request to both, and return both answers."""
        return await asyncio.gather(
            *(side.ask(user, method, path, body, **query) for side in self.sides)
        )

    async def act(self, user: str, method: str, path: str, body: Any) -> bool:
        """Let both do the same. Return whether they did."""
        self.log.append(f"{user} {method} {path} {json.dumps(body)}")
        ours, theirs = (
            {key: one.get(key) for key in ("status", "errcode")}
            for one in await self.both(user, method, path, body)
        )
        if ours["status"] is None and theirs["status"] is None:
            return True
        assert (ours["status"] is None) == (theirs["status"] is None), self.story(ours, theirs)
        self.note(f"act {method} {path}", user, ours, theirs)
        return False

    @abstractmethod
    def note(self, what: str, user: str, ours: Any, theirs: Any) -> None:
        """Note what differs in both answers."""

    def story(self, *more: object) -> str:
        return "\n".join([f"seed {self.seed}", *self.log, *map(str, more)])

    async def begin(self) -> None:
        """Make users and rooms. Only the levels of a new room are not the same."""
        for number in range(USERS):
            for side in self.sides:
                user = await side.server.user(self.world.alice.session, f"user{number}.{self.seed}")
                side.users[f"@user{number}.{self.seed}"] = user
                side.learn(f"@user{number}.{self.seed}", user.user_id)
        for user in self.sides[1].users.values():  # the example has no profiles
            await user.call("PUT", f"/profile/{user.user_id}/displayname", {"displayname": ""})
        for number, version in enumerate(VERSIONS):
            await self._create(f"!room{number}", version, VISIBILITIES[(number + self.seed) % 5])

    async def _create(self, room: str, version: str, visibility: str | None) -> None:
        creator = self.creator(room)
        rule = self.rng.choice(("public", "public", "invite"))
        content = {} if visibility is None else {"history_visibility": visibility}
        self.log.append(f"{creator} makes {room} {version} {rule} {visibility}")
        given = {
            "preset": "public_chat",
            "room_version": version,
            "initial_state": [
                {"type": "m.room.join_rules", "content": {"join_rule": rule}},
                {"type": "m.room.history_visibility", "content": content},
            ],
        }
        for side, made in zip(
            self.sides, await self.both(creator, "POST", "/createRoom", given), strict=True
        ):
            side.learn(room, made["room_id"])
        self.events[room], self.members[room, creator] = [], "join"
        await self.levels(room, creator)
        await self.label(room)

    async def label(self, room: str) -> None:
        """Give the new events of a room labels. Its creator sees all of them."""
        creator, known = self.creator(room), len(self.events[room])
        fresh: list[list[Any]] = []
        for side in self.sides:
            answer = await side.ask(creator, "GET", f"/rooms/{room}/messages", dir="b", limit=60)
            chunk = [one for one in answer["chunk"] if one["event_id"] not in side.labels]
            fresh.append(chunk[::-1])
        for number, (ours, theirs) in enumerate(zip(*fresh, strict=True), known):
            for side, event in zip(self.sides, (ours, theirs), strict=True):
                side.learn(f"${room[-1]}.{number}", event["event_id"])
            one, other = (
                side.plain({key: event.get(key) for key in ("type", "sender", "state_key")})
                for side, event in zip(self.sides, (ours, theirs), strict=True)
            )
            assert one == other, self.story()
            self.events[room].append(self.sides[0].plain(ours))

    def creator(self, room: str) -> str:
        return self.users[int(room[-1]) % 3]

    async def levels(self, room: str, user: str) -> None:
        """Set the levels: the same on both."""
        self.count += 1
        users = {one: self.rng.choice((0, 0, 50)) for one in self.users[3:]}
        if VERSIONS[int(room[-1])] != "12":
            users[self.creator(room)] = 100
        content = {"users": users, "events": {"m.room.name": 50, "m.room.topic": 0}}
        await self.act(
            user, "PUT", f"/rooms/{room}/state/m.room.power_levels", {**content, "n": self.count}
        )

    def _event(self, room: str, kind: str = "m.room.message", *, plain: bool = False) -> str | None:
        chosen = [
            event["event_id"]
            for event in self.events[room]
            if event["type"] == kind and not (plain and "m.relates_to" in event.get("content", {}))
        ]
        return self.rng.choice(chosen) if chosen else None

    async def step(self) -> None:
        """One act of one user, most often of one who may."""
        rng = self.rng
        room = rng.choice([*self.events])
        inside = [user for user in self.users if self.members.get((room, user)) == "join"]
        user = rng.choice(self.users if rng.random() < 0.1 else inside)
        act = rng.choice(
            (
                *(self._say, self._say, self._edit, self._react, self._thread, self._redact),
                *(self._state, self._visibility, self._receipt),
                *(self._membership, self._membership, self._membership, self._membership),
            )
        )
        self.count += 1
        await act(room, user)
        await self.label(room)

    async def _send(self, room: str, user: str, body: Any, kind: str = "m.room.message") -> None:
        await self.act(user, "PUT", f"/rooms/{room}/send/{kind}/{self.count}", body)

    async def _say(self, room: str, user: str) -> None:
        await self._send(room, user, {"msgtype": "m.text", "body": f"message {self.count}"})

    async def _edit(self, room: str, user: str) -> None:
        own = [
            one
            for one in self.events[room]
            if one["sender"] == user and "body" in one.get("content", {})
        ]
        if own:
            new = {"msgtype": "m.text", "body": f"edit {self.count}"}
            target = self.rng.choice(own)["event_id"]
            relation = {"rel_type": "m.replace", "event_id": target}
            await self._send(room, user, {**new, "m.new_content": new, "m.relates_to": relation})

    async def _react(self, room: str, user: str) -> None:
        if target := self._event(room):
            relation = {"rel_type": "m.annotation", "event_id": target, "key": f"k{self.count}"}
            await self._send(room, user, {"m.relates_to": relation}, "m.reaction")

    async def _thread(self, room: str, user: str) -> None:
        if root := self._event(room, plain=True):
            content: dict[str, Any] = {"msgtype": "m.text", "body": f"reply {self.count}"}
            content["m.relates_to"] = {"rel_type": "m.thread", "event_id": root}
            await self._send(room, user, content)

    async def _redact(self, room: str, user: str) -> None:
        kinds = ("m.room.message", "m.room.message", "m.reaction", "m.room.topic", "m.room.member")
        if target := self._event(room, self.rng.choice(kinds)):
            path = f"/rooms/{room}/redact/{target}/{self.count}"
            await self.act(user, "PUT", path, {"reason": f"reason {self.count}"})

    async def _state(self, room: str, user: str) -> None:
        kind = self.rng.choice(("topic", "name", "levels", "rules"))
        path = f"/rooms/{room}/state/m.room."
        if kind == "levels":
            await self.levels(room, self.creator(room))
        elif kind == "rules":
            rule = {"join_rule": self.rng.choice(("public", "invite")), "n": self.count}
            await self.act(self.creator(room), "PUT", f"{path}join_rules", rule)
        else:
            await self.act(user, "PUT", path + kind, {kind: f"{kind} {self.count}"})

    async def _visibility(self, room: str, user: str) -> None:  # noqa: ARG002
        content: dict[str, Any] = {"n": self.count}
        if visibility := self.rng.choice(VISIBILITIES):
            content["history_visibility"] = visibility
        path = f"/rooms/{room}/state/m.room.history_visibility"
        await self.act(self.creator(room), "PUT", path, content)

    async def _receipt(self, room: str, user: str) -> None:
        if event := self._event(room, plain=True):
            body = self.rng.choice(({}, {"thread_id": "main"}))
            kind = self.rng.choice(("m.read", "m.read", "m.read.private"))
            await self.act(user, "POST", f"/rooms/{room}/receipt/{kind}/{event}", body)

    async def _membership(self, room: str, user: str) -> None:
        """Change a membership to another one. What changes nothing is left to each server."""
        rng = self.rng
        other = rng.choice([one for one in self.users if one != self.creator(room)])
        now = self.members.get((room, other))
        acts = {
            "join": ("leave", "kick", "ban"),
            "invite": ("join", "join", "leave", "kick", "ban"),
            "ban": ("unban", "unban", "forget"),
            "leave": ("join", "invite", "ban", "forget"),
            None: ("join", "join", "invite", "ban"),
        }
        act = rng.choice(acts[now])
        body: Any = {"reason": f"reason {self.count}"}
        if act not in ("join", "leave", "forget"):
            body["user_id"], done = other, await self._by(room, user, act, body, other)
        else:
            body = {} if act == "forget" else body
            done = await self.act(other, "POST", f"/rooms/{room}/{act}", body)
        after = {"kick": "leave", "unban": "leave", "forget": now}
        if done:
            self.members[room, other] = after.get(act) or act

    async def _by(self, room: str, user: str, act: str, body: Any, other: str) -> bool:
        by = user if act == "invite" else self.rng.choice((self.creator(room), user))
        return await self.act(by, "POST", f"/rooms/{room}/{act}", {**body, "user_id": other})
