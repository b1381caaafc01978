"""Sliding sync beside that of a Synapse with the same users, rooms and events.

STORAGE_EXAMPLES=20 runs the random test with 20 seeds.
"""

import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

import storage
from storage import Store
from tests.conftest import _fresh_database
from tests.homeserver import environment
from tests.homeserver.mirror import SynapseMirror
from tests.homeserver.processes import ErrorResponse, ServerProcess, User, running, synapse
from tests.homeserver.sliding_comparison import DIFFERENCES, SlidingComparison, SlidingPair

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("homeserver"),
    pytest.mark.asyncio(loop_scope="module"),
]

SEEDS: Final = int(os.environ.get("STORAGE_EXAMPLES", "1"))
STEPS: Final = 40
STATES: Final = (
    [["m.room.create", ""], ["m.room.name", ""]],
    [["m.room.member", "$LAZY"], ["m.room.name", ""]],
    [["m.room.member", "$ME"], ["m.room.topic", "*"]],
    [["*", "*"]],
)
FILTERS: Final[Sequence[dict[str, Any]]] = (
    {},
    {"is_dm": True},
    {"is_dm": False},
    {"is_invite": True},
    {"is_invite": False},
    {"is_encrypted": True},
    {"is_encrypted": False},
    {"room_types": ["m.space"]},
    {"not_room_types": ["m.space"]},
    {"room_types": [None]},
    {"tags": ["m.favourite"]},
    {"not_tags": ["m.favourite"]},
)


