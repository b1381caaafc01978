"""Local users join one room at the same moment, through two stores: no join is refused."""

import asyncio
from typing import Any

import pytest

from storage import AppendResult, Store
from storage.errors import AuthDenied
from storage.event import sign
from storage.ids import RoomId
from storage.testing import signing_key
from tests.sending.stores import ALICE, BOB, PUBLIC, SERVER, joined, opened

USERS = [f"@user{number}:s1.test" for number in range(8)]


async def member(store: Store, room_id: RoomId, user: str, membership: str) -> AppendResult:
    content = {"membership": membership}
    return await store.send(room_id, user, "m.room.member", content, state_key=user)


async def room_of(store: Store, rule: str) -> RoomId:
    """A room that the users may join: they are invited, or in an allowed room."""
    if rule == "restricted":
        house = await store.create_room(ALICE, initial_state=[PUBLIC])
        await joined(store, house, *USERS)
        content = {"allow": [{"type": "m.room_membership", "room_id": house}]}
    else:
        content = {}
    rules: tuple[str, str, dict[str, Any]] = (
        "m.room.join_rules",
        "",
        {"join_rule": rule, **content},
    )
    room_id = await store.create_room(ALICE, initial_state=[rules])
    for user in USERS if rule == "invite" else ():
        invite = {"membership": "invite"}
        await store.send(room_id, ALICE, "m.room.member", invite, state_key=user)
    return room_id


@pytest.mark.parametrize("rule", ["invite", "restricted"])
async def test_all_join(dsn: str, rule: str) -> None:
    async with opened(dsn) as one, opened(dsn, "second") as other:
        room_id = await room_of(one, rule)
        stores = (one, other)
        results = await asyncio.gather(
            *(member(stores[n % 2], room_id, user, "join") for n, user in enumerate(USERS)),
            *(member(stores[n % 2], room_id, USERS[0], "join") for n in range(4)),
        )
        assert {result.outcome for result in results} == {"stored"}
        assert set(await one.member_ids(room_id)) == {ALICE, *USERS}
        assert len(await one.forward_extremities(room_id)) == 1


@pytest.mark.parametrize("rule", ["invite", "restricted"])
async def test_templates_of_the_same_moment_are_all_stored(dsn: str, rule: str) -> None:
    """As of make_join: each is signed and comes back after the others are stored."""
    async with opened(dsn) as store:
        room_id = await room_of(store, rule)
        content = {"membership": "join"}
        made = [
            await store.template(room_id, user, "m.room.member", content, state_key=user)
            for user in USERS
        ]
        pdus = [sign(one, "12", SERVER, signing_key(SERVER)) for one in made]
        outcomes = [(await store.append([pdu]))[0].outcome for pdu in pdus]
        assert set(outcomes) == {"stored"}
        assert set(await store.member_ids(room_id)) == {ALICE, *USERS}


@pytest.mark.parametrize("rule", ["invite", "restricted"])
async def test_a_change_of_the_rules_refuses_or_comes_later(dsn: str, rule: str) -> None:
    """Each join is stored whole before it, or refused by it: none is soft-failed."""
    async with opened(dsn) as one, opened(dsn, "second") as other:
        room_id = await room_of(one, rule)

        async def close() -> None:
            content = {"join_rule": "private"}
            await one.send(room_id, ALICE, "m.room.join_rules", content, state_key="")
            if rule == "invite":
                kick = {"membership": "leave"}
                for user in USERS[4:]:
                    await one.send(room_id, ALICE, "m.room.member", kick, state_key=user)

        results = await asyncio.gather(
            *(member((one, other)[n % 2], room_id, user, "join") for n, user in enumerate(USERS)),
            close(),
            return_exceptions=True,
        )
        outcomes = [
            "refused" if isinstance(result, AuthDenied) else getattr(result, "outcome", result)
            for result in results[:-1]
        ]
        assert set(outcomes) <= {"stored", "refused"}, outcomes
        assert results[-1] is None
        assert len(await one.forward_extremities(room_id)) == 1
        assert BOB not in await one.member_ids(room_id)
