"""`responses.room_state` and `hierarchy`: what a user may read of a room, and odd requests."""

from typing import Any

import pytest

from storage import AuthDenied, InputError, Store, responses
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, deliver, ids, new_room

NAME = ("m.room.name", "")


def room_of_a_knock() -> RoomBuilder:
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN, history_visibility="shared", name="secret", join_rule="knock")
    room.knock(LOCAL)
    return room


@pytest.mark.parametrize("how", ["invite", "kick", "ban", "knock", "rejected knock"])
async def test_a_user_who_was_never_in_the_room_has_no_state(store: Store, how: str) -> None:
    room = new_room(name="secret") if "knock" not in how else room_of_a_knock()
    if how in ("invite", "kick"):
        room.invite(ADMIN, LOCAL)
    if how in ("kick", "rejected knock"):
        room.kick(ADMIN, LOCAL)
    if how == "ban":
        room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    with pytest.raises(AuthDenied, match="was never in"):
        await responses.room_state(store, LOCAL, room.room_id)


async def test_a_later_ban_or_invite_shows_no_more_state(store: Store) -> None:
    room = new_room(name="before", members=[LOCAL])
    leave = room.leave(LOCAL)
    expected = {**leave.state_before, ("m.room.member", LOCAL): leave.event_id}
    room.name(ADMIN, "after")
    await deliver(store, room)
    assert await responses.room_state(store, LOCAL, room.room_id) == expected
    room.invite(ADMIN, LOCAL)
    room.kick(ADMIN, LOCAL)
    room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    assert await responses.room_state(store, LOCAL, room.room_id) == expected
    [name] = (await store.events([expected[NAME]])).values()
    assert name.json["content"] == {"name": "before"}
    await store.forget(LOCAL, room.room_id)
    with pytest.raises(AuthDenied):
        await responses.room_state(store, LOCAL, room.room_id)
    room.kick(ADMIN, LOCAL)
    room.join(LOCAL)
    await deliver(store, room)
    found = await responses.room_state(store, LOCAL, room.room_id)
    assert found[NAME] == ids(one for one in room.events if one.type == NAME[0])[-1]


@pytest.mark.parametrize(
    "request_",
    [{"from_": "9" * 5_000}, {"from_": 5}, {"from_": ""}, {"from_": "-1"}, {"limit": 0}],
    ids=["long", "number", "empty", "negative", "nothing"],
)
async def test_an_odd_page_of_a_hierarchy(store: Store, request_: dict[str, Any]) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    with pytest.raises(InputError, match=r"^(from|limit) "):
        await responses.hierarchy(store, LOCAL, room.room_id, **request_)


@pytest.mark.parametrize("membership", ["join", "invite", None])
async def test_the_restricted_rooms_of_a_space(store: Store, membership: str | None) -> None:
    """A member of the space may join its rooms, so they see them. An invited user may not."""
    space, child = new_room(seed=1, content={"type": "m.space"}), RoomBuilder("11", seed=2)
    child.start(ADMIN)
    child.join_rules(ADMIN, "restricted", allow=["!other:s1.test", space.room_id])
    space.state_event(ADMIN, "m.space.child", {"via": ["s1.test"]}, child.room_id)
    if membership is not None:
        space.member(ADMIN if membership == "invite" else LOCAL, LOCAL, membership)
    for room in (space, child):
        await deliver(store, room)
    found = await responses.hierarchy(store, LOCAL, space.room_id)
    seen = [space.room_id, child.room_id] if membership == "join" else [space.room_id]
    assert [one["room_id"] for one in found["rooms"]] == seen
