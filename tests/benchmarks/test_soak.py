"""The soak detects errors: a client that differs from the server, an event reported twice."""

import pytest

import storage
from benchmarks.soak_checks import SoakClient, differences, say
from benchmarks.soak_processes import SERVER, room_of
from storage import EventId, UserId


async def test_a_client_that_knows_otherwise_is_found(dsn: str) -> None:
    room = room_of(0)
    events = room.events[:60]
    assert [event.event_id for event in room_of(0).events[:60]] == [
        event.event_id for event in events
    ], "every writer makes the same room"
    user = next(event.sender for event in events if event.sender.endswith(f":{SERVER}"))
    async with storage.open(dsn, server_name=SERVER) as store:
        client = SoakClient(UserId(user))
        await store.append([event.pdu for event in events[:40]], room_version=room.version)
        first = await store.sync(client.user_id, timeline_limit=100)
        client.hear(first)
        await store.append([event.pdu for event in events[40:]], room_version=room.version)
        client.hear(await store.sync(client.user_id, since=client.since, timeline_limit=100))
        assert await differences(store, client) == []
        [room_id] = client.states
        with pytest.raises(RuntimeError, match="twice"):
            client.hear(first)
        timeline = client.timelines[room_id]
        timeline[-1], timeline[-2] = timeline[-2], timeline[-1]
        created = client.states[room_id]["m.room.create", ""]
        client.states[room_id]["m.room.create", ""] = EventId("$other")
        state, order = await differences(store, client)
        assert state.startswith(
            f"{user}: state of {room_id}: ('m.room.create', '') $other told, {created} now"
        )
        assert order == f"{user}: timeline of {room_id}: in another order"


@pytest.mark.parametrize("number", range(12))
async def test_a_last_message_is_stored(dsn: str, number: int) -> None:
    """In rooms of every version."""
    room = room_of(number)
    async with storage.open(dsn, server_name=SERVER) as store:
        for event in room.events[:60]:
            await store.append([event.pdu], room_version=room.version)
        state = await store.current_state(room.room_id)
        member = next(
            key for (kind, key) in state if kind == "m.room.member" and key == room.events[0].sender
        )
        assert await say(store, room.room_id, UserId(member))
