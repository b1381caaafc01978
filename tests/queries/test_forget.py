"""A user forgets a room that they have left: what reads of it return, and how it ends."""

from typing import Any

import pytest

from storage import RoomSubscription, SlidingList, SlidingSyncRequest, Store, responses
from storage.errors import InputError, InvalidIdentifier, UnknownRoom
from storage.ids import RoomId
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room


async def left_room(store: Store, visibility: str = "shared") -> RoomBuilder:
    """A room that the user has left."""
    room = new_room(visibility=visibility, members=[LOCAL])
    room.message(ADMIN, "before")
    room.leave(LOCAL)
    await deliver(store, room)
    return room


async def test_history_is_hidden_and_comes_back(store: Store, statements: StatementLog) -> None:
    room = await left_room(store)
    said = room.events[-2].event_id
    page = await store.messages(room.room_id, LOCAL)
    assert said in ids(page.chunk)
    await store.forget(LOCAL, room.room_id)
    statements.take()
    await store.forget(LOCAL, room.room_id)
    assert len(statements.take()) == 5, "it also drops cached lists; the first time took more"
    for direction in ("b", "f"):
        found = await store.messages(room.room_id, LOCAL, direction=direction)
        assert found.chunk == []
    assert await store.visible_to_user(LOCAL, ids(room.events)) == set()
    assert await store.event_near(room.room_id, LOCAL, 0, "f") is None
    assert said in ids((await store.messages(room.room_id, ADMIN)).chunk), "of others it is not"
    assert await store.memberships_of(LOCAL, ["leave"]) == {}
    assert await store.membership(room.room_id, LOCAL) == "leave", "that of the room's state"
    room.join(LOCAL)
    await deliver(store, room)
    assert said in ids((await store.messages(room.room_id, LOCAL)).chunk)
    room.leave(LOCAL)
    await deliver(store, room)
    assert said in ids((await store.messages(room.room_id, LOCAL)).chunk)
    assert await store.memberships_of(LOCAL, ["leave"]) == {room.room_id: "leave"}


async def test_what_the_world_may_read_stays(store: Store) -> None:
    room = await left_room(store, "world_readable")
    await store.forget(LOCAL, room.room_id)
    assert room.events[-2].event_id in ids((await store.messages(room.room_id, LOCAL)).chunk)


async def test_many_visits_are_hidden_too(store: Store) -> None:
    """Their old ranges are in a table of their own."""
    room = new_room(visibility="joined", members=[LOCAL])
    for _ in range(40):
        room.message(ADMIN, "inside")
        room.leave(LOCAL)
        room.message(ADMIN, "outside")
        room.join(LOCAL)
    room.leave(LOCAL)
    await deliver(store, room)
    seen = await store.visible_to_user(LOCAL, ids(room.events))
    assert len((await store.messages(room.room_id, LOCAL, limit=1000)).chunk) == len(seen) > 100
    await store.forget(LOCAL, room.room_id)
    assert await store.visible_to_user(LOCAL, ids(room.events)) == set()
    for direction in ("b", "f"):
        found = await store.messages(room.room_id, LOCAL, limit=1000, direction=direction)
        assert found.chunk == []
    room.join(LOCAL)
    await deliver(store, room)
    assert seen < await store.visible_to_user(LOCAL, ids(room.events))


@pytest.mark.parametrize("undone_by", ["join", "invite"])
async def test_only_a_new_membership_undoes_it(store: Store, undone_by: str) -> None:
    room = await left_room(store)
    await store.forget(LOCAL, room.room_id)
    room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    assert await store.memberships_of(LOCAL, ["leave", "ban"]) == {}
    room.unban(ADMIN, LOCAL)
    await deliver(store, room)
    assert await store.memberships_of(LOCAL, ["leave", "ban"]) == {}
    if undone_by == "join":
        room.join(LOCAL)
    else:
        room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    assert await store.memberships_of(LOCAL, [undone_by]) == {room.room_id: undone_by}
    assert room.events[1].event_id in await store.visible_to_user(LOCAL, ids(room.events))
    room.kick(ADMIN, LOCAL)
    await deliver(store, room)
    assert await store.memberships_of(LOCAL, ["leave"]) == {room.room_id: "leave"}


