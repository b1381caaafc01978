"""`responses.room_state` and `hierarchy`: what a user may read of a room, and odd requests."""

from typing import Any

import pytest

from storage import AuthDenied, InputError, RoomId, Store, UnknownRoom, responses
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, append, deliver, ids, new_room

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


@pytest.mark.parametrize("how", ["nothing", "invite", "ban", "knock", "forgotten"])
@pytest.mark.parametrize("visibility", ["world_readable", "shared", "invited", "joined"])
async def test_a_stranger_reads_the_state_that_they_may_see(
    store: Store, visibility: str, how: str
) -> None:
    """Client-server API, "Room history visibility": everybody, or the invited users."""
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN, history_visibility=visibility, name="shown", join_rule="knock")
    if how == "forgotten":
        room.invite(ADMIN, LOCAL)
        room.kick(ADMIN, LOCAL)
    elif how != "nothing":
        getattr(room, how)(*([LOCAL] if how == "knock" else [ADMIN, LOCAL]))
    await deliver(store, room)
    if how == "forgotten":
        await store.forget(LOCAL, room.room_id)
    if visibility == "world_readable" or (visibility, how) == ("invited", "invite"):
        assert await responses.room_state(store, LOCAL, room.room_id) == dict(room.state)
    else:
        with pytest.raises(AuthDenied, match="was never in"):
            await responses.room_state(store, LOCAL, room.room_id)


async def test_a_stranger_reads_no_state_once_the_room_is_closed(store: Store) -> None:
    room = new_room(visibility="world_readable")
    await deliver(store, room)
    assert NAME not in await responses.room_state(store, LOCAL, room.room_id)
    room.history_visibility(ADMIN, "shared")
    await deliver(store, room)
    with pytest.raises(AuthDenied, match="was never in"):
        await responses.room_state(store, LOCAL, room.room_id)
    with pytest.raises(UnknownRoom):
        await responses.room_state(store, LOCAL, RoomId("!none:s1.test"))


async def test_a_former_member_of_a_world_readable_room_reads_the_state_of_their_leave(
    store: Store,
) -> None:
    """GET /state: "If the user has left the room", the state of when they left."""
    room = new_room(visibility="world_readable", name="before", members=[LOCAL])
    leave = room.leave(LOCAL)
    room.name(ADMIN, "after")
    await deliver(store, room)
    expected = {**leave.state_before, ("m.room.member", LOCAL): leave.event_id}
    assert await responses.room_state(store, LOCAL, room.room_id) == expected
    await store.forget(LOCAL, room.room_id)
    assert await responses.room_state(store, LOCAL, room.room_id) == dict(room.state)


async def test_an_invite_out_of_band_shows_the_state_of_the_last_leave(store: Store) -> None:
    """It ends the forgetting. The state here is older than the invite: it shows no more."""
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, history_visibility="invited")
    room.join(LOCAL)
    leave = room.leave(LOCAL)
    room.name(REMOTE, "after")
    await deliver(store, room)
    await store.forget(LOCAL, room.room_id)
    with pytest.raises(AuthDenied):
        await responses.room_state(store, LOCAL, room.room_id)
    room.message(REMOTE, "nobody of the other server is here")
    assert await append(store, room.invite(REMOTE, LOCAL), origin="out_of_band") == ["stored"]
    assert await store.memberships_of(LOCAL, ["invite"]) == {room.room_id: "invite"}
    expected = {**leave.state_before, ("m.room.member", LOCAL): leave.event_id}
    assert await responses.room_state(store, LOCAL, room.room_id) == expected


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
