"""Defined streams in syncs: their positions in tokens, and what ends a wait."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import storage
from storage import Store
from storage.ids import UserId
from storage.streams import SyncToken
from storage.streams.position_poller import follow_once
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, new_room

QUIET = storage.Config(follow_ms=3_600_000)
ALICE, BOB = "@alice:s1.test", "@bob:s1.test"
ROOM, ELSEWHERE = "!room:s1.test", "!elsewhere:s1.test"
LONG_MS = 60_000


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test", config=QUIET) as opened:
        yield opened


@pytest.fixture
async def second(dsn: str, store: Store) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name="s1.test", instance_name="second", config=QUIET
    ) as opened:
        yield opened


async def poll(store: Store) -> None:
    await follow_once(store.database, store.streams)


async def test_a_token_has_the_position_of_each_defined_stream(store: Store) -> None:
    await deliver(store, new_room(members=[LOCAL]))
    old = (await store.sync(LOCAL)).next_batch
    assert "typing" not in store.positions_of(old)
    typing = store.define_stream("typing")
    first = await store.sync(LOCAL)
    position = await typing.publish(ROOM, 1)
    second = await store.sync(LOCAL, since=first.next_batch)
    before, after = (store.positions_of(one.next_batch)["typing"] for one in (first, second))
    assert [fact.stream_id for fact in await typing.rows(before, after)] == [position]
    for since in (old, first.next_batch, second.next_batch):
        parsed = SyncToken.parse(since, store.deployment_id)
        assert parsed.print(store.deployment_id) == since
        assert "typing" in store.positions_of((await store.sync(LOCAL, since=since)).next_batch)


@pytest.mark.parametrize("wakes", [LOCAL, "the room"])
async def test_a_waiting_sync_wakes(store: Store, wakes: str) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    typing = store.define_stream("typing")
    since = (await store.sync(LOCAL)).next_batch
    woken = [str(room.room_id) if wakes == "the room" else wakes]
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(store.sync(LOCAL, since=since, timeout_ms=LONG_MS))
        while not store.notifier._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        others = await typing.publish(str(room.room_id), "of nobody")
        assert not asking.done()
        position = await typing.publish(str(room.room_id), {"user_ids": [ADMIN]}, wakes=woken)
    answer = asking.result()
    assert answer.is_empty
    reached = store.positions_of(answer.next_batch)["typing"]
    facts = await typing.rows(store.positions_of(since)["typing"], reached)
    assert [fact.stream_id for fact in facts] == [others, position]
    again = await store.sync(LOCAL, since=answer.next_batch, timeout_ms=20)
    assert again.next_batch == answer.next_batch


async def test_a_sync_does_not_wait_if_its_token_does_not_cover_the_news(store: Store) -> None:
    await deliver(store, new_room(members=[LOCAL]))
    typing = await store.define_stream("typing")
    since = (await store.sync(LOCAL)).next_batch
    position = await typing.publish(ROOM, 1, wakes=[LOCAL])
    async with asyncio.timeout(30):
        answer = await store.sync(LOCAL, since=since, timeout_ms=LONG_MS)
    assert store.positions_of(answer.next_batch)["typing"].covers("main", position)


async def test_news_from_before_the_definition_end_a_wait(store: Store, second: Store) -> None:
    """This process does not know whom they concern, so it answers at once."""
    await deliver(store, new_room(members=[LOCAL]))
    await poll(second)
    typing = await store.define_stream("typing")
    since = (await store.sync(LOCAL)).next_batch
    position = await typing.publish(ROOM, 1, wakes=[LOCAL])
    second.define_stream("typing")
    async with asyncio.timeout(30):
        answer = await second.sync(LOCAL, since=since, timeout_ms=LONG_MS)
    assert second.positions_of(answer.next_batch)["typing"].covers("main", position)


async def waiting(store: Store, since: str) -> asyncio.Task[storage.Sync]:
    """A sync that waits."""
    asking = asyncio.create_task(store.sync(LOCAL, since=since, timeout_ms=LONG_MS))
    while not store.notifier._waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return asking


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_sync_on_another_store_wakes(store: Store, second: Store, is_late: bool) -> None:
    """Also where the fact was in the snapshot of the sync already, but not published there yet."""
    await deliver(store, new_room(members=[LOCAL]))
    typing = store.define_stream("typing")
    second.define_stream("typing")
    publications: list[Callable[[], Awaitable[int]]] = [
        lambda: typing.publish(ROOM, 1, wakes=[LOCAL]),
        lambda: store.account_data.set(UserId(LOCAL), "m.tag", {}),
    ]
    for publish in publications:
        since = (await second.sync(LOCAL)).next_batch
        async with asyncio.timeout(30):
            asking = None if is_late else await waiting(second, since)
            position = await publish()
            asking = asking or await waiting(second, since)
            await poll(second)
            answer = await asking
        reached = second.positions_of(answer.next_batch)
        assert answer.is_empty
        assert any(reached[name].covers("main", position) for name in ("typing", "account_data"))


async def test_a_process_that_has_not_defined_it_keeps_the_position_of_a_token(
    store: Store, second: Store
) -> None:
    """Its responses have no such facts. A client that goes back and forth misses none."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    typing = store.define_stream("typing")
    since = (await store.sync(LOCAL)).next_batch
    position = await typing.publish(ROOM, 1, wakes=[LOCAL])
    await poll(second)
    assert "typing" in second.streams
    said = room.message(ADMIN)
    await append(store, said)
    between = (await second.sync(LOCAL, since=since)).next_batch
    assert second.positions_of(between)["typing"] == store.positions_of(since)["typing"]
    assert store.positions_of(between)["events"] != store.positions_of(since)["events"]
    async with asyncio.timeout(30):  # it does not wake again and again for the uncovered fact
        waited = await second.sync(LOCAL, since=between, timeout_ms=200)
    assert waited.is_empty
    after = (await store.sync(LOCAL, since=between)).next_batch
    reached = store.positions_of(after)["typing"]
    assert [fact.stream_id for fact in await typing.rows(
        store.positions_of(between)["typing"], reached
    )] == [position]  # fmt: skip
    assert "typing" not in second.positions_of((await second.sync(LOCAL)).next_batch)


async def test_a_wait_on_a_process_that_has_not_defined_it_lasts(
    store: Store, second: Store
) -> None:
    await deliver(store, room := new_room(members=[LOCAL]))
    typing = store.define_stream("typing")
    since = (await store.sync(LOCAL)).next_batch
    await typing.publish(ROOM, 1, wakes=[LOCAL])
    await poll(second)
    looked: list[object] = []
    until = second.notifier.wait

    async def counted(*args: Any, **kwargs: Any) -> bool:
        looked.append(args)
        return await until(*args, **kwargs)

    second.notifier.wait = counted  # type: ignore[method-assign]
    waiting = asyncio.create_task(second.sync(LOCAL, since=since, timeout_ms=600_000))
    async with asyncio.timeout(60):
        while not looked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await append(store, room.message(ADMIN))
        await poll(second)
        assert not (await waiting).is_empty
    assert len(looked) == 1


async def test_parts_of_an_initial_sync_have_the_position(store: Store) -> None:
    for seed in range(3):
        await deliver(store, new_room(members=[LOCAL], seed=seed))
    typing = store.define_stream("typing")
    await typing.publish(ROOM, 1)
    part = await store.sync(LOCAL, rooms_limit=1)
    first = part.next_batch
    await typing.publish(ROOM, 2)
    while part.next_rooms is not None:
        part = await store.sync(LOCAL, rooms_limit=1, since=part.next_rooms)
        assert part.next_batch == first
