"""Two processes of the example in one room, over federation. It needs no Synapse."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from examples.homeserver.__main__ import certificates
from tests.homeserver.agreement import has, history, settled, state_of, until_membership
from tests.homeserver.processes import ServerProcess, User, example, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("homeserver")]


Pair = tuple[ServerProcess, ServerProcess]


@pytest.fixture
async def pair(dsn: str, another_dsn: str, tmp_path: Path) -> AsyncIterator[Pair]:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    trusted = [certificates(folder)[0] for folder in folders]
    first, second = (
        example(folders[0], dsn, trusted[1]),
        example(folders[1], another_dsn, trusted[0]),
    )
    async with running(first), running(second):
        yield first, second


async def test_two_examples_share_a_room(pair: Pair) -> None:
    first, second = pair
    async with aiohttp.ClientSession() as session:
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


async def test_old_rooms_by_the_first_form_of_the_api(pair: Pair) -> None:
    """Each answers 404 to the second form of invites, joins and leaves."""
    first, second = pair
    first.gate.lacks_v2 = second.gate.lacks_v2 = True
    async with aiohttp.ClientSession() as session:
        alice, bob = await first.user(session, "alice"), await second.user(session, "bob")
        for version in ("1", "2"):
            await _invited_twice(alice, bob, version)


async def _invited_twice(alice: User, bob: User, version: str) -> None:
    room = await alice.create_room(preset="private_chat", room_version=version)
    await alice.act(room, "invite", bob)
    invite = (await bob.call("GET", "/sync"))["rooms"]["invite"][room]
    shown = {event["type"] for event in invite["invite_state"]["events"]}
    assert {"m.room.create", "m.room.member"} <= shown
    await bob.act(room, "leave")
    await until_membership(alice, room, bob, "leave")
    await alice.act(room, "invite", bob)
    await bob.act(room, "join")
    await settled(room, alice, bob)
    assert await state_of(alice, room) == await state_of(bob, room)
    await bob.act(room, "leave")
    await until_membership(alice, room, bob, "leave")
