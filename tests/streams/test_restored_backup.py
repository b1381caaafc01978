"""A backup is restored under open stores: cluster and timeline are the same, writes are gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace

import asyncpg
import pytest

from storage import DatabaseError, EventId, ResyncNeeded, Store
from storage.streams.position_poller import follow_once
from tests.failover import ReplicatedPair, ask, value
from tests.maintenance.rooms import findings
from tests.pausing import pause
from tests.postgres import SQL_WAITING
from tests.streams.lossy import CONFIG, LOST, SELDOM, FailoverRoom, FeedRecorder, opened, timeline

pytestmark = [pytest.mark.timeout(120), pytest.mark.every_postgres]


@pytest.fixture
async def pair() -> AsyncIterator[ReplicatedPair]:
    async with ReplicatedPair() as opened:
        yield opened


async def test_a_backup_comes_back_under_open_stores(pair: ReplicatedPair) -> None:
    """An earlier copy of the disks: same cluster and timeline, but the writes since are gone."""
    room = FailoverRoom()
    async with opened(pair, "a") as a, opened(pair, "b") as b:
        kept = await room.write(a, 5)
        told = FeedRecorder(b)
        _, early = await timeline(b, None)
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        lost = await room.write(a, LOST)
        await told.reached(lost)
        _, late = await timeline(b, early)
        await pair.back_to_the_copy()
        room.back_to(before)
        new = [event_id for _ in range(9) for event_id in await room.write(a, 1)]
        async with asyncio.timeout(60):
            await told.reached(new)
        for store in (a, b):
            with pytest.raises(ResyncNeeded):
                await timeline(store, late)
            assert (await timeline(store, early))[0] == new
            assert (await timeline(store, None))[0] == kept + new
            assert await findings(store) == []


async def test_several_stores_leave_one_gap(pair: ReplicatedPair) -> None:
    """A store detects a restored backup by the missing writes.

    Of several stores that detect it at once the first leaves the gap.
    """
    rooms = [FailoverRoom(seed) for seed in range(3)]
    patient = replace(CONFIG, lock_timeout_ms=60_000, statement_timeout_ms=60_000)
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(opened(pair, name, patient)) for name in ("a", "b", "c")
        ]
        for room, store in zip(rooms, stores, strict=True):
            await room.write(store, 2)
        await pair.caught_up()
        await pair.detach()
        before = rooms[0].stored
        for room, store in zip(rooms, stores, strict=True):
            await room.write(store, 2)
        late = (await timeline(stores[0], None))[1]
        await pair.back_to_the_copy()
        holds = await asyncpg.connect(pair.rooms(pair.standby))
        async with holds.transaction():
            await holds.execute("LOCK TABLE stream_positions IN SHARE MODE")
            while await holds.fetchval(SQL_WAITING) < len(stores):
                await pause()
        await holds.close()
        for room, store in zip(rooms, stores, strict=True):
            room.back_to(before)
            await room.write(store, 1)
            with pytest.raises(ResyncNeeded):
                await timeline(store, late)
            assert await findings(store) == []
        gaps = "SELECT count(*) FROM lost_positions WHERE stream_name = 'events'"
        assert await value(pair.rooms(pair.standby), gaps) == 1


async def test_a_store_that_wrote_nothing_knows_a_restored_backup_by_the_writes_of_others(
    pair: ReplicatedPair,
) -> None:
    """It has its connections before the other store comes back, which has more to go by."""
    room = FailoverRoom()
    async with opened(pair, "a", SELDOM) as a, opened(pair, "b", SELDOM) as b:
        await room.write(a, 5)
        _, early = await timeline(b, None)
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        lost = await room.write(a, LOST)
        with ExitStack() as busy:  # so its own positions stay
            for name in b.streams:
                busy.enter_context(b.streams.writing(name))
            await follow_once(b.database, b.streams)
        _, late = await timeline(b, early)
        await pair.back_to_the_copy()
        for _ in range(3):
            with suppress(DatabaseError):  # the connection is lost
                await timeline(b, early)
        with pytest.raises(ResyncNeeded):
            await timeline(b, late)
        assert await b.events(lost) == {}
        room.back_to(before)
        new = await room.write(a, 1)
        for store in (a, b):
            with pytest.raises(ResyncNeeded):
                await timeline(store, late)
            assert (await timeline(store, early))[0] == new


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "opened after it"])
async def test_a_backup_is_restored_twice(pair: ReplicatedPair, is_open: bool) -> None:
    """What was written after the first restore is lost, too.

    Its positions were above the first gap.
    """
    room = FailoverRoom()
    async with opened(pair, "a", SELDOM) as a:
        kept = await room.write(a, 5)
        await pair.caught_up()
        await pair.detach()
        before = room.stored
        await room.write(a, 1)
        await pair.back_to_the_copy()
        room.back_to(before)
        lost = await room.write(a, LOST)
        _, late = await timeline(a, None)
        await pair.back_to_the_copy()
        room.back_to(before)
        if is_open:
            new = await room.write(a, 2)
            await refused_and_whole(a, late, kept + new, lost)
    if not is_open:
        await ask(
            pair.rooms(pair.standby),
            "UPDATE deployment SET incarnation = 'of the machine of the backup'",
        )
        async with opened(pair, "a", SELDOM) as a:
            new = await room.write(a, 2)
            await refused_and_whole(a, late, kept + new, lost)


async def refused_and_whole(
    store: Store, late: str, whole: list[EventId], lost: list[EventId]
) -> None:
    with pytest.raises(ResyncNeeded, match="restored from"):
        await timeline(store, late)
    assert (await timeline(store, None))[0] == whole
    assert await store.events(lost) == {}
    assert await findings(store) == []
