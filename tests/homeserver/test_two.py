"""Two processes of the example in one room, over federation. It needs no Synapse."""

from pathlib import Path

import aiohttp
import pytest

from examples.homeserver.__main__ import certificates
from tests.homeserver.agreement import has, history, settled, state_of, until_membership
from tests.homeserver.processes import example, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("homeserver")]


async def test_two_examples_share_a_room(dsn: str, another_dsn: str, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    trusted = [certificates(folder)[0] for folder in folders]
    first, second = (
        example(folders[0], dsn, trusted[1]),
        example(folders[1], another_dsn, trusted[0]),
    )
    async with running(first), running(second), aiohttp.ClientSession() as session:
        alice, bob = await first.user(session, "alice"), await second.user(session, "bob")
        room = await alice.create_room(preset="private_chat", name="The pantry")
        before = await alice.send(room, "before the join")
        await alice.act(room, "invite", bob)
        await bob.act(room, "join")
        await settled(room, alice, bob)
        assert before in await history(bob, room)
        assert await state_of(alice, room) == await state_of(bob, room)
        await second.kill()
        sent = await alice.send(room, "while it is down")
        await second.start()
        await bob.send(room, "up again")
        await has(bob, room, sent)
        await bob.act(room, "leave")
        await until_membership(alice, room, bob, "leave")
