"""Events have NULL where another column says the same."""

from collections.abc import AsyncIterator
from typing import Final, NamedTuple

import pytest

import storage
from storage import Store
from storage.ids import EventId
from storage.maintenance.purge import purge_history
from storage.testing import RoomBuilder, deliver_with_gap
from tests.maintenance.rooms import SERVER, deliver, findings
from tests.postgres import others_ended

ADMIN: Final = "@user1:s1.test"
SQL_DEPTHS: Final = """
SELECT event_id, depth, topological_ordering, claimed_depth(depth, topological_ordering) AS claimed
FROM events
ORDER BY event_nid
"""


class DepthRow(NamedTuple):
    event_id: EventId
    depth: int | None
    topological_ordering: int | None
    claimed: int


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def execute(store: Store, sql: str, *args: object) -> None:
    async with store.database.connection() as conn:
        await conn.execute(sql, *args)


async def depths(store: Store, room: RoomBuilder) -> dict[EventId, DepthRow]:
    """Return the depths of all events; what they claim must be what the events say."""
    async with store.database.connection() as conn:
        rows = await conn.fetch(SQL_DEPTHS, row=DepthRow)
    said = {one.event_id: one.json["depth"] for one in room.events}
    assert {row.event_id: row.claimed for row in rows} == {
        row.event_id: said[row.event_id] for row in rows
    }
    return {row.event_id: row for row in rows}


async def test_an_honest_depth_is_not_stored(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN)
    honest, false = room.message(ADMIN), room.message(ADMIN, depth=7_000)
    outlier = room.fork(1)[0].message(ADMIN)
    await store.append([one.pdu for one in room.events if one is not outlier], room_version="11")
    await store.append([outlier.pdu], origin="outlier")
    found = await depths(store, room)
    assert found[honest.event_id].depth is None
    assert found[false.event_id].depth == 7_000
    assert found[outlier.event_id].depth == outlier.json["depth"]
    await store.append([outlier.pdu])
    assert (await depths(store, room))[outlier.event_id].depth is not None
    assert await findings(store) == []


async def test_events_that_move_keep_their_depth(store: Store) -> None:
    """A gap is filled below events that have to move up, and a purge makes outliers of events."""
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN)
    start = len(room.events)
    lost = [room.message(ADMIN, depth=20) for _ in range(6)]
    for _ in range(20):
        room.message(ADMIN)
    delivery = deliver_with_gap(room, start, start + len(lost))
    await deliver(store, delivery)
    found = await depths(store, room)
    assert any(row.topological_ordering != row.claimed for row in found.values())
    assert any(row.depth is None for row in found.values())
    await others_ended(store.database)
    await purge_history(
        store.database,
        room.room_id,
        server_name=SERVER,
        before_event_id=room.events[-5].event_id,
    )
    purged = await depths(store, room)
    assert sum(row.topological_ordering is None for row in purged.values()) > 10
    assert await findings(store) == []
