"""Extensions: to-device messages, account data and receipts, each new once and in its rooms."""

import orjson
import pytest

import storage
from storage import SlidingSync, Store
from storage.ids import EventId, RoomId, UserId
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, deliver, new_room
from tests.sliding.client import SlidingClient
from tests.sliding.test_timelines import many_rooms

USER = UserId(LOCAL)


def data_of(answer: SlidingSync) -> dict[tuple[str | None, str], object]:
    return {(row.room_id, row.type): orjson.loads(row.content) for row in answer.account_data}


def readers(answer: SlidingSync, room: RoomBuilder) -> set[tuple[str, str]]:
    rows = answer.receipts.get(room.room_id, ())
    return {(row.user_id, row.receipt_type) for row in rows}


async def read(store: Store, room: RoomBuilder, user: str, kind: str = "m.read") -> None:
    event = room.message(user, "read up to here")
    await append(store, event)
    await store.receipts.set(room.room_id, kind, UserId(user), event.event_id, {"ts": 1})


async def test_messages_come_once_and_in_parts(store: Store) -> None:
    for number in range(5):
        await store.to_device.send({USER: {"DEVICE": {"n": number}, "OTHER": {}}})
    client = SlidingClient(store, LOCAL)
    found: list[object] = []
    sizes = []
    for _ in range(4):
        answer = await client.sync(extensions=["to_device"], to_device_limit=2)
        sizes.append(len(answer.to_device))
        found.extend(orjson.loads(row.content)["n"] for row in answer.to_device)
    assert (found, sizes) == ([0, 1, 2, 3, 4], [2, 2, 1, 0])


@pytest.mark.parametrize("limit", [2**63 - 2, 2**63 - 1, 2**63, 2**70])
async def test_a_limit_of_messages_beyond_64_bits_is_none(store: Store, limit: int) -> None:
    for n in range(3):
        await store.to_device.send({USER: {"DEVICE": {"n": n}}})
    client = SlidingClient(store, LOCAL)
    answer = await client.sync(extensions=["to_device"], to_device_limit=limit)
    assert [orjson.loads(row.content)["n"] for row in answer.to_device] == [0, 1, 2]


async def test_messages_wait_for_a_request_with_the_extension(store: Store) -> None:
    client = SlidingClient(store, LOCAL)
    await client.sync(extensions=["to_device"])
    await store.to_device.send({USER: {"DEVICE": {"n": 1}}})
    assert (await client.sync()).is_empty
    assert (await client.sync()).is_empty
    assert len((await client.sync(extensions=["to_device"])).to_device) == 1
    assert (await client.sync(extensions=["to_device"])).is_empty


async def test_account_data_comes_once(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    await store.account_data.set(USER, "m.push", {"n": 1})
    await store.account_data.set(USER, "m.tag", {"n": 2}, room_id=room.room_id)
    await store.account_data.set(UserId(ADMIN), "m.push", {"n": 3})
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 9), extensions=["account_data"])
    assert data_of(answer) == {(None, "m.push"): {"n": 1}, (room.room_id, "m.tag"): {"n": 2}}
    assert (await client.sync((0, 9), extensions=["account_data"])).is_empty
    await store.account_data.set(USER, "m.tag", {"n": 4}, room_id=room.room_id)
    answer = await client.sync((0, 9), extensions=["account_data"])
    assert data_of(answer) == {(room.room_id, "m.tag"): {"n": 4}}
    assert answer.rooms == {}


async def test_account_data_of_a_room_waits_until_the_room_is_wanted(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 1), extensions=["account_data"])
    for number in range(2):
        content = {"n": number}
        await store.account_data.set(USER, "m.tag", content, room_id=second.room_id)
        answer = await client.sync((0, 0), extensions=["account_data"])
        assert (set(answer.rooms), data_of(answer)) == (set(), {})
    answer = await client.sync((0, 1), extensions=["account_data"])
    assert (answer.rooms, data_of(answer)) == ({}, {(second.room_id, "m.tag"): {"n": 1}})
    assert (await client.sync((0, 1), extensions=["account_data"])).is_empty
    await store.account_data.set(USER, "m.tag", {}, room_id=first.room_id)
    assert data_of(await client.sync((0, 1), extensions=["account_data"])) != {}


async def test_receipts_of_a_new_room_are_those_of_its_timeline_and_of_the_user(
    store: Store,
) -> None:
    room = new_room(members=[LOCAL, OTHER])
    await deliver(store, room)
    await read(store, room, LOCAL)
    await read(store, room, OTHER)
    await read(store, room, ADMIN)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 9), limit=1, extensions=["receipts"])
    assert readers(answer, room) == {(LOCAL, "m.read"), (ADMIN, "m.read")}


