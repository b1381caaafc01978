"""Timelines: limits that grow, rooms that fall out of a window, live events, bump stamps."""

import storage
from storage import Store
from storage.ids import UserId
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room
from tests.sliding.client import SlidingClient


async def many_rooms(store: Store, count: int) -> list[RoomBuilder]:
    """Rooms of LOCAL, the first one with the latest activity."""
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(count)]
    for room in reversed(rooms):
        await deliver(store, room)
    return rooms


async def test_more_events_than_the_limit_are_limited(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), limit=3)
    new = [room.message(ADMIN, str(number)) for number in range(5)]
    await append(store, *new)
    shown = (await client.sync((0, 19), limit=3)).rooms[room.room_id]
    assert ids(shown.timeline) == ids(new[-3:])
    assert (shown.limited, shown.num_live, shown.initial) == (True, 3, False)
    page = await store.messages(room.room_id, LOCAL, from_=shown.prev_batch, limit=2)
    assert ids(page.chunk) == ids(reversed(new[:2]))


async def test_a_limit_that_grows_sends_earlier_events_at_once(store: Store) -> None:
    room = new_room(members=[LOCAL])
    messages = [room.message(ADMIN, str(number)) for number in range(6)]
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    first = (await client.sync((0, 19), limit=2)).rooms[room.room_id]
    assert (ids(first.timeline), first.expanded_timeline) == (ids(messages[-2:]), False)
    grown = (await client.sync((0, 19), limit=4)).rooms[room.room_id]
    assert ids(grown.timeline) == ids(messages[-4:])
    assert (grown.expanded_timeline, grown.initial, grown.num_live) == (True, False, 0)
    assert (await client.sync((0, 19), limit=4)).rooms == {}
    assert (await client.sync((0, 19), limit=1)).rooms == {}
    assert (await client.sync((0, 19), limit=4)).rooms == {}, "the client has these"


async def test_a_limit_that_grows_with_a_new_event_counts_that_as_live(store: Store) -> None:
    room = new_room(members=[LOCAL])
    messages = [room.message(ADMIN, str(number)) for number in range(6)]
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), limit=1)
    new = room.message(ADMIN, "new")
    await append(store, new)
    shown = (await client.sync((0, 19), limit=3)).rooms[room.room_id]
    assert ids(shown.timeline) == ids([*messages[-2:], new])
    assert (shown.expanded_timeline, shown.num_live) == (True, 1)


async def test_a_limited_response_forgets_what_the_client_had_before(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), limit=5)
    new = [room.message(ADMIN, str(number)) for number in range(9)]
    await append(store, *new)
    assert (await client.sync((0, 19), limit=2)).rooms[room.room_id].limited
    shown = (await client.sync((0, 19), limit=5)).rooms[room.room_id]
    assert (ids(shown.timeline), shown.expanded_timeline) == (ids(new[-5:]), True)


async def test_a_client_that_has_the_whole_room_needs_no_more(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    assert not (await client.sync((0, 19), limit=50)).rooms[room.room_id].limited
    assert (await client.sync((0, 19), limit=100)).rooms == {}


async def test_a_room_outside_the_window_returns_with_all_that_it_missed(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    client = SlidingClient(store, LOCAL)
    assert set((await client.sync((0, 1))).rooms) == {first.room_id, second.room_id}
    missed = second.message(ADMIN, "missed")
    await append(store, missed)
    await append(store, first.message(ADMIN, "on top"))
    assert set((await client.sync((0, 0))).rooms) == {first.room_id}
    assert (await client.sync((0, 0))).rooms == {}
    also = second.message(ADMIN, "also")
    await append(store, also)
    shown = (await client.sync((0, 0))).rooms[second.room_id]
    assert ids(shown.timeline) == ids([missed, also])
    assert (shown.initial, shown.num_live, shown.limited) == (False, 1, False)
    last = second.message(ADMIN, "last")
    await append(store, last)
    assert ids((await client.sync((0, 0))).rooms[second.room_id].timeline) == ids([last])


async def test_a_growing_window_sends_the_new_rooms_alone(store: Store) -> None:
    rooms = await many_rooms(store, 6)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 1), limit=1)
    assert set(answer.rooms) == {room.room_id for room in rooms[:2]}
    assert answer.lists["all"].count == 6
    answer = await client.sync((0, 3), limit=1)
    assert set(answer.rooms) == {room.room_id for room in rooms[2:4]}
    assert all(room.initial for room in answer.rooms.values())
    answer = await client.sync((0, 0), (4, 9), limit=1)
    assert set(answer.rooms) == {room.room_id for room in rooms[4:]}


async def test_a_subscription_has_a_room_outside_of_all_windows(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    foreign = new_room(seed=9)
    await deliver(store, foreign)
    client = SlidingClient(store, LOCAL)
    wanted = [second.room_id, foreign.room_id, "!none:s1.test"]
    answer = await client.sync((0, 0), subscriptions=wanted)
    assert set(answer.rooms) == {first.room_id, second.room_id}
    assert answer.rooms[second.room_id].lists == ()


async def test_the_bump_stamp_is_that_of_the_last_message(store: Store) -> None:
    room = new_room(members=[LOCAL])
    message = room.message(ADMIN, "one")
    await deliver(store, room)
    await append(store, room.topic(ADMIN, "nothing to notice"))
    client = SlidingClient(store, LOCAL)
    shown = (await client.sync((0, 19), limit=1)).rooms[room.room_id]
    stored = await store.event(message.event_id)
    assert stored is not None
    assert shown.bump_stamp == stored.stream_ordering


async def test_events_of_ignored_users_are_left_out(store: Store) -> None:
    room = new_room(members=[LOCAL])
    room.message(ADMIN, "ignored")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 19), limit=1, ignored=[UserId(ADMIN)])
    assert [event.type for event in answer.rooms[room.room_id].timeline] == ["m.room.member"]


async def test_a_large_limit_is_reduced(dsn: str) -> None:
    config = storage.Config(page_limit_max=2)
    async with storage.open(dsn, server_name="s1.test", config=config) as store:
        room = new_room(members=[LOCAL])
        await deliver(store, room)
        client = SlidingClient(store, LOCAL)
        shown = (await client.sync((0, 19), limit=100)).rooms[room.room_id]
        assert (ids(shown.timeline), shown.limited) == (ids(room.events[-2:]), True)
        assert (await client.sync((0, 19), limit=1000)).rooms == {}
