"""Connections: repeated and late requests, several of a device, how they expire."""

import asyncio
import time
from typing import Any

import pytest

import storage
from storage import SlidingFilter, SlidingList, SlidingSyncRequest, Store, responses
from storage.errors import InputError, InvalidToken, UnknownPos
from storage.ids import UserId
from storage.maintenance.expiry import delete_old_connections
from storage.maintenance.verify.graph import check_connections
from storage.queries.sliding.connection import (
    SQL_LOCK,
    SQL_WRITE_STATE,
    ClientRoom,
    ConnectionColumnsRow,
    ConnectionState,
    write_state,
)
from storage.queries.sliding.room_state import Required
from storage.streams.tokens import PosToken
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room
from tests.sliding.client import EVERYTHING, SlidingClient
from tests.sliding.test_timelines import many_rooms


async def rows(store: Store, table: str) -> int:
    async with store.database.connection() as conn:
        return int(await conn.fetchval(f"SELECT count(*) FROM {table}"))


ROOM = ClientRoom(None, None, None, 1, Required(frozenset()), is_direct=False)


async def state_of_pos(store: Store, pos: str | None) -> ConnectionState:
    """Return the state of a `pos`, as a request reads it."""
    assert pos is not None
    token = PosToken.parse(pos, store.deployment_id)
    async with store.database.connection() as conn:
        columns = await conn.fetchrow(
            SQL_LOCK, token.connection, token.number, row=ConnectionColumnsRow
        )
    assert columns is not None
    return ConnectionState(token.connection, token.number, 0, columns)


async def nid_of(store: Store, room_id: str) -> int:
    async with store.database.connection() as conn:
        return int(
            await conn.fetchval("SELECT room_nid FROM rooms WHERE room_id = $1::text", room_id)
        )


async def written(store: Store, state: ConnectionState, room_id: str) -> int | None:
    """Write a room on top of a state that was read before."""
    changes, now = {await nid_of(store, room_id): ROOM}, time.time_ns() // 1_000_000
    return await store.database.run(lambda conn: write_state(conn, state, changes, now_ms=now))


def writes(statements: StatementLog) -> list[str]:
    """Return the statements that write or lock a connection."""
    return [one for one in statements.take() if one in (SQL_LOCK, SQL_WRITE_STATE)]


async def until_blocked(store: Store) -> None:
    """Wait until a session waits for a lock."""
    async with store.database.connection() as conn, asyncio.timeout(60):
        while not await conn.fetchval(  # noqa: ASYNC110
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.01)


async def rooms_are_consistent(store: Store) -> None:
    async with store.database.connection() as conn:
        assert [finding async for finding in check_connections(conn)] == []