async def test_receipts_come_once_and_private_ones_to_their_owner(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 9), extensions=["receipts"])
    await read(store, room, OTHER)
    await read(store, room, OTHER, "m.read.private")
    await read(store, room, LOCAL, "m.read.private")
    answer = await client.sync((0, 9), extensions=["receipts"])
    assert readers(answer, room) == {(OTHER, "m.read"), (LOCAL, "m.read.private")}
    assert (await client.sync((0, 9), extensions=["receipts"])).is_empty


async def test_receipts_of_a_room_wait_until_the_room_is_wanted(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 1), extensions=["receipts"])
    event = EventId(second.events[-1].event_id)
    await store.receipts.set(second.room_id, "m.read", UserId(ADMIN), event, {})
    assert (await client.sync((0, 0), extensions=["receipts"])).is_empty
    answer = await client.sync((0, 1), extensions=["receipts"])
    assert (answer.rooms, readers(answer, second)) == ({}, {(ADMIN, "m.read")})
    assert (await client.sync((0, 1), extensions=["receipts"])).is_empty
    assert first.room_id != second.room_id


async def test_extensions_can_be_limited_to_lists_and_subscriptions(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    for room in (first, second):
        await store.account_data.set(USER, "m.tag", {}, room_id=room.room_id)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync(
        (0, 1), subscriptions=[second.room_id], extensions=["account_data"], extension_lists=[]
    )
    assert set(answer.rooms) == {first.room_id, second.room_id}
    assert set(data_of(answer)) == {(second.room_id, "m.tag")}
    answer = await client.sync((0, 1), extensions=["account_data"])
    assert set(data_of(answer)) == {(first.room_id, "m.tag")}


async def test_an_invited_user_gets_no_receipts(store: Store) -> None:
    room = new_room(members=[OTHER])
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    await read(store, room, OTHER)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 9), extensions=["receipts"])
    assert (set(answer.rooms), answer.receipts) == ({room.room_id}, {})


@pytest.mark.parametrize("extensions", [[], ["account_data", "receipts", "to_device"]])
async def test_two_processes_share_the_positions(
    store: Store, dsn: str, extensions: list[str]
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 9), extensions=extensions)
    async with storage.open(dsn, server_name="s1.test", instance_name="two") as other:
        await other.account_data.set(USER, "m.tag", {}, room_id=RoomId(room.room_id))
        await other.to_device.send({USER: {"DEVICE": {}}})
        await read(other, room, ADMIN)
        answer = await client.sync((0, 9), extensions=extensions)
        assert len(answer.rooms[room.room_id].timeline) == 1
        assert bool(answer.receipts) == bool(answer.account_data) == bool(extensions)
        assert len(answer.to_device) == bool(extensions)
        assert (await client.sync((0, 9), extensions=extensions)).is_empty


async def test_a_room_that_came_without_extensions_is_extended_later(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    await store.account_data.set(USER, "m.tag", {}, room_id=second.room_id)
    await read(store, second, ADMIN)
    await append(store, first.message(ADMIN, "on top"))
    client = SlidingClient(store, LOCAL)
    both = ["account_data", "receipts"]
    await client.sync((0, 0), extensions=both)
    assert set((await client.sync((0, 1))).rooms) == {second.room_id}
    answer = await client.sync((0, 1), extensions=both)
    assert readers(answer, second) == {(ADMIN, "m.read")}
    assert set(data_of(answer)) == {(second.room_id, "m.tag")}
    assert (await client.sync((0, 1), extensions=both)).is_empty


async def test_unread_counts_of_the_rooms_of_a_response(store: Store) -> None:
    room, invited = new_room(members=[LOCAL]), new_room(seed=1)
    said = [room.message(ADMIN, f"{number}") for number in range(3)]
    reply = room.threaded(ADMIN, said[0], "in the thread")
    invited.invite(ADMIN, LOCAL)
    await deliver(store, room)
    await deliver(store, invited)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 9), unread=True)
    counts = {room_id: one.unread for room_id, one in answer.rooms.items()}
    assert counts == {
        room.room_id: storage.Unread(3, {said[0].event_id: 1}),
        invited.room_id: None,
    }
    await store.receipts.set(room.room_id, "m.read", USER, reply.event_id, {})
    await append(store, room.message(ADMIN, "new"))
    answer = await client.sync((0, 9), unread=True)
    assert answer.rooms[room.room_id].unread == storage.Unread(1)
    await append(store, room.message(ADMIN, "newer"))
    answer = await client.sync((0, 9), unread=True, ignored=[UserId(ADMIN)])
    assert all(one.unread == storage.Unread(0) for one in answer.rooms.values())
    await append(store, room.message(ADMIN, "newest"))
    assert (await client.sync((0, 9))).rooms[room.room_id].unread is None
