"""A writer without a reader: it gets the positions of other writers, and the deletions."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

import storage
from storage.config import Config
from storage.event import parse
from storage.maintenance.purge import purge_room
from storage.persist.commit.group_commit import WRITER_READS
from storage.persist.model.incoming import IncomingEvent
from storage.store.open import OpenWriter, open_writer
from storage.streams.feed import Advance
from storage.streams.position_poller import follow_once
from storage.testing import RoomBuilder

SERVER = "s1.test"
ALICE = "@alice:s1.test"
SELDOM = Config(follow_ms=3_600_000)


@pytest.fixture
async def loader(dsn: str) -> AsyncIterator[OpenWriter]:
    async with open_writer(
        dsn, server_name=SERVER, config=replace(SELDOM, instance_name="loader")
    ) as opened:
        yield opened


def room_of(seed: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed)
    room.start(ALICE)
    return room


async def outcomes(loader: OpenWriter, pdus: Sequence[bytes]) -> set[str]:
    results = await loader.writer.append(
        [IncomingEvent(parse(pdu, "11"), "live", None) for pdu in pdus]
    )
    return {result.outcome for result in results}


async def test_it_is_told_positions_and_no_events(dsn: str, loader: OpenWriter) -> None:
    told: list[Advance] = []
    loader.streams.feed.subscribe(told.append)
    async with storage.open(dsn, server_name=SERVER, config=SELDOM) as store:
        assert await outcomes(loader, room_of(1).pdus) == {"stored"}
        await store.append(room_of(2).pdus)
        del told[:]
        await follow_once(loader.database, loader.streams, WRITER_READS)
        assert (
            loader.streams["events"].positions()["main"]
            == store.streams["events"].positions()["main"]
        )
        assert [one for one in told if one.rows] == []
        assert any(one.instance_name == "main" and one.stream_name == "events" for one in told)
        await follow_once(store.database, store.streams)
        assert await store.current_state(storage.RoomId(room_of(1).room_id)), (
            "and what it writes is there"
        )


async def test_it_forgets_what_another_has_purged(dsn: str, loader: OpenWriter) -> None:
    room = room_of(1)
    assert await outcomes(loader, room.pdus) == {"stored"}
    assert await outcomes(loader, room.pdus) == {"duplicate"}
    async with storage.open(dsn, server_name=SERVER, config=SELDOM) as store:
        await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
    await follow_once(loader.database, loader.streams, WRITER_READS)
    assert await outcomes(loader, room.pdus) == {"stored"}
