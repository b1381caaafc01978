"""Joins with the members omitted: what works before the members are fetched, and after it."""

import pytest

from storage import RoomId
from tests.federation.partial import Json, join_partially
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC, agree
from tests.maintenance.rooms import findings

MEMBERS = ("ann", "bob", "cid")


async def crowded(one: Homeserver, version: str = "12") -> RoomId:
    """A public room of the first server with a few members."""
    room_id = await one.store.create_room(one.user(), room_version=version, initial_state=[PUBLIC])
    for name in MEMBERS:
        await member(one, room_id, name, "join")
    return room_id


async def member(server: Homeserver, room_id: RoomId, name: str, membership: str) -> Json:
    return await server.do(
        room_id, name, "m.room.member", {"membership": membership}, state_key=server.user(name)
    )


@pytest.mark.parametrize("version", ["1", "6", "12"])
async def test_a_partial_room_is_used_and_completed(two: list[Homeserver], version: str) -> None:
    one, other = two
    room_id = await crowded(one, version)
    joined = await join_partially(room_id, other, one)
    assert (joined.outcome, joined.is_partial) == ("joined", True), joined
    [partial] = await other.store.partial_rooms()
    assert (partial.room_id, partial.join_event_id) == (room_id, joined.event_id)
    assert (partial.origin, sorted(partial.servers)) == ("s1.test", ["s1.test"])
    assert other.user() in await other.store.member_ids(room_id)
    assert one.user("ann") not in await other.store.member_ids(room_id)

    said = await one.say(room_id, "hello", "ann")
    [result] = (await other.receive(one, [said])).values()
    assert result.outcome == "stored", result
    assert one.user("ann") in await other.store.member_ids(room_id)
    mine = await other.say(room_id, "hello ann")
    [result] = (await one.receive(other, [mine])).values()
    assert result.outcome == "stored", result
    before = await other.store.sync(other.user())
    bodies = [event.json["content"].get("body") for event in before.join[room_id].timeline.events]
    assert bodies[-2:] == ["hello", "hello ann"]

    assert await findings(other.store) == []
    assert await other.receiver.complete_partial_rooms() == [room_id]
    assert await findings(other.store) == []
    assert await other.store.partial_rooms() == []
    assert await other.receiver.complete(room_id)
    await agree(room_id, one, other)
    after = await other.store.sync(other.user(), since=before.next_batch)
    assert after.join[room_id].timeline.events == []
    came = {event.state_key for event in after.join[room_id].state_after}
    assert came == {one.user("bob"), one.user("cid"), one.user()}
    again = await other.store.sync(other.user(), since=after.next_batch)
    assert room_id not in again.join
    await other.receive(one, [await one.say(room_id, "more", "bob")])
    last = await other.store.sync(other.user(), since=again.next_batch)
    assert last.join[room_id].state_after == []
