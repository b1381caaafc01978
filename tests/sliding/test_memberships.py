"""Invites, knocks, leaves, kicks and bans, and how a user returns."""

from storage import Store
from storage.ids import UserId
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, deliver, ids, new_room
from tests.sliding.client import EVERYTHING, SlidingClient, state_of


async def test_an_invite_has_stripped_state_and_nothing_else(store: Store) -> None:
    room = new_room(members=[OTHER], name="first")
    invite = room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, shown.timeline, shown.required_state) == ("invite", (), ())
    assert shown.stripped_state is not None
    assert {event["type"] for event in shown.stripped_state} >= {"m.room.member", "m.room.name"}
    assert shown.name is None
    stored = await store.event(invite.event_id)
    assert stored is not None
    assert shown.bump_stamp == stored.stream_ordering
    await append(store, room.message(ADMIN, "not for them"))
    assert (await client.sync((0, 19), required=EVERYTHING)).rooms == {}
    await append(store, room.join(LOCAL))
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, shown.initial, shown.name) == ("join", True, "first")
    assert shown.stripped_state is None
    assert len(shown.required_state) == len(room.state)


async def test_the_invite_of_an_ignored_user_is_left_out(store: Store) -> None:
    room = new_room()
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    assert (await client.sync((0, 19), ignored=[UserId(ADMIN)])).rooms == {}
    assert set((await client.sync((0, 19))).rooms) == {room.room_id}


async def test_a_rejected_invite_is_returned_to_a_client_that_had_it(store: Store) -> None:
    room = new_room()
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    client, other = SlidingClient(store, LOCAL), SlidingClient(store, LOCAL, conn_id="other")
    await client.sync((0, 19))
    await append(store, room.leave(LOCAL))
    shown = (await client.sync((0, 19))).rooms[room.room_id]
    assert shown.membership == "leave"
    assert shown.stripped_state is not None
    assert [event["type"] for event in shown.stripped_state] == ["m.room.member"]
    assert (await client.sync((0, 19))).rooms == {}
    assert (await other.sync((0, 19))).rooms == {}


async def test_a_user_who_leaves_gets_the_room_up_to_that(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client, other = SlidingClient(store, LOCAL), SlidingClient(store, LOCAL, conn_id="other")
    await client.sync((0, 19), required=EVERYTHING)
    last, leave = room.message(ADMIN, "last"), room.leave(LOCAL)
    await append(store, last, leave, room.name(ADMIN, "secret"), room.message(ADMIN, "secret"))
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, shown.initial) == ("leave", False)
    assert ids(shown.timeline) == ids([last, leave])
    assert (state_of(shown), shown.name, shown.joined_count) == (
        {("m.room.member", LOCAL)},
        None,
        None,
    )
    assert (await client.sync((0, 19), required=EVERYTHING)).rooms == {}
    assert (await other.sync((0, 19))).rooms == {}, "who left knows"


async def test_state_that_is_required_after_a_leave_is_that_of_the_leave(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19))
    await append(store, room.leave(LOCAL), room.name(ADMIN, "secret"))
    await client.sync((0, 19))
    shown = (await client.sync((0, 19), required=[("m.room.name", "")])).rooms[room.room_id]
    assert [event.content["name"] for event in shown.required_state] == ["first"]


async def test_a_kicked_user_gets_the_room_on_each_connection(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    kick = room.kick(ADMIN, LOCAL)
    room.name(ADMIN, "secret")
    room.message(ADMIN, "secret")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, shown.initial, shown.name) == ("leave", True, "first")
    assert shown.timeline[-1].event_id == kick.event_id
    names = [event for event in shown.required_state if event.type == "m.room.name"]
    assert [event.content["name"] for event in names] == ["first"]
    await append(store, room.ban(ADMIN, LOCAL))
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, state_of(shown), shown.name) == ("ban", set(), None)


async def test_a_ban_of_a_user_who_never_joined_is_not_listed(store: Store) -> None:
    room = new_room()
    room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 19), subscriptions=[room.room_id])
    assert (answer.rooms, answer.lists["all"].count) == ({}, 0)


async def test_a_user_who_returns_gets_the_whole_room(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19))
    await append(store, room.leave(LOCAL))
    await client.sync((0, 19))
    room.message(ADMIN, "meanwhile")
    room.join(LOCAL)
    await deliver(store, room)
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.membership, shown.initial) == ("join", True)
    assert len(shown.required_state) == len(room.state)


async def test_a_room_of_two_has_heroes_and_is_direct(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    await store.account_data.set(UserId(LOCAL), "m.direct", {ADMIN: [room.room_id]})
    client = SlidingClient(store, LOCAL)
    shown = (await client.sync((0, 19))).rooms[room.room_id]
    assert shown.heroes is not None
    assert [hero.user_id for hero in shown.heroes] == [ADMIN]
    assert (shown.is_dm, shown.name) == (True, None)
    assert shown.changed == {"heroes", "is_dm", "counts"}
    await store.account_data.set(UserId(LOCAL), "m.direct", {})
    shown = (await client.sync((0, 19))).rooms[room.room_id]
    assert (shown.is_dm, shown.timeline, shown.initial) == (False, [], False)
    assert (await client.sync((0, 19))).rooms == {}


async def test_a_name_that_is_removed_is_none(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    assert (await client.sync((0, 19))).rooms[room.room_id].heroes is None
    await append(store, room.name(ADMIN, ""))
    shown = (await client.sync((0, 19))).rooms[room.room_id]
    assert (shown.name, "name" in shown.changed) == (None, True)
    assert shown.heroes is not None


async def test_a_former_member_with_an_invite_gets_stripped_state(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=EVERYTHING)
    await append(store, room.kick(ADMIN, LOCAL), room.name(ADMIN, "second"))
    await append(store, room.invite(ADMIN, LOCAL))
    for one in (client, SlidingClient(store, LOCAL, conn_id="new")):
        shown = (await one.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
        assert (shown.membership, shown.timeline, shown.required_state) == ("invite", (), ())
        assert shown.stripped_state
    await append(store, room.join(LOCAL))
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert (shown.initial, shown.name, len(shown.required_state)) == (
        True,
        "second",
        len(room.state),
    )


async def test_an_invite_becomes_direct(store: Store, statements: StatementLog) -> None:
    room = new_room()
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    assert (await client.sync((0, 19))).rooms[room.room_id].is_dm is None
    await store.account_data.set(UserId(LOCAL), "m.direct", {ADMIN: [room.room_id]})
    assert (await client.sync((0, 19))).rooms[room.room_id].is_dm is True
    statements.sent.clear()
    assert (await client.sync((0, 19))).rooms == {}
    assert not any("visibility_of" in one for one in statements.take()), "it reads no timeline"
