"""The gaps of a room, what is known of each, and when to ask for it again."""

from typing import Any

import pytest

from storage import RoomId, Store
from storage.errors import InvalidIdentifier, UnknownRoom
from storage.queries import gaps as gap_queries
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, ids, new_room

MINUTE = 60_000


async def with_gaps(store: Store) -> tuple[RoomBuilder, list[BuiltEvent]]:
    """Messages 0 to 5, of which 1 and 3 are missing."""
    room = new_room(members=[LOCAL])
    said = [room.message(ADMIN, str(number)) for number in range(6)]
    await append(store, *[event for event in room.events if event not in said[1:]])
    for event in (said[2], said[4]):
        await append(store, event, state_before={event.event_id: list(event.state_before.values())})
    await append(store, said[5])
    return room, said


async def pauses(store: Store, room: RoomBuilder, at: int) -> list[tuple[int, int]]:
    """(failures, retry_after_ms) of each gap, as it will be then."""
    async with store.database.connection() as conn:
        return [
            (gap.failures, gap.retry_after_ms)
            for gap in await gap_queries.gaps(conn, room.room_id, at)
        ]


async def fail(store: Store, room: RoomBuilder, event: BuiltEvent, at: int, *servers: Any) -> None:
    async with store.database.connection() as conn:
        await gap_queries.gap_failed(
            conn,
            room.room_id,
            [event.event_id],
            "timeout",
            servers=servers,
            now_ms=at,
        )


async def test_what_is_known_of_a_gap(store: Store, statements: StatementLog) -> None:
    room, said = await with_gaps(store)
    statements.take()
    later, earlier = await store.gaps(room.room_id)
    assert len(statements.take()) == 1
    assert (later.event_id, earlier.event_id) == (said[3].event_id, said[1].event_id)
    held = await store.events(ids(said))
    for gap, child in ((later, said[4]), (earlier, said[2])):
        assert gap.children == (child.event_id,)
        assert (gap.below, gap.depth) == (held[child.event_id].topological_ordering, child.depth)
        assert gap.seen_ts > 0
        assert (gap.failures, gap.reason, gap.failed_ts, gap.retry_after_ms) == (0, None, None, 0)


async def test_each_failure_doubles_the_pause_up_to_a_day(store: Store) -> None:
    room, said = await with_gaps(store)
    for number in range(50):
        await fail(store, room, said[3], number * 10)
        [(failures, pause), other] = await pauses(store, room, number * 10)
        assert (failures, pause) == (number + 1, min(MINUTE * 2**number, 24 * 60 * MINUTE))
        assert other == (0, 0)
    assert await pauses(store, room, 490 + 24 * 60 * MINUTE) == [(50, 0), (0, 0)]
    assert (await store.gaps(room.room_id))[0].reason == "timeout"


async def test_the_pause_ends_when_a_server_that_failed_is_up_again(store: Store) -> None:
    room, said = await with_gaps(store)
    for server in ("s2.test", "s3.test"):
        await fail(store, room, said[3], 0, server)
    await fail(store, room, said[1], 0)
    await store.server_up("s4.test")
    assert await pauses(store, room, 0) == [(2, 2 * MINUTE), (0, 0)]
    await store.server_up("s2.test")
    assert await pauses(store, room, 0) == [(0, 0), (0, 0)]
    await fail(store, room, said[3], 0, "s2.test")
    assert await pauses(store, room, 0) == [(1, MINUTE), (0, 0)]


async def test_it_is_forgotten_when_the_event_arrives(store: Store) -> None:
    room, said = await with_gaps(store)
    await store.gap_failed(room.room_id, ids(said), "nobody has it", server_names=["s2.test"])
    assert [gap.failures for gap in await store.gaps(room.room_id)] == [1, 1]
    await append(store, said[3], origin="backfill")
    [gap] = await store.gaps(room.room_id)
    assert (gap.event_id, gap.failures) == (said[1].event_id, 1)
    async with store.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM gap_failures") == 1


async def test_bad_questions(store: Store) -> None:
    room, said = await with_gaps(store)
    nowhere = RoomId("!none:s1.test")
    with pytest.raises(UnknownRoom):
        await store.gaps(nowhere)
    with pytest.raises(UnknownRoom):
        await store.gap_failed(nowhere, [said[3].event_id], "timeout")
    with pytest.raises(InvalidIdentifier):
        await store.gap_failed(room.room_id, [said[3].event_id], "NUL \0")
    await store.gap_failed(room.room_id, [said[0].event_id, "$none"], "x" * 10_000)
    assert [gap.failures for gap in await store.gaps(room.room_id)] == [0, 0]


async def test_the_pause_ends_at_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_queries, "RETRY_MS_FIRST", 7)
    monkeypatch.setattr(gap_queries, "RETRY_MS_MAX", 20)
    room, said = await with_gaps(store)
    for expected in (7, 14, 20, 20):
        await fail(store, room, said[1], 0)
        assert (await pauses(store, room, 0))[1][1] == expected