@dataclass
class SynapseWorld:
    server: ServerProcess
    mirror: SynapseMirror
    store: Store
    users: list[User]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(
    server_dsn: str,
    template_name: str,
    worker_id: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[SynapseWorld]:
    """Synapse, and a store that has all its events."""
    python = environment.interpreter()
    if python is None:
        pytest.skip(
            f"there is no environment with Synapse in {environment.folder()}: "
            "python -m tests.homeserver.environment"
        )
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = synapse(tmp_path_factory.mktemp("sliding") / "synapse", python)
        dsn = await enter(_fresh_database(server_dsn, template_name, f"{worker_id}_sliding"))
        await enter(running(server))
        store = await enter(storage.open(dsn, server_name=server.name))
        session = await enter(aiohttp.ClientSession())
        users = [await server.user(session, name) for name in ("ada", "ben", "cora")]
        yield SynapseWorld(server, SynapseMirror(server, store), store, users)


@dataclass
class SlidingScenario:
    """Random actions of users. Clients of one of them look at both servers meanwhile."""

    world: SynapseWorld
    rng: random.Random
    rooms: list[str] = field(default_factory=list)
    said: int = 0

    async def step(self) -> None:
        """Do something. An action that Synapse refuses is left out."""
        actions = (
            *(self._say, self._say, self._say, self._say, self._create, self._name, self._topic),
            *(self._join, self._leave, self._invite, self._kick, self._ban, self._account),
        )
        with suppress(ErrorResponse):
            await self.rng.choice(actions)()

    def _user(self) -> User:
        return self.rng.choice(self.world.users)

    def _room(self) -> str:
        return self.rng.choice(self.rooms)

    async def _create(self) -> None:
        rng = self.rng
        given: dict[str, Any] = {
            "preset": rng.choice(("public_chat", "public_chat", "private_chat"))
        }
        if rng.random() < 0.6:
            given["name"] = f"room {len(self.rooms)}"
        if rng.random() < 0.2:
            given["creation_content"] = {"type": "m.space"}
        if rng.random() < 0.3:
            content = {"algorithm": "m.megolm.v1.aes-sha2"}
            given["initial_state"] = [{"type": "m.room.encryption", "content": content}]
        self.rooms.append(await self._user().create_room(**given))

    async def _say(self) -> None:
        self.said += 1
        await self._user().send(self._room(), f"message {self.said}")

    async def _name(self) -> None:
        self.said += 1
        name = self.rng.choice((f"name {self.said}", ""))
        await self._user().state(self._room(), "m.room.name", {"name": name})

    async def _topic(self) -> None:
        self.said += 1
        await self._user().state(self._room(), "m.room.topic", {"topic": f"topic {self.said}"})

    async def _join(self) -> None:
        await self._user().act(self._room(), "join")

    async def _leave(self) -> None:
        await self._user().act(self._room(), "leave")

    async def _invite(self) -> None:
        await self._user().act(self._room(), "invite", self._user())

    async def _kick(self) -> None:
        await self._user().act(self._room(), "kick", self._user())

    async def _ban(self) -> None:
        await self._user().act(self._room(), self.rng.choice(("ban", "unban")), self._user())

    async def _account(self) -> None:
        user, rng = self._user(), self.rng
        direct = {self._user().user_id: [one for one in self.rooms if rng.random() < 0.4]}
        await self.world.mirror.account(user, "m.direct", direct)
        tags = {"tags": {"m.favourite": {"order": 0.5}} if rng.random() < 0.6 else {}}
        await self.world.mirror.follow()
        await self.world.mirror.account(user, "m.tag", tags, self._room())


def random_body(rng: random.Random, rooms: list[str], conn_id: str) -> dict[str, Any]:
    """Return a random request in the form of the endpoint."""

    def config() -> dict[str, Any]:
        return {"timeline_limit": rng.choice((1, 3, 10)), "required_state": rng.choice(STATES)}

    # A room that the user left is in our list and not in that of Synapse. It would move a window.
    ranges = rng.choice(([[0, 19]], [[0, 99]], [[0, 9], [10, 30]]))
    filters = rng.choice(FILTERS) if rng.random() < 0.4 else {}
    body: dict[str, Any] = {"conn_id": conn_id}
    body["lists"] = {"all": {"ranges": ranges, "filters": filters, **config()}}
    if rng.random() < 0.3:
        body["room_subscriptions"] = {rng.choice(rooms): config()}
    return body


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_as_synapse(alone: SynapseWorld, seed: int) -> None:
    rng = random.Random(seed)
    scenario = SlidingScenario(alone, rng)
    for _ in range(4):
        await scenario._create()
    pairs = [
        SlidingComparison(SlidingPair(alone.users[0], alone.store, f"{seed} {number}"))
        for number in range(2)
    ]
    for _ in range(STEPS):
        for _ in range(rng.randint(0, 3)):
            await scenario.step()
        await alone.mirror.follow()
        one = rng.choice(pairs)
        if not one.pair.body or rng.random() < 0.3:
            one.pair.body = random_body(rng, scenario.rooms, one.pair.conn_id)
        await one.look()
    lines = [line for one in pairs for line in one.lines]
    reasons = sum((one.reasons for one in pairs), Counter[str]())
    assert reasons.keys() <= DIFFERENCES.keys()
    assert not lines, "\n".join(lines)


async def test_the_order_of_a_list(alone: SynapseWorld) -> None:
    """Each longer window has one more room. A first request has no room that the user left."""
    ada, ben, _ = alone.users
    rooms = [await ada.create_room(preset="public_chat", name=f"list {n}") for n in range(5)]
    await ben.act(rooms[0], "join")
    await ada.send(rooms[2], "hello")
    await ada.state(rooms[1], "m.room.topic", {"topic": "news"})
    await ben.send(rooms[0], "hello")
    await alone.mirror.follow()
    ours: list[str] = []
    theirs: list[str] = []
    for last in range(len(rooms)):
        pair = SlidingPair(ada, alone.store, f"order {last}")
        one = {"ranges": [[0, last]], "timeline_limit": 1, "required_state": []}
        pair.body = {"conn_id": pair.conn_id, "lists": {"all": one}}
        found, at_synapse = await pair.look()
        ours += [room_id for room_id in found.rooms if room_id not in ours]
        theirs += [room_id for room_id in at_synapse["rooms"] if room_id not in theirs]
    assert ours == theirs == [rooms[0], rooms[1], rooms[2], rooms[4], rooms[3]]
