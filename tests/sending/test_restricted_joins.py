"""Restricted joins: the engine checks the condition, and names the user that authorises."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from storage import Store
from storage.errors import AuthDenied, InvalidEvent
from storage.event import sign
from storage.ids import RoomId
from storage.testing import signing_key
from tests.sending.stores import ALICE, BOB, CAROL, PUBLIC, REMOTE, joined, opened

pytestmark = pytest.mark.every_postgres

AUTHORISER = "join_authorised_via_users_server"
JOIN = {"membership": "join"}


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with opened(dsn) as store:
        yield store


@pytest.fixture
async def space(store: Store) -> RoomId:
    """Bob is joined, Carol is not."""
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    await joined(store, room_id, BOB)
    return room_id


def rule(space: RoomId, name: str = "restricted", **more: Any) -> tuple[str, str, dict[str, Any]]:
    allow = [{"type": "m.room_membership", "room_id": space, **more}]
    return "m.room.join_rules", "", {"join_rule": name, "allow": allow}


async def join_template(store: Store, room_id: RoomId, user: str, **content: Any) -> dict[str, Any]:
    made = await store.template(room_id, user, "m.room.member", {**JOIN, **content}, state_key=user)
    return dict(made["content"])


@pytest.mark.parametrize(
    "version, name",
    [("8", "restricted"), ("10", "knock_restricted"), ("11", "restricted"), ("12", "restricted")],
)
async def test_a_member_of_an_allowed_room_joins(
    store: Store, space: RoomId, version: str, name: str
) -> None:
    room_id = await store.create_room(
        ALICE, room_version=version, initial_state=[rule(space, name)]
    )
    assert (await join_template(store, room_id, BOB))[AUTHORISER] == ALICE
    sent = await store.send(room_id, BOB, "m.room.member", JOIN, state_key=BOB)
    assert sent.outcome == "stored"
    event = await store.event((await store.current_state(room_id))["m.room.member", BOB])
    assert event is not None
    assert event.content == {**JOIN, AUTHORISER: ALICE}
    state = await store.state_before(event.event_id)
    assert state["m.room.member", ALICE] in event.json["auth_events"]


async def test_others_need_an_invite(store: Store, space: RoomId) -> None:
    room_id = await store.create_room(ALICE, initial_state=[rule(space)])
    for user in (CAROL, REMOTE):
        with pytest.raises(AuthDenied, match=r"member\.join\.not_allowed"):
            await join_template(store, room_id, user)
    await store.send(room_id, ALICE, "m.room.member", {"membership": "invite"}, state_key=CAROL)
    assert await join_template(store, room_id, CAROL) == JOIN
    await joined(store, room_id, CAROL)
    assert await join_template(store, room_id, CAROL, displayname="C") == {
        **JOIN,
        "displayname": "C",
    }


async def test_a_remote_member_of_an_allowed_room_gets_a_template(
    store: Store, space: RoomId
) -> None:
    """While this server is in that room: afterwards it cannot know the members."""
    made = await store.template(space, REMOTE, "m.room.member", JOIN, state_key=REMOTE)
    [result] = await store.append([sign(made, "12", "s2.test", signing_key("s2.test"))])
    assert result.outcome == "stored"
    room_id = await store.create_room(ALICE, initial_state=[rule(space)])
    assert (await join_template(store, room_id, REMOTE))[AUTHORISER] == ALICE
    for user in (BOB, ALICE):
        await store.send(space, user, "m.room.member", {"membership": "leave"}, state_key=user)
    with pytest.raises(AuthDenied, match=r"member\.join\.cannot_check"):
        await join_template(store, room_id, REMOTE)


async def test_a_condition_that_is_not_known_allows_nobody(store: Store, space: RoomId) -> None:
    restricted = {"join_rule": "restricted"}
    for one, expected in (
        (rule(space, type="other"), "not_allowed"),
        (rule(RoomId("!unknown")), "cannot_check"),
        (("m.room.join_rules", "", {**restricted, "allow": space}), "not_allowed"),
        (("m.room.join_rules", "", {**restricted, "allow": [{"room_id": "\0"}]}), "not_allowed"),
    ):
        room_id = await store.create_room(ALICE, initial_state=[one])
        with pytest.raises(AuthDenied, match=rf"member\.join\.{expected}"):
            await join_template(store, room_id, BOB)


@pytest.mark.parametrize("version", ["11", "12"])
async def test_the_authorising_user_is_joined_and_may_invite(
    store: Store, space: RoomId, version: str
) -> None:
    users = {CAROL: 60} if version == "12" else {ALICE: 100, CAROL: 60}
    levels = {"users": users, "invite": 50}
    room_id = await store.create_room(
        ALICE,
        room_version=version,
        initial_state=[rule(space), ("m.room.power_levels", "", levels)],
    )
    assert (await join_template(store, room_id, BOB))[AUTHORISER] == ALICE
    await store.send(room_id, ALICE, "m.room.member", {"membership": "invite"}, state_key=CAROL)
    await joined(store, room_id, CAROL)
    assert (await join_template(store, room_id, BOB))[AUTHORISER] == ALICE
    await store.send(room_id, ALICE, "m.room.member", {"membership": "leave"}, state_key=ALICE)
    assert (await join_template(store, room_id, BOB))[AUTHORISER] == CAROL
    await store.send(room_id, CAROL, "m.room.member", {"membership": "leave"}, state_key=CAROL)
    with pytest.raises(AuthDenied, match=r"member\.join\.no_authoriser"):
        await join_template(store, room_id, BOB)


async def test_any_member_authorises_where_everybody_may_invite(
    store: Store, space: RoomId
) -> None:
    """Nobody with a level of their own is left."""
    room_id = await store.create_room(ALICE, room_version="11", initial_state=[rule(space)])
    await store.send(room_id, ALICE, "m.room.member", {"membership": "invite"}, state_key=CAROL)
    await joined(store, room_id, CAROL)
    await store.send(room_id, ALICE, "m.room.member", {"membership": "leave"}, state_key=ALICE)
    assert (await join_template(store, room_id, BOB))[AUTHORISER] == CAROL


async def test_a_client_names_nobody(store: Store, space: RoomId) -> None:
    """It could name any user who may invite, and so enter; or one whose server does not sign."""
    room_id = await store.create_room(ALICE, initial_state=[rule(space)])
    with pytest.raises(InvalidEvent, match="no user id"):
        await join_template(store, room_id, BOB, **{AUTHORISER: 1})
    for named in (ALICE, BOB, REMOTE):
        with pytest.raises(AuthDenied, match=r"member\.join\.not_allowed"):
            await join_template(store, room_id, CAROL, **{AUTHORISER: named})
        assert (await join_template(store, room_id, BOB, **{AUTHORISER: named}))[
            AUTHORISER
        ] == ALICE
    await store.send(room_id, ALICE, "m.room.member", {"membership": "invite"}, state_key=CAROL)
    assert await join_template(store, room_id, CAROL, **{AUTHORISER: REMOTE}) == JOIN
    public = await store.create_room(ALICE, initial_state=[PUBLIC])
    assert await join_template(store, public, CAROL, **{AUTHORISER: REMOTE}) == JOIN


async def test_a_banned_user_is_told_so(store: Store, space: RoomId) -> None:
    room_id = await store.create_room(ALICE, initial_state=[rule(space)])
    for user in (BOB, CAROL):
        await store.send(room_id, ALICE, "m.room.member", {"membership": "ban"}, state_key=user)
        with pytest.raises(AuthDenied, match=r"member\.join\.banned"):
            await join_template(store, room_id, user)


async def test_rooms_without_a_restricted_rule_name_nobody(store: Store, space: RoomId) -> None:
    for version, one in (("7", PUBLIC), ("9", PUBLIC), ("7", rule(space)), ("9", rule(space, "x"))):
        room_id = await store.create_room(ALICE, room_version=version, initial_state=[one])
        if one is PUBLIC:
            assert await join_template(store, room_id, BOB) == JOIN
        else:
            for user in (BOB, CAROL):
                with pytest.raises(AuthDenied, match=r"member\.join\.join_rule"):
                    await join_template(store, room_id, user)
