"""Plans of threads and unread counts in a large room: indexes, and rows of `events` read.

Another user's receipts and 3,000 replies of busy threads are not read.
"""

from typing import NamedTuple

import pytest
import pytest_asyncio

from storage import Store
from storage.ids import UserId
from storage.queries import threads, unread
from storage.queries.sync import included
from storage.streams.positions import LARGEST_POSITION
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, deliver, new_room
from tests.queries.test_plans import is_inlined, plan_of
from tests.queries.test_relations_plans import SQL_MULTIPLY
from tests.stored_bytes import store_plainly

pytestmark = [
    pytest.mark.xdist_group("unread"),
    pytest.mark.asyncio(loop_scope="module"),
]  # filled once

MANY = 3_000

SQL_READERS = """
WITH principal AS (
    INSERT INTO principals (principal_nid, name)
    SELECT 1000000 + n, '@reader' || n || ':s2.test' FROM generate_series(1, $2::int) AS n
    RETURNING principal_nid
)
INSERT INTO receipts (stream_id, room_nid, principal_nid, writer_nid, receipt_type, thread_id,
    event_id, data)
SELECT p.principal_nid, c.room_nid, p.principal_nid, c.writer_nid, c.receipt_type, c.thread_id,
    c.event_id, c.data
FROM principal p
CROSS JOIN receipts c
JOIN rooms r USING (room_nid)
WHERE r.room_id = $1::text
"""

SQL_FACTS = """
WITH data AS (
    INSERT INTO account_data (stream_id, principal_nid, room_nid, type_nid, writer_nid, content)
    SELECT n, 1000000 + n / 10, 0, n, 1, '{}' FROM generate_series(1, $1::int) AS n
)
INSERT INTO to_device (stream_id, principal_nid, writer_nid, device_id, content)
SELECT n, 1000000 + n / 10, 1, 'A', '{}' FROM generate_series(1, $1::int) AS n
"""


class CrowdedRoom(NamedTuple):
    """A room with thousands of messages, replies and readers, and other rooms with few."""

    store: Store
    room: RoomBuilder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def read_room(module_store: Store) -> CrowdedRoom:
    store = module_store
    for seed in range(1, 20):
        other = new_room(seed=seed, members=[LOCAL])
        other.message(ADMIN)
        await deliver(store, other)
        last = other.events[-1].event_id
        await store.receipts.set(other.room_id, "m.read", UserId(LOCAL), last, {})
    room = new_room(members=[LOCAL])
    root = room.message(ADMIN)
    reply, said = room.threaded(ADMIN, root, "reply"), room.message(ADMIN)
    await deliver(store, room)
    await store.receipts.set(room.room_id, "m.read", UserId(LOCAL), said.event_id, {})
    await store_plainly(store.database)
    async with store.database.connection() as conn:
        await conn.execute(SQL_READERS, room.room_id, MANY)
        for place, event in enumerate((reply, said)):
            await conn.execute(SQL_MULTIPLY, event.event_id, MANY * (place + 1), MANY)
        unread_after = f"{said.event_id}{MANY - 5}"
        await conn.execute(
            "UPDATE receipts SET event_id = $1 WHERE event_id = $2 AND principal_nid < 1000000",
            unread_after,
            said.event_id,
        )
        await conn.execute(
            "UPDATE rooms SET last_stream_ordering = 1000000 WHERE room_id = $1", room.room_id
        )
        await conn.execute(SQL_FACTS, MANY)
        await conn.execute("VACUUM ANALYZE")
    return CrowdedRoom(store, room)


async def test_unread_counts_read_what_is_unread(read_room: CrowdedRoom) -> None:
    types = list(unread.UNREAD_TYPES)
    plan = await plan_of(
        read_room.store,
        unread.SQL_UNREAD,
        LOCAL,
        None,
        types,
        [],
        100,
        20_000,
        None,
        None,
        False,
        None,
    )
    assert {"receipts_pkey", "events_room_stream_idx", "events_related_stream_idx"} <= plan.indexes
    assert "receipts_room_stream_idx" not in plan.indexes
    assert plan.event_rows <= 20 + 5 + 10  # the events of receipts, and what is unread
    assert is_inlined(plan)
    counts = await read_room.store.unread(LOCAL, [read_room.room.room_id])
    assert counts[read_room.room.room_id].main == 5


async def test_threads_read_a_chunk(read_room: CrowdedRoom) -> None:
    plan = await plan_of(
        read_room.store,
        threads.SQL_THREADS,
        *(read_room.room.room_id, LOCAL, []),
        *(LARGEST_POSITION, LARGEST_POSITION, 64, 21),
    )
    assert {"events_thread_idx", "events_relation_idx"} <= plan.indexes
    assert plan.event_rows <= 64 + 1
    assert is_inlined(plan)


async def test_a_user_without_threads_pays_for_a_part_of_the_replies(
    read_room: CrowdedRoom,
) -> None:
    """A page of the user's threads ends early, also where there are none."""
    found: list[int] = []
    token = None
    while not found or token is not None:
        page = await read_room.store.threads(
            read_room.room.room_id, LOCAL, include="participated", from_=token
        )
        found.append(len(page.chunk))
        token = page.end
    assert found == [0] * -(-(MANY + 1) // threads.PARTICIPATED_ROWS_MAX)


async def test_included_facts_are_read_by_their_indexes(read_room: CrowdedRoom) -> None:
    for way, index in (
        ("by position", "receipts_stream_id_key"),
        ("by room", "receipts_room_stream_idx"),
    ):
        plan = await plan_of(
            read_room.store,
            included.SQL_INCLUDED,
            *(LOCAL, "A", True, True, 1_003_000, [], [], way, [], True, True),
            *(0, [], [], 0, [], [], None, [], [], None),
        )
        assert index in plan.indexes
        assert {"account_data_user_idx", "to_device_inbox_idx"} <= plan.indexes
