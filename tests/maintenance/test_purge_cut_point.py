"""Where a purge cuts: below an event, or below the first event that arrived at a time or later."""

import pytest

from storage import PurgeRefused, Store, UnknownEvent
from storage.maintenance.purge.cut_point import (
    SQL_ROOM,
    CutPoint,
    PurgedRoomRow,
    before_event,
    before_time,
)
from storage.testing import RoomBuilder
from tests.maintenance.purging import chat

START = 20_000 * 86_400_000
NOW = START + 1_000_000


async def stored(store: Store, room: RoomBuilder) -> PurgedRoomRow:
    """Store a room, event n (from 1) of which arrived at n seconds; return its row."""
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE events SET received_ts = $1::bigint + topological_ordering * 1000", START
        )
        row = await conn.fetchrow(SQL_ROOM, room.room_id, row=PurgedRoomRow)
    assert row is not None
    assert row.highest == len(room.events)
    return row


async def positions(store: Store) -> dict[int, int]:
    async with store.database.connection() as conn:
        rows = await conn._driver.fetch("SELECT topological_ordering, stream_ordering FROM events")
    return {row[0]: row[1] for row in rows}


async def test_the_cut_below_an_event(store: Store) -> None:
    room = chat(10)
    row, at = await stored(store, room), await positions(store)
    async with store.database.connection() as conn:
        assert await before_event(conn, room.room_id, row, room.events[4].event_id) == CutPoint(
            5, at[5] - 1
        )
        assert await before_event(
            conn, room.room_id, row._replace(highest=5), room.events[4].event_id
        ) == CutPoint(5, at[5] - 1)


async def test_events_that_are_no_cut_are_refused(store: Store) -> None:
    room = chat(10)
    row, one = await stored(store, room), room.events[4].event_id
    refusals = [
        (row._replace(room_nid=row.room_nid + 1), f"{one} is an event of another room"),
        (
            row._replace(highest=4),
            f"{one} is above the forward extremities: name an event that was accepted",
        ),
        (
            row._replace(highest=None),
            f"{one} is above the forward extremities: name an event that was accepted",
        ),
    ]
    async with store.database.connection() as conn:
        for refused, reason in refusals:
            with pytest.raises(PurgeRefused) as caught:
                await before_event(conn, room.room_id, refused, one)
            assert (caught.value.reason, caught.value.room_id) == (reason, room.room_id)
        with pytest.raises(UnknownEvent, match="unknown"):
            await before_event(conn, room.room_id, row, "$unknown")


async def test_an_outlier_is_no_cut(store: Store) -> None:
    room = chat(10)
    await store.append(room.pdus, origin="outlier", room_version=room.version)
    one = room.events[4].event_id
    async with store.database.connection() as conn:
        row = await conn.fetchrow(SQL_ROOM, room.room_id, row=PurgedRoomRow)
        assert row is not None
        with pytest.raises(PurgeRefused) as caught:
            await before_event(conn, room.room_id, row._replace(highest=9), one)
    reason = f"{one} has no position in the timeline (an outlier): name another event"
    assert (caught.value.reason, caught.value.room_id) == (reason, room.room_id)


async def test_the_cut_below_a_time(store: Store) -> None:
    """At a time or later: event n arrived at n seconds."""
    room = chat(10)
    row, at = await stored(store, room), await positions(store)
    last = len(room.events)
    async with store.database.connection() as conn:
        for order in range(1, last + 1):
            cut = CutPoint(order, at[order] - 1)
            assert await before_time(conn, room.room_id, row, START + order * 1000, NOW) == cut
            assert (
                await before_time(conn, room.room_id, row, START + order * 1000 - 999, NOW) == cut
            )
        assert await before_time(conn, room.room_id, row, 0, NOW) == CutPoint(1, at[1] - 1)
        assert await before_time(conn, room.room_id, row, NOW, NOW) == CutPoint(last, at[last] - 1)


async def test_the_cut_below_a_time_is_below_all_that_arrived_at_it(store: Store) -> None:
    room = chat(10)
    row, at = await stored(store, room), await positions(store)
    async with store.database.connection() as conn:
        await conn.execute("UPDATE events SET received_ts = $1::bigint", START + 5_000)
        assert await before_time(conn, room.room_id, row, START + 5_000, NOW) == CutPoint(
            1, at[1] - 1
        )


async def test_the_cut_below_a_time_is_not_above_the_forward_extremities(store: Store) -> None:
    room = chat(10)
    row, at = await stored(store, room), await positions(store)
    async with store.database.connection() as conn:
        assert await before_time(
            conn, room.room_id, row._replace(highest=3), START + 5_000, NOW
        ) == CutPoint(3, at[5] - 1)
        assert await before_time(
            conn, room.room_id, row._replace(highest=None), START + 5_000, NOW
        ) == CutPoint(5, at[5] - 1)
        assert await before_time(
            conn, room.room_id, row._replace(highest=5), START + 5_000, NOW
        ) == CutPoint(5, at[5] - 1)


async def test_a_room_without_live_events_has_no_cut_and_times_to_come_are_refused(
    store: Store,
) -> None:
    room = chat(10)
    row = await stored(store, room)
    async with store.database.connection() as conn:
        assert (
            await before_time(
                conn, room.room_id, row._replace(room_nid=row.room_nid + 1), START + 5_000, NOW
            )
            is None
        )
        with pytest.raises(PurgeRefused) as caught:
            await before_time(conn, room.room_id, row, NOW + 1, NOW)
    assert (caught.value.reason, caught.value.room_id) == (
        "the date lies in the future",
        room.room_id,
    )