async def test_a_visit_of_one_batch_undoes_it(store: Store) -> None:
    """Also if no write ever stored that the user was in the room."""
    room = await left_room(store)
    said = room.events[-2].event_id
    await store.forget(LOCAL, room.room_id)
    visit = [room.join(LOCAL), room.leave(LOCAL)]
    await store.append([event.pdu for event in visit])
    assert await store.memberships_of(LOCAL, ["leave"]) == {room.room_id: "leave"}
    assert said in ids((await store.messages(room.room_id, LOCAL)).chunk)


async def test_sync_returns_the_leave_once_and_nothing_later(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    inside = (await store.sync(LOCAL)).next_batch
    room.leave(LOCAL)
    await deliver(store, room)
    outside = (await store.sync(LOCAL, since=inside)).next_batch
    await store.forget(LOCAL, room.room_id)
    assert set((await store.sync(LOCAL, since=inside)).leave) == {room.room_id}
    room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    assert (await store.sync(LOCAL, since=outside)).leave == {}
    assert set((await store.sync(LOCAL, since=inside)).leave) == {room.room_id}
    assert (await store.sync(LOCAL)).leave == {}
    room.unban(ADMIN, LOCAL)
    room.join(LOCAL)
    await deliver(store, room)
    assert set((await store.sync(LOCAL, since=outside)).join) == {room.room_id}


@pytest.mark.parametrize("limit", [0, 100])
@pytest.mark.parametrize("visibility", ["shared", "world_readable"])
async def test_a_forgotten_leave_comes_without_state(
    store: Store, visibility: str, limit: int
) -> None:
    """Classic and sliding: by a list, and by a subscription."""
    room = new_room(visibility=visibility, members=[LOCAL], users={ADMIN: 100})
    await deliver(store, room)
    inside = (await store.sync(LOCAL)).next_batch
    wanted: dict[str, Any] = {"required_state": [("*", "*")], "timeline_limit": limit}
    asked = [
        SlidingSyncRequest(conn_id="list", lists={"all": SlidingList([(0, 9)], **wanted)}),
        SlidingSyncRequest(
            conn_id="named", room_subscriptions={room.room_id: RoomSubscription(**wanted)}
        ),
    ]
    slid = [await store.sliding_sync(LOCAL, one, device_id="PHONE") for one in asked]
    assert all(one.rooms[room.room_id].required_state for one in slid)
    room.topic(ADMIN, "told to nobody who has forgotten")
    room.join(OTHER)
    room.message(ADMIN, "said")
    leave = room.leave(LOCAL)
    room.name(ADMIN, "after that")
    await deliver(store, room)
    await store.forget(LOCAL, room.room_id)
    sync = await store.sync(LOCAL, since=inside, timeline_limit=limit, include=["account_data"])
    left = sync.leave[room.room_id]
    shown = {event.event_id for event in [*left.state, *left.state_after, *left.timeline.events]}
    hidden = {event.event_id for event in left.state_after} - {leave.event_id}
    assert leave.event_id in shown
    assert (hidden, left.state_removed) == (set(), [])
    assert {event.event_id for event in left.state} <= {leave.event_id}
    form = await responses.sync(store, LOCAL, sync)
    state = form["rooms"]["leave"][room.room_id]["state"]["events"]
    assert {event["event_id"] for event in state} <= {leave.event_id}
    for request, before in zip(asked, slid, strict=True):
        found = await store.sliding_sync(LOCAL, request, device_id="PHONE", pos=before.pos)
        if room.room_id in found.rooms:
            one = found.rooms[room.room_id]
            assert {event.event_id for event in one.required_state} <= {leave.event_id}
            assert one.membership != "join"
        again = await store.sliding_sync(LOCAL, request, device_id="PHONE", pos=found.pos)
        assert room.room_id not in again.rooms
    room.join(LOCAL)
    await deliver(store, room)
    for since in (inside, sync.next_batch, None):
        back = (await store.sync(LOCAL, since=since, timeline_limit=100)).join[room.room_id]
        assert {event.event_id for event in back.state_after} >= {
            event.event_id for event in room.events[-2:]
        }
    for request, before in zip(asked, slid, strict=True):
        found = await store.sliding_sync(LOCAL, request, device_id="PHONE", pos=before.pos)
        [name] = [
            one.content["name"]
            for one in found.rooms[room.room_id].required_state
            if one.type == "m.room.name"
        ]
        assert name == "after that"


async def test_a_visit_between_two_syncs_is_not_returned(store: Store) -> None:
    room = new_room()
    await deliver(store, room)
    before = (await store.sync(LOCAL)).next_batch
    room.join(LOCAL)
    room.leave(LOCAL)
    await deliver(store, room)
    assert set((await store.sync(LOCAL, since=before)).leave) == {room.room_id}
    await store.forget(LOCAL, room.room_id)
    assert (await store.sync(LOCAL, since=before)).leave == {}


async def test_an_invite_that_was_refused_can_be_forgotten(store: Store) -> None:
    """It came out of band, so no state has it."""
    room = new_room()
    assert await append(store, room.invite(ADMIN, LOCAL), origin="out_of_band") == ["stored"]
    invited = await store.sync(LOCAL)
    assert await append(store, room.leave(LOCAL), origin="out_of_band") == ["stored"]
    await store.forget(LOCAL, room.room_id)
    assert set((await store.sync(LOCAL, since=invited.next_batch)).leave) == {room.room_id}
    assert await store.memberships_of(LOCAL, ["leave"]) == {}
    assert await append(store, room.invite(ADMIN, LOCAL), origin="out_of_band") == ["stored"]
    assert await store.memberships_of(LOCAL, ["invite"]) == {room.room_id: "invite"}
    assert set((await store.sync(LOCAL)).invite) == {room.room_id}


@pytest.mark.parametrize("membership", ["join", "invite", "knock"])
async def test_a_room_must_be_left_first(store: Store, membership: str) -> None:
    room = new_room(members=[LOCAL] if membership == "join" else [])
    if membership == "invite":
        room.invite(ADMIN, LOCAL)
    if membership == "knock":
        room.join_rules(ADMIN, "knock")
        room.knock(LOCAL)
    await deliver(store, room)
    with pytest.raises(InputError, match=f"is {membership}: leave it first"):
        await store.forget(LOCAL, room.room_id)
    assert await store.memberships_of(LOCAL, [membership]) == {room.room_id: membership}


async def test_without_a_membership_there_is_nothing_to_forget(store: Store) -> None:
    room = new_room()
    await deliver(store, room)
    await store.forget(LOCAL, room.room_id)
    with pytest.raises(UnknownRoom):
        await store.forget(LOCAL, RoomId("!nowhere:s1.test"))
    with pytest.raises(InvalidIdentifier):
        await store.forget(REMOTE, room.room_id)


async def test_the_explanation_names_it(store: Store) -> None:
    room = await left_room(store)
    said = room.events[-2].event_id
    assert (await store.explain_visibility(said, LOCAL)).visible
    await store.forget(LOCAL, room.room_id)
    told = await store.explain_visibility(said, LOCAL)
    assert not told.visible
    assert told.sentence == f"{LOCAL} may not see {said}: they have forgotten the room."
    open_room = await left_room_of_the_world(store)
    assert (await store.explain_visibility(open_room.events[-2].event_id, LOCAL)).visible


async def left_room_of_the_world(store: Store) -> RoomBuilder:
    """A world-readable room that the user has forgotten."""
    room = new_room(visibility="world_readable", seed=1, members=[LOCAL])
    room.message(ADMIN, "to the world")
    room.leave(LOCAL)
    await deliver(store, room)
    await store.forget(LOCAL, room.room_id)
    return room
