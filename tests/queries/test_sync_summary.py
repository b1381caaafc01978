"""Summaries of rooms, members loaded lazily, and filters of the state."""

import storage
from storage import EventFilter, RoomSummary, Store, SyncFilter, UserId
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room

LAZY = SyncFilter(lazy_load_members=True)


def called(joined: int, invited: int, heroes: tuple[str, ...] | None) -> RoomSummary:
    return RoomSummary(joined, invited, None if heroes is None else tuple(map(UserId, heroes)))


def members(events: list[storage.StoredEvent]) -> set[str]:
    return {event.state_key or "" for event in events if event.type == "m.room.member"}


async def test_a_room_without_a_name_is_called_by_its_members(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    room.invite(ADMIN, OTHER)
    await deliver(store, room)
    answer = await store.sync(LOCAL)
    assert answer.join[room.room_id].summary == called(3, 1, (ADMIN, REMOTE, OTHER))
    await append(store, room.message(ADMIN))
    answer = await store.sync(LOCAL, since=answer.next_batch)
    assert answer.join[room.room_id].summary is None
    for change, expected in (
        (room.join(OTHER), called(4, 0, (ADMIN, REMOTE, OTHER))),
        (room.name(ADMIN, "called"), called(4, 0, None)),
        (room.leave(REMOTE), called(3, 0, None)),
        (room.name(ADMIN, ""), called(3, 0, (ADMIN, OTHER))),
        (room.send(ADMIN, "m.room.canonical_alias", {"alias": "#a:s1.test"}, state_key=""), called(3, 0, None)),
        (room.send(ADMIN, "m.room.canonical_alias", {"alt_aliases": []}, state_key=""), called(3, 0, (ADMIN, OTHER))),
    ):
        await append(store, change)
        since = answer.next_batch
        answer = await store.sync(LOCAL, since=since)
        assert answer.join[room.room_id].summary == expected
        assert await store.sync(LOCAL, since=since) == answer


async def test_heroes_are_five_and_those_who_left_if_nobody_else_is_there(store: Store) -> None:
    many = new_room(members=[f"@member{number}:s2.test" for number in range(7)])
    many.join(LOCAL)
    alone = new_room(seed=1, members=[LOCAL, REMOTE])
    alone.kick(ADMIN, REMOTE)
    alone.leave(ADMIN)
    for room in (many, alone):
        await deliver(store, room)
    answer = await store.sync(LOCAL)
    assert answer.join[many.room_id].summary == called(9, 0, (ADMIN, *(f"@member{number}:s2.test" for number in range(4))))
    assert answer.join[alone.room_id].summary == called(1, 0, (REMOTE, ADMIN))


async def test_a_part_of_an_initial_sync_has_the_summary_of_its_position(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(2)]
    for room in rooms:
        await deliver(store, room)
    first = await store.sync(LOCAL, rooms_limit=1)
    await append(store, rooms[0].join(REMOTE), rooms[0].name(ADMIN, "named"))
    second = await store.sync(LOCAL, since=first.next_rooms, rooms_limit=1)
    assert second.join[rooms[0].room_id].summary == called(2, 0, (ADMIN,))
    third = await store.sync(LOCAL, since=second.next_batch)
    assert third.join[rooms[0].room_id].summary == called(3, 0, None)


async def test_members_are_loaded_lazily(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER, *(f"@member{number}:s2.test" for number in range(9)), REMOTE])
    before = set(room.state)
    room.message(REMOTE, "first")
    kick = room.kick(ADMIN, "@member3:s2.test")
    await deliver(store, room)
    answer = await store.sync(LOCAL, filter=LAZY, timeline_limit=2)
    told = answer.join[room.room_id]
    assert members(told.state) == members(told.state_after) == {ADMIN, LOCAL, REMOTE, "@member3:s2.test"}
    assert kick.event_id in ids(told.state_after)
    assert kick.event_id not in ids(told.state)
    assert {(event.type, event.state_key) for event in told.state if event.type != "m.room.member"} == {
        key for key in before if key[0] != "m.room.member"
    }
    gone, speaks = room.leave("@member5:s2.test"), room.message(OTHER, "second")
    await append(store, gone, speaks)
    told = (await store.sync(LOCAL, since=answer.next_batch, filter=LAZY, timeline_limit=1)).join[room.room_id]
    assert members(told.state) == members(told.state_after) == {LOCAL, OTHER, "@member5:s2.test"}
    assert gone.event_id in ids(told.state)
    told = (await store.sync(LOCAL, since=answer.next_batch, timeline_limit=1)).join[room.room_id]
    assert members(told.state) == {"@member5:s2.test"}


async def test_filters_of_the_state(store: Store) -> None:
    room = new_room(members=[LOCAL], name="the name")
    room.message(ADMIN)
    await deliver(store, room)
    picked = SyncFilter(state=EventFilter(types=["m.room.name", "m.room.m*"], not_senders=[LOCAL]))
    told = (await store.sync(LOCAL, filter=picked, timeline_limit=1)).join[room.room_id]
    assert {(event.type, event.state_key) for event in told.state} == {("m.room.name", ""), ("m.room.member", ADMIN)}
    assert ids(told.state) == ids(told.state_after)
