"""The first responses of a connection: whole rooms, then what is new of them."""

from storage import Store
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room
from tests.sliding.client import EVERYTHING, SlidingClient, state_of


async def test_the_first_response_has_whole_rooms(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    room.message(ADMIN, "one")
    await deliver(store, room)
    answer = await SlidingClient(store, LOCAL).sync((0, 19), required=EVERYTHING, limit=3)
    assert answer.lists["all"].count == 1
    shown = answer.rooms[room.room_id]
    assert (shown.initial, shown.membership, shown.name) == (True, "join", "first")
    assert ids(shown.timeline) == ids(room.events[-3:])
    assert shown.limited
    assert (shown.num_live, shown.joined_count, shown.invited_count) == (0, 2, 0)
    assert {event.event_id for event in shown.required_state} == set(room.state.values())
    assert shown.bump_stamp == shown.timeline[-1].stream_ordering
    assert shown.lists == ("all",)


async def test_later_responses_have_what_is_new(store: Store) -> None:
    room, quiet = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    await deliver(store, room)
    await deliver(store, quiet)
    client = SlidingClient(store, LOCAL)
    assert set((await client.sync((0, 19), required=EVERYTHING)).rooms) == {
        room.room_id,
        quiet.room_id,
    }
    assert (await client.sync((0, 19), required=EVERYTHING)).rooms == {}
    message, name = room.message(ADMIN, "two"), room.name(ADMIN, "second")
    await append(store, message, name)
    answer = await client.sync((0, 19), required=EVERYTHING)
    assert set(answer.rooms) == {room.room_id}
    shown = answer.rooms[room.room_id]
    assert ids(shown.timeline) == ids([message, name])
    assert (shown.initial, shown.limited, shown.num_live) == (False, False, 2)
    assert shown.name == "second"
    assert shown.changed == {"name"}
    assert state_of(shown) == {("m.room.name", "")}


async def test_a_request_takes_few_statements(store: Store, statements: StatementLog) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19))
    await append(store, room.message(ADMIN, "two"))
    statements.take()
    await client.sync((0, 19))
    assert len(statements.take()) <= 4
