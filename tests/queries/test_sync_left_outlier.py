"""A leave that this server has only as an outlier: in the state, and in no timeline."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.testing import RoomBuilder

ADMIN, GONE, NEW = "@admin:s2.test", "@gone:s1.test", "@new:s1.test"


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


async def test_a_leave_of_the_rooms_state_is_not_added_to_the_timeline(store: Store) -> None:
    """The server joins with another user, by a state that has the leave."""
    before = (await store.sync(GONE)).next_batch
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN)
    room.join(GONE)
    leave = room.leave(GONE)
    outliers = list(room.pdus)
    join = room.join(NEW)
    await store.append(outliers, room_version="11", origin="outlier")
    given = {join.event_id: list(join.state_before.values())}
    [result] = await store.append([join.pdu], room_version="11", state_before=given)
    assert result.outcome == "stored"
    left = (await store.sync(GONE, since=before)).leave[room.room_id]
    assert left.timeline.events == []
    assert leave.event_id in {event.event_id for event in left.state}


async def test_a_leave_out_of_band_ends_the_timeline(store: Store) -> None:
    """The server is in no room: the leave declines an invite."""
    before = (await store.sync(GONE)).next_batch
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN)
    invite = room.invite(ADMIN, GONE)
    leave = room.leave(GONE)
    for event in (invite, leave):
        [result] = await store.append([event.pdu], room_version="11", origin="out_of_band")
        assert result.outcome == "stored", result
    left = (await store.sync(GONE, since=before)).leave[room.room_id]
    assert [event.event_id for event in left.timeline.events] == [leave.event_id]
