"""Which requests and events write rows of connections."""

from typing import Any

from storage import Store
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, new_room
from tests.sliding.client import SlidingClient
from tests.sliding.test_timelines import many_rooms

MEMBERS = 40


async def versions(store: Store) -> list[Any]:
    """Every version of a row has another place or another transaction."""
    async with store.database.connection() as conn:
        return await conn.fetchvals(
            "SELECT (s.ctid, s.xmin)::text FROM sliding_rooms s UNION ALL "
            "SELECT (c.ctid, c.xmin)::text FROM sliding_connections c ORDER BY 1"
        )


def crowd() -> RoomBuilder:
    return new_room(members=[f"@member{number}:s1.test" for number in range(MEMBERS)])


async def test_a_message_writes_nothing_however_many_members_are_connected(store: Store) -> None:
    room = crowd()
    await deliver(store, room)
    clients = [SlidingClient(store, f"@member{number}:s1.test") for number in range(MEMBERS)]
    for client in clients:
        await client.sync((0, 19))
    before = await versions(store)
    assert len(before) == 2 * MEMBERS
    for number in range(3):
        await append(store, room.message(ADMIN, str(number)))
        assert await versions(store) == before, "the event"
        for client in clients:
            assert set((await client.sync((0, 19))).rooms) == {room.room_id}
        assert await versions(store) == before, "the responses"


async def test_a_room_out_of_the_window_is_written_once(store: Store) -> None:
    first, second = await many_rooms(store, 2)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 1))
    await append(store, second.message(ADMIN, "news"), first.message(ADMIN, "on top"))
    await client.sync((0, 0))
    written = await versions(store)
    for number in range(3):
        await append(store, second.message(ADMIN, str(number)))
        await append(store, first.message(ADMIN, str(number)))
        await client.sync((0, 0))
        assert await versions(store) == written


async def test_a_request_without_news_takes_one_statement(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    extensions = ["account_data", "receipts", "to_device"]
    await client.sync((0, 19), extensions=extensions)
    for _ in range(2):
        statements.sent.clear()
        assert (await client.sync((0, 19), extensions=extensions)).is_empty
        assert len(statements.take()) == 1


async def test_ten_changed_rooms_take_few_statements(
    store: Store, statements: StatementLog
) -> None:
    rooms = await many_rooms(store, 30)
    client = SlidingClient(store, LOCAL)
    required = [("m.room.name", ""), ("m.room.member", "$LAZY")]
    extensions = ["account_data", "receipts", "to_device"]
    await client.sync((0, 19), required=required, extensions=extensions)
    for _ in range(2):
        for room in rooms[:10]:
            await append(store, room.message(ADMIN, "news"))
        statements.sent.clear()
        answer = await client.sync((0, 19), required=required, extensions=extensions)
        assert len(answer.rooms) == 10
        assert len(statements.take()) <= 4


async def test_rooms_that_are_new_in_a_window_take_few_statements(
    store: Store, statements: StatementLog
) -> None:
    """The write of the connection is one of them."""
    rooms = await many_rooms(store, 30)
    client = SlidingClient(store, LOCAL)
    required = [("m.room.name", ""), ("m.room.member", "$LAZY")]
    await client.sync((0, 9), required=required)
    for some in (rooms[10:20], rooms[20:30]):
        for room in some:
            await append(store, room.message(ADMIN, "news"))
        statements.sent.clear()
        answer = await client.sync((0, 9), required=required)
        assert set(answer.rooms) == {room.room_id for room in some}
        assert len(statements.take()) <= 4
