"""Facts of a stream page by page equal those read at once.

This holds wherever a page ends, and for all kinds of rows.
"""

import pytest

import storage
from storage import Store
from storage.streams.feed import StreamRow, whole_ids
from storage.streams.registry import Stream
from storage.testing import RoomBuilder

ALICE, LOCAL, OTHER = "@alice:s2.test", "@local:s1.test", "@other:s1.test"
EVERYTHING = 1_000_000


async def in_pages(stream: Stream, size: int, writer: str | None) -> list[StreamRow]:
    """As a follower reads them (`storage.streams.position_poller`)."""
    known, end, found, limit = 0, stream.linear(), list[StreamRow](), size
    while known < end:
        page = await stream.rows(known, end, limit, instance_name=writer)
        assert len(page) <= limit
        whole = whole_ids(page, limit)
        if whole is None:
            return found + page
        if whole:
            found += whole
            known, limit = whole[-1].stream_id, size
        else:
            limit *= 2
    return found


async def filled(store: Store) -> None:
    """Store live events, invites to rooms without this server, and history, in turns.

    The invites are outliers in the same stream.
    """
    room = RoomBuilder("11", seed=1)
    room.start("@admin:s1.test")
    await store.append(room.pdus)
    for number in range(2, 8):
        away = RoomBuilder("11", seed=number)
        away.start(ALICE)
        invites = [away.invite(ALICE, user).pdu for user in (LOCAL, OTHER)]
        await store.append(away.pdus[:-2], origin="outlier")
        await store.append(invites, origin="outlier")
        await store.append([room.message("@admin:s1.test").pdu])
        history = RoomBuilder("11", seed=100 + number)
        history.start(ALICE)
        await store.append(history.pdus, origin="backfill")


@pytest.mark.parametrize("writer", [None, "main", "nobody"])
async def test_pages_of_any_size_are_the_whole(dsn: str, writer: str | None) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        await filled(store)
        await compared(store, writer)


async def compared(store: Store, writer: str | None) -> None:
    for name in ("events", "backfill"):
        stream = store.streams[name]
        whole = await stream.rows(0, stream.linear(), EVERYTHING, instance_name=writer)
        assert (len(whole) > 12) == (writer != "nobody")
        assert [fact.stream_id for fact in whole] == sorted(fact.stream_id for fact in whole)
        for size in (1, 2, 3, 5, 100):
            assert await in_pages(stream, size, writer) == whole, (name, size)
    rooms = {fact.row[1] for fact in await store.streams["events"].rows(0, EVERYTHING, EVERYTHING)}
    assert len(rooms) == 7, "live events and outliers"
