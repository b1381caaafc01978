"""Transactions whose events have missing parents: the receiver requests what lies in between."""

import pytest

from tests.federation.peers import Homeserver, fail, shown
from tests.federation.rooms import agree, outcomes, shared_room


async def test_a_transaction_without_a_gap_asks_nobody(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    one.network.calls.clear()
    sent = await one.say(room_id, "hello")
    assert await outcomes(other, one, sent) == ["stored"]
    assert not one.network.calls
    await agree(room_id, one, other)


@pytest.mark.parametrize("version", ["1", "6", "12"])
async def test_a_gap_of_thirty_messages_is_filled(two: list[Homeserver], version: str) -> None:
    one, other = two
    room_id = await shared_room(one, other, version=version)
    await other.fill(room_id)
    sent = [await one.say(room_id, f"message {number}") for number in range(31)]
    one.network.calls.clear()
    assert await outcomes(other, one, sent[-1]) == ["stored"]
    assert one.network.calls["get_missing_events"] == 2
    assert one.network.calls["state_ids"] == 0
    history = await shown(one, room_id)
    assert (await shown(other, room_id))[-31:] == history[-31:]
    await agree(room_id, one, other)


async def test_a_gap_of_300_messages_is_left_and_the_state_fetched(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    await other.fill(room_id)
    for number in range(150):
        await one.say(room_id, f"message {number}")
    await one.do(room_id, "user", "m.room.name", {"name": "changed"}, state_key="")
    for number in range(150):
        await one.say(room_id, f"message {number}")
    last = await one.say(room_id, "the last")
    one.network.calls.clear()
    assert await outcomes(other, one, last) == ["stored"]
    assert one.network.calls["get_missing_events"] == 5
    assert one.network.calls["state_ids"] == 1
    assert await other.store.current_state(room_id) == await one.store.current_state(room_id)
    assert len(await other.store.gaps(room_id)) == 1
    await agree(room_id, one, other)


async def test_a_fork_is_joined_when_both_sides_arrive(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    left = [await one.say(room_id, f"left {number}") for number in range(12)]
    right = [await other.say(room_id, f"right {number}") for number in range(12)]
    await one.receive(other, right[-1:])
    await other.receive(one, left[-1:])
    merged = await one.say(room_id, "both")
    assert len(merged["prev_events"]) == 2
    await other.receive(one, [merged])
    await agree(room_id, one, other)


async def test_another_server_is_asked_where_the_sender_fails(three: list[Homeserver]) -> None:
    one, other, third = three
    room_id = await shared_room(one, other, third)
    sent = [await one.say(room_id, f"message {number}") for number in range(9)]
    await third.receive(one, sent)
    one.network.faults["s1.test", "get_missing_events"] = fail
    assert await outcomes(other, one, sent[-1]) == ["stored"]
    await agree(room_id, one, other, third)
