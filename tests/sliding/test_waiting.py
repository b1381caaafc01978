"""The long poll: which facts end it, and that it is quiet otherwise."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from storage import SlidingSync, Store
from storage.ids import UserId
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, new_room
from tests.sliding.client import SlidingClient

LONG_MS = 60_000
ALL = ("account_data", "receipts", "to_device")


async def started(
    store: Store, client: SlidingClient, extensions: tuple[str, ...] = ALL
) -> "asyncio.Task[SlidingSync]":
    """A waiting request."""
    task = asyncio.ensure_future(client.sync((0, 0), extensions=extensions, timeout_ms=LONG_MS))
    while not store.notifier._waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return task


async def message(store: Store, room: RoomBuilder) -> None:
    await append(store, room.message(ADMIN, "new"))


async def receipt(store: Store, room: RoomBuilder) -> None:
    event = room.events[-1].event_id
    await store.receipts.set(room.room_id, "m.read", UserId(ADMIN), event, {})


async def account_data(store: Store, room: RoomBuilder) -> None:
    await store.account_data.set(UserId(LOCAL), "m.tag", {}, room_id=room.room_id)


async def to_device(store: Store, room: RoomBuilder) -> None:
    await store.to_device.send({UserId(LOCAL): {"DEVICE": {"room": room.room_id}}})


async def direct(store: Store, room: RoomBuilder) -> None:
    await store.account_data.set(UserId(LOCAL), "m.direct", {ADMIN: [room.room_id]})


@pytest.mark.parametrize("happens", [message, receipt, account_data, to_device, direct])
async def test_news_end_the_wait(
    store: Store, happens: Callable[[Store, RoomBuilder], Awaitable[None]]
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 0), extensions=ALL)
    waiting = await started(store, client)
    await happens(store, room)
    assert not (await waiting).is_empty


async def test_a_new_invite_ends_the_wait(store: Store) -> None:
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 0))
    waiting = await started(store, client)
    room = new_room()
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    assert set((await waiting).rooms) == {room.room_id}


async def test_a_defined_stream_ends_the_wait(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    typing = await store.define_stream("typing")
    client = SlidingClient(store, LOCAL)
    before = await client.sync((0, 0))
    waiting = await started(store, client)
    await typing.publish(room.room_id, {}, wakes=[room.room_id])
    answer = await waiting
    assert answer.is_empty
    old, new = (store.positions_of(one.pos)["typing"] for one in (before, answer))
    assert len(await typing.rows(old, new)) == 1


async def test_other_facts_do_not_end_the_wait(store: Store) -> None:
    """A message below the window, a receipt there, and messages that were not asked for."""
    room, other = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    await deliver(store, other)
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 0))
    waiting = await started(store, client, ())
    await receipt(store, other)
    await to_device(store, room)
    await receipt(store, room)
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert not waiting.done()
    await message(store, room)
    assert set((await waiting).rooms) == {room.room_id}


async def test_without_pos_there_is_no_wait(store: Store) -> None:
    client = SlidingClient(store, LOCAL)
    async with asyncio.timeout(30):  # half of the wait
        assert (await client.sync((0, 0), timeout_ms=LONG_MS)).is_empty


async def test_the_wait_ends_with_its_time(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    pos = (await client.sync((0, 0))).pos
    statements.take()
    answer = await client.sync((0, 0), timeout_ms=20)
    assert (answer.is_empty, answer.pos) == (True, pos)