async def test_a_repeated_request_has_the_same_response(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    first = await client.sync((0, 19))
    event = room.message(ADMIN, "new")
    await append(store, event)
    answers = []
    for _ in range(4):
        client.pos = first.pos
        answers.append(await client.sync((0, 19), limit=50, required=EVERYTHING))
    assert all(answer.rooms == answers[0].rooms for answer in answers)
    assert answers[0].rooms[room.room_id].timeline[-1].event_id == event.event_id
    assert (await client.sync((0, 19), limit=50, required=EVERYTHING)).rooms == {}


async def test_a_repeated_request_may_have_another_body(store: Store) -> None:
    rooms = await many_rooms(store, 4)
    client = SlidingClient(store, LOCAL)
    base = (await client.sync((0, 0))).pos
    await client.sync((0, 3))
    client.pos = base
    answer = await client.sync((0, 1))
    assert set(answer.rooms) == {rooms[1].room_id}
    answer = await client.sync((0, 3))
    assert set(answer.rooms) == {room.room_id for room in rooms[2:]}


async def test_one_of_two_concurrent_responses_can_be_used(store: Store) -> None:
    """A request that was given up may still be answered, before or after its repetition."""
    rooms = await many_rooms(store, 3)
    client = SlidingClient(store, LOCAL)
    base = (await client.sync((0, 0))).pos
    request = SlidingSyncRequest(lists={"all": SlidingList([(0, 1)])})
    ask = {"device_id": client.device_id, "pos": base}
    answers = await asyncio.gather(
        *(store.sliding_sync(LOCAL, request, **ask) for _ in range(2))  # type: ignore[arg-type]
    )
    assert answers[0].rooms == answers[1].rooms
    for answer in answers:
        client.pos = answer.pos
        assert set((await client.sync((0, 1))).rooms) == set()
    client.pos = answers[0].pos
    assert set((await client.sync((0, 2))).rooms) == {rooms[2].room_id}


async def test_one_statement_writes_a_state_unless_another_request_was_first(
    store: Store, statements: StatementLog
) -> None:
    rooms = await many_rooms(store, 4)
    client = SlidingClient(store, LOCAL)
    base = (await client.sync((0, 0))).pos
    required = [("m.room.name", "")]
    statements.take()
    await client.sync((0, 1), required=required)
    assert len(writes(statements)) == 1
    client.pos = base
    await client.sync((0, 2), required=required)
    assert len(writes(statements)) == 1

    stale = await state_of_pos(store, base)
    client.pos = base
    answer = await client.sync((0, 3), required=[("m.room.topic", "")])
    statements.take()
    number = await written(store, stale, rooms[0].room_id)
    assert [one == SQL_LOCK for one in writes(statements)] == [False, True, False]
    assert number == stale.columns.last_number + 2
    client.pos = answer.pos
    answer = await client.sync((0, 3), required=[("m.room.topic", "")])
    assert answer.rooms == {}, "it is still valid, as is the other one"
    await rooms_are_consistent(store)


async def test_a_state_waits_for_another_request_and_then_drops_its_rows(store: Store) -> None:
    """Two states are on top of the base. The client has confirmed one of them meanwhile.

    The write waits for the lock of a request that adds a state with rows. These rows go as well.
    """
    rooms = await many_rooms(store, 4)
    client = SlidingClient(store, LOCAL)
    base = (await client.sync((0, 0))).pos
    second = (await client.sync((0, 1))).pos
    on_base, on_second = [await state_of_pos(store, pos) for pos in (base, second)]
    async with store.database.transaction() as conn:
        changes = {await nid_of(store, rooms[3].room_id): ROOM}
        lost = await write_state(conn, on_base, changes, now_ms=time.time_ns() // 1_000_000)
        waiting = asyncio.create_task(written(store, on_second, rooms[2].room_id))
        await until_blocked(store)
    number = await waiting
    assert lost is not None
    assert number == lost + 1
    async with store.database.connection() as conn:
        numbers = await conn.fetchvals("SELECT number FROM sliding_rooms ORDER BY number")
        assert lost not in numbers
        assert number in numbers
    await rooms_are_consistent(store)


async def test_a_write_that_comes_too_late_deletes_nothing(store: Store) -> None:
    """Two states are on top of the base. The client confirms one while a request has the other."""
    rooms = await many_rooms(store, 4)
    client = SlidingClient(store, LOCAL)
    base = (await client.sync((0, 0))).pos
    first = (await client.sync((0, 1))).pos
    client.pos = base
    late = await state_of_pos(store, (await client.sync((0, 2))).pos)
    client.pos = first
    await client.sync((0, 3))
    before = await rows(store, "sliding_rooms")
    assert await written(store, late, rooms[0].room_id) is None
    assert await rows(store, "sliding_rooms") == before
    await rooms_are_consistent(store)


async def test_a_connection_that_expired_meanwhile_is_not_written(store: Store) -> None:
    rooms = await many_rooms(store, 2)
    client = SlidingClient(store, LOCAL)
    pos = (await client.sync((0, 0))).pos
    state = await state_of_pos(store, pos)
    client.pos = None
    await client.sync((0, 0))
    assert await written(store, state, rooms[1].room_id) is None
    assert await rows(store, "sliding_rooms") == 1


async def test_a_pos_before_a_confirmed_one_is_unknown(store: Store) -> None:
    await many_rooms(store, 3)
    client = SlidingClient(store, LOCAL)
    first = (await client.sync((0, 0))).pos
    await client.sync((0, 1))
    await client.sync((0, 2))
    client.pos = first
    with pytest.raises(UnknownPos):
        await client.sync((0, 1))


async def test_connections_of_a_device_are_independent(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    one, two = SlidingClient(store, LOCAL), SlidingClient(store, LOCAL, conn_id="two")
    assert set((await one.sync((0, 9))).rooms) == {room.room_id}
    assert set((await two.sync((0, 9))).rooms) == {room.room_id}
    event = room.message(ADMIN, "new")
    await append(store, event)
    for client in (one, two):
        assert ids((await client.sync((0, 9))).rooms[room.room_id].timeline) == ids([event])


async def test_a_new_connection_replaces_the_one_of_its_id(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    old = (await client.sync((0, 9))).pos
    client.pos = None
    assert set((await client.sync((0, 9))).rooms) == {room.room_id}
    assert await rows(store, "sliding_connections") == 1
    assert await rows(store, "sliding_rooms") == 1
    client.pos = old
    with pytest.raises(UnknownPos):
        await client.sync((0, 9))


async def test_many_begin_the_same_connection_at_once(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    clients = [SlidingClient(store, LOCAL) for _ in range(5)]
    await asyncio.gather(*(client.sync((0, 9)) for client in clients))
    assert await rows(store, "sliding_connections") == 1
    assert await rows(store, "sliding_rooms") == 1


@pytest.mark.parametrize(
    "user_id, device_id, conn_id",
    [(ADMIN, "DEVICE", ""), (LOCAL, "OTHER", ""), (LOCAL, "DEVICE", "other")],
)
async def test_a_pos_of_another_connection_is_unknown(
    store: Store, user_id: str, device_id: str, conn_id: str
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 9))
    foreign = SlidingClient(store, user_id, device_id=device_id, conn_id=conn_id)
    foreign.pos = client.pos
    with pytest.raises(UnknownPos):
        await foreign.sync((0, 9))


async def test_a_device_has_a_limited_number_of_connections(dsn: str) -> None:
    config = storage.Config(sliding_connections_max=2)
    async with storage.open(dsn, server_name="s1.test", config=config) as store:
        clients = [SlidingClient(store, LOCAL, conn_id=str(number)) for number in range(3)]
        for client in clients:
            await client.sync((0, 9))
        with pytest.raises(UnknownPos):
            await clients[0].sync((0, 9))
        for client in clients[1:]:
            await client.sync((0, 9))


async def test_unused_connections_are_deleted(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    old, used = SlidingClient(store, LOCAL), SlidingClient(store, LOCAL, conn_id="used")
    for client in (old, used):
        await client.sync((0, 9))
    async with store.database.connection() as conn:
        await conn.execute(
            "UPDATE sliding_connections SET used_ts = used_ts - $1::bigint",
            store.database.config.sliding_connection_keep_ms + 10_000,
        )
    await used.sync((0, 9))
    assert await delete_old_connections(store.database) == 1
    assert await rows(store, "sliding_rooms") == 1
    await used.sync((0, 9))
    with pytest.raises(UnknownPos):
        await old.sync((0, 9))


async def test_another_process_goes_on_with_a_connection(store: Store, dsn: str) -> None:
    rooms = await many_rooms(store, 3)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 1), required=[("m.room.name", "")])
    event = rooms[0].message(ADMIN, "new")
    await append(store, event)
    async with storage.open(dsn, server_name="s1.test", instance_name="two") as other:
        client.store = other
        answer = await client.sync((0, 2), required=[("m.room.name", "")])
        assert set(answer.rooms) == {rooms[0].room_id, rooms[2].room_id}
        assert ids(answer.rooms[rooms[0].room_id].timeline) == ids([event])
        client.store = store
        assert (await client.sync((0, 2), required=[("m.room.name", "")])).rooms == {}


async def test_rows_of_rooms_do_not_pile_up(store: Store) -> None:
    rooms = await many_rooms(store, 3)
    client = SlidingClient(store, LOCAL)
    for number in range(12):
        await append(store, rooms[number % 3].message(ADMIN, str(number)))
        await client.sync((0, number % 2), limit=1 + number % 4)
    assert await rows(store, "sliding_rooms") <= 3 * 3
    await rooms_are_consistent(store)


async def test_a_user_without_rooms_has_a_connection(store: Store) -> None:
    client = SlidingClient(store, LOCAL)
    assert (await client.sync((0, 9))).rooms == {}
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    assert set((await client.sync((0, 9))).rooms) == {room.room_id}


async def test_a_client_begins_again_on_another_database(store: Store, another_dsn: str) -> None:
    async with storage.open(another_dsn, server_name="s1.test") as other:
        client = SlidingClient(other, LOCAL)
        await client.sync((0, 9))
        client.store = store
        with pytest.raises(UnknownPos, match="another database") as unknown:
            await client.sync((0, 9))
        assert responses.error(unknown.value)[1]["errcode"] == "M_UNKNOWN_POS"
        for client.pos in (unknown.value.pos[:-1], (await other.sync(LOCAL)).next_batch):
            with pytest.raises(InvalidToken):
                await client.sync((0, 9))


async def test_a_token_of_another_kind_is_invalid(store: Store) -> None:
    client = SlidingClient(store, LOCAL)
    for pos in ((await store.sync(LOCAL)).next_batch, "", "c1~00000000~1.1~~00000000"):
        client.pos = pos
        with pytest.raises(InvalidToken):
            await client.sync((0, 9))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingList([(5, 2)]),
        lambda: SlidingList([(-1, 2)]),
        lambda: SlidingList([(0,)]),  # type: ignore[list-item]
        lambda: SlidingList("0-9"),  # type: ignore[arg-type]
        lambda: SlidingList([(0, 1)] * 101),
        lambda: SlidingList(timeline_limit=-1),
        lambda: SlidingList(filters={"is_secret": True}),  # type: ignore[arg-type]
        lambda: SlidingList(filters=True),  # type: ignore[arg-type]
        lambda: SlidingList(required_state=[("m.room.name",)]),  # type: ignore[list-item]
        lambda: SlidingList(required_state=[("a\0", "")]),
        lambda: SlidingList(required_state=[("a", "$LAZY")]),
        lambda: SlidingList(required_state=[("a" * 256, "")]),
        lambda: SlidingList(excluded_state=[("m.room.member", "$LAZY")]),
        lambda: SlidingList(required_state=[("a", str(n)) for n in range(1001)]),
        lambda: SlidingSyncRequest(lists={str(n): SlidingList() for n in range(101)}),
        lambda: SlidingSyncRequest(lists={"": SlidingList()}),
        lambda: SlidingSyncRequest(lists={"a": 7}),  # type: ignore[dict-item]
        lambda: SlidingSyncRequest("x" * 256),
        lambda: SlidingSyncRequest("\0"),
        lambda: SlidingSyncRequest(room_subscriptions={"none": 7}),  # type: ignore[dict-item]
        lambda: SlidingSyncRequest(extensions=["typing"]),
        lambda: SlidingSyncRequest(extension_lists=["none"]),
        lambda: SlidingSyncRequest(to_device_limit=0),
    ],
)
def test_a_malformed_request_is_refused(make: object) -> None:
    with pytest.raises(InputError) as raised:
        make()  # type: ignore[operator]
    assert len(str(raised.value)) < 600


def test_filters_may_be_a_mapping() -> None:
    given: Any = {"is_dm": True, "room_types": [None]}
    assert SlidingList(filters=given).filters == SlidingFilter(is_dm=True, room_types=[None])


async def test_a_user_of_another_server_is_refused(store: Store) -> None:
    with pytest.raises(InputError):
        await SlidingClient(store, UserId("@user2:s2.test")).sync((0, 9))
    with pytest.raises(InputError):
        await SlidingClient(store, LOCAL, device_id="").sync((0, 9))
