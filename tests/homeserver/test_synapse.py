"""Synapse, a server that others wrote, in one room with the example, over federation.

One process of each serves all tests. STORAGE_EXAMPLES=20 repeats the random test with 20 seeds.
"""

import asyncio
import os
from typing import Final

import pytest

from tests.homeserver.agreement import (
    agree,
    difference,
    has,
    history,
    settled,
    until,
    until_membership,
)
from tests.homeserver.conftest import World
from tests.homeserver.processes import ErrorResponse, User
from tests.homeserver.scenario import VISIBILITY, Scenario, begun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("homeserver"),
    pytest.mark.asyncio(loop_scope="module"),
]

SEEDS: Final = int(os.environ.get("STORAGE_EXAMPLES", "1"))
STEPS: Final = 15
VERSIONS: Final = ("11", "12", *map(str, range(1, 11)))


async def test_it_joins_our_room(world: World) -> None:
    alice, sid = world.alice, world.sid
    room = await alice.create_room(preset="public_chat", name="The pantry")
    before = await alice.send(room, "before the join")
    await sid.join(room, alice)
    assert before in await history(sid, room)
    await settled(room, alice, sid)
    await agree(world.dsn, room, alice, sid)


@pytest.mark.parametrize("version", VERSIONS)
async def test_we_join_its_room(world: World, version: str) -> None:
    scenario = await begun(world, version)
    await scenario.fork()
    for user, inviter in ((world.anna, world.sid), (world.sue, world.alice)):
        await scenario.enter(user, inviter)
    await scenario.fork(1)
    await scenario.lose(world.ours, world.sid, 3)
    await scenario.remove(world.sue, "leave", world.sue)
    await scenario.remove(world.anna, "kick", world.sid)
    await scenario.say(world.sid)
    await _see_the_same_until_they_left(world, scenario.room)
    await world.alice.act(scenario.room, "ban", world.sue)
    await scenario.settle()
    await world.sid.act(scenario.room, "ban", world.anna)
    await scenario.agree()


async def _see_the_same_until_they_left(world: World, room: str) -> None:
    """Each sees what came until the own leave, on a server of ours and of theirs."""
    whole = await history(world.alice, room)
    for user in (world.anna, world.sue):
        seen = await history(user, room)
        last = list(seen)[-1]
        assert seen[last]["state_key"] == user.user_id
        assert seen[last]["content"]["membership"] == "leave"
        before = {one: whole[one] for one in list(whole)[: list(whole).index(last) + 1]}
        assert seen.keys() == before.keys(), difference(seen, before)


async def test_hidden_history(world: World) -> None:
    """With the visibility "joined", a message is visible to those who were in the room then."""
    scenario = await begun(world, "11")
    room, (alice, sid) = scenario.room, scenario.first
    await scenario.settle()
    await sid.state(room, VISIBILITY, {"history_visibility": "joined"})
    await scenario.settle()
    hidden = [await scenario.say(alice), await scenario.say(sid)]
    for user, inviter in ((world.anna, sid), (world.sue, alice)):
        await scenario.enter(user, inviter)
    shown = [await scenario.say(alice), await scenario.say(sid)]
    await scenario.settle()
    for user in (world.anna, world.sue):
        seen = await history(user, room)
        assert not seen.keys() & set(hidden)
        assert set(shown) <= seen.keys()
    await scenario.agree()


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_invite_is_refused_or_ended(world: World, version: str) -> None:
    """Invites to users of a server that is not in the room, both ways."""
    for inviter, user in ((world.alice, world.sid), (world.sid, world.alice)):
        room = await inviter.create_room(preset="private_chat", room_version=version)
        await inviter.act(room, "invite", user)
        await until(_is_invited, user, room)
        await user.act(room, "leave")
        assert not await _is_invited(user, room)
        await until_membership(inviter, room, user, "leave")
        await inviter.act(room, "invite", user)
        await user.join(room)
        await settled(room, inviter, user)
        await agree(world.dsn, room, inviter, user)


@pytest.mark.parametrize("version", ["11", "12"])
async def test_an_invite_is_refused_while_its_server_is_down(world: World, version: str) -> None:
    for server, inviter, user in (
        (world.theirs, world.sid, world.alice),
        (world.ours, world.alice, world.sid),
    ):
        room = await inviter.create_room(preset="private_chat", room_version=version)
        await inviter.act(room, "invite", user)
        await until(_is_invited, user, room)
        await server.kill()
        await user.act(room, "leave")
        assert not await _is_invited(user, room)
        await user.call("POST", f"/rooms/{room}/forget", {})
        await server.start()
        await inviter.act(room, "kick", user)  # here the invite is still what it was
        await inviter.act(room, "invite", user)
        await until(_is_invited, user, room)
        await user.join(room)
        await settled(room, inviter, user)
        await agree(world.dsn, room, inviter, user)


@pytest.mark.parametrize("version", [version for version in VERSIONS if int(version) > 6])
async def test_knocks(world: World, version: str) -> None:
    for host, user in ((world.alice, world.sid), (world.sid, world.alice)):
        rules = {"type": "m.room.join_rules", "content": {"join_rule": "knock"}}
        room = await host.create_room(
            preset="private_chat", initial_state=[rules], room_version=version
        )
        with pytest.raises(ErrorResponse, match=r"40[34]"):
            await user.join(room, host)
        await user.call("POST", f"/knock/{room}", {}, server_name=host.server)
        await until_membership(host, room, user, "knock")
        assert room in (await user.call("GET", "/sync"))["rooms"]["knock"]
        await host.act(room, "invite", user)
        await until(_is_invited, user, room)
        await user.join(room)
        await settled(room, host, user)
        await agree(world.dsn, room, host, user)


async def _is_invited(user: User, room: str) -> bool:
    return room in (await user.call("GET", "/sync"))["rooms"].get("invite", {})


async def test_fifty_lost_messages(world: World) -> None:
    scenario = await begun(world, "12")
    await scenario.lose(world.ours, world.sid, 50)
    await scenario.lose(world.theirs, world.alice, 50)
    await scenario.agree()


async def test_both_are_killed(world: World) -> None:
    """What one sends while the other is down arrives when it is up again."""
    scenario = await begun(world, "12")
    alice, sid = scenario.first
    await scenario.settle()
    for server, sender, reader in ((world.theirs, alice, sid), (world.ours, sid, alice)):
        killed = asyncio.create_task(server.kill())
        sent = [await scenario.say(sender) for _ in range(5)]
        await killed
        sent.append(await scenario.say(sender))
        await server.start()
        await scenario.say(reader)  # the other server notices that it is up
        for event_id in sent:
            await has(reader, scenario.room, event_id)
    await scenario.fork()
    await scenario.agree()


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_at_random(world: World, seed: int) -> None:
    scenario: Scenario = await begun(world, VERSIONS[seed % 12], seed)
    for _ in range(STEPS):
        await scenario.random_step()
    await scenario.agree()
