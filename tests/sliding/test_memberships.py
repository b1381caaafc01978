"""Invites, knocks, leaves, kicks and bans, and how a user returns."""

import pytest

from storage import SlidingFilter, SlidingSyncRequest, Store, responses
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


@pytest.mark.parametrize("way", ["leave", "kick", "ban", "reject", "retract", "take back"])
async def test_a_room_that_is_forgotten_ends_once(store: Store, way: str) -> None:
    """Before the next request, on a connection that was sent the room and on no other."""
    pending = way in ("reject", "retract", "take back")
    room, other = new_room(members=() if pending else [LOCAL], name="first"), new_room(seed=9)
    if way == "take back":
        room.state_event(ADMIN, "m.room.join_rules", {"join_rule": "knock"})
        room.knock(LOCAL)
    elif pending:
        room.invite(ADMIN, LOCAL)
    other.join(LOCAL)
    await deliver(store, room)
    await deliver(store, other)
    client = SlidingClient(store, LOCAL)
    window = SlidingClient(store, LOCAL, conn_id="window")
    subscribed = SlidingClient(store, LOCAL, conn_id="subscribed")
    await client.sync((0, 19), required=EVERYTHING)
    await window.sync((0, 0), (1, 1))
    await subscribed.sync(subscriptions=[room.room_id])
    own = (
        room.ban(ADMIN, LOCAL)
        if way == "ban"
        else (room.kick(ADMIN, LOCAL) if way in ("kick", "retract") else room.leave(LOCAL))
    )
    await append(store, own, room.name(ADMIN, "secret"), room.message(ADMIN, "secret"))
    await append(store, other.message(ADMIN, "later"))
    await store.forget(LOCAL, room.room_id)
    before, end = client.pos, "ban" if way == "ban" else "leave"
    for _ in range(2):  # the first response is lost
        client.pos = before
        found = await client.sync((0, 19), required=EVERYTHING)
        assert set(found.rooms) == {room.room_id, other.room_id}
        assert found.lists["all"].count == 1
        ended = found.rooms[room.room_id]
        assert (ended.membership, ended.initial) == (end, True)
        assert (ended.timeline, ended.name, ended.lists) == ((), None, ())
        if pending:
            assert ended.stripped_state is not None
            assert [one["type"] for one in ended.stripped_state] == ["m.room.member"]
        else:
            assert ids(ended.required_state) == ids([own])
            request = SlidingSyncRequest()
            form = await responses.sliding_sync(store, LOCAL, request, found)
            [told] = form["rooms"][room.room_id]["required_state"]
            assert told["event_id"] == own.event_id
    for _ in range(2):
        found = await client.sync((0, 19), required=EVERYTHING, subscriptions=[room.room_id])
        assert (found.rooms, found.lists["all"].count) == ({}, 1)
    for one, ranges, rooms in ((window, [(0, 0)], []), (subscribed, [], [room.room_id])):
        found = await one.sync(*ranges, subscriptions=rooms)
        assert found.rooms[room.room_id].membership == end
        assert (await one.sync(*ranges, subscriptions=rooms)).rooms == {}
    new = SlidingClient(store, LOCAL, conn_id="new")
    found = await new.sync((0, 19), subscriptions=[room.room_id])
    assert set(found.rooms) == {other.room_id}


async def test_a_client_that_has_the_end_gets_nothing_when_the_room_is_forgotten(
    store: Store,
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19))
    await append(store, room.leave(LOCAL))
    assert (await client.sync((0, 19))).lists["all"].count == 1
    await store.forget(LOCAL, room.room_id)
    found = await client.sync((0, 19))
    assert (found.rooms, found.lists["all"].count) == ({}, 0)
    await append(store, room.join(LOCAL))
    shown = (await client.sync((0, 19))).rooms[room.room_id]
    assert (shown.membership, shown.initial) == ("join", True)


async def test_invites_of_ignored_users_leave_no_hole(store: Store) -> None:
    """Neither in a window nor in a count, with a filter or without."""
    rooms = [new_room(seed=seed) for seed in range(3, 7)]
    rooms[0].join(LOCAL)
    rooms[1].invite(ADMIN, LOCAL)
    rooms[2].join(LOCAL)
    rooms[3].invite(ADMIN, LOCAL)
    for room in rooms:
        await deliver(store, room)
    ignored = [UserId(ADMIN)]
    client = SlidingClient(store, LOCAL)
    for filters in (SlidingFilter(), SlidingFilter(is_encrypted=False)):
        client.pos = None
        found = await client.sync((0, 1), filters=filters, ignored=ignored)
        assert (set(found.rooms), found.lists["all"].count) == (
            {rooms[0].room_id, rooms[2].room_id},
            2,
        )
        found = await client.sync((0, 1), filters=filters, ignored=ignored)
        assert (found.rooms, found.lists["all"].count) == ({}, 2)
        found = await client.sync((0, 3), filters=filters)
        assert (set(found.rooms), found.lists["all"].count) == (
            {rooms[1].room_id, rooms[3].room_id},
            4,
        )
    await append(store, rooms[1].leave(LOCAL))
    found = await client.sync((0, 3), ignored=ignored)
    assert (set(found.rooms), found.lists["all"].count) == ({rooms[1].room_id}, 3)
