"""Transactions whose events have missing parents: the receiver requests what lies in between."""

import asyncio
from typing import Any

import pytest

import storage
from storage.errors import InputError, UnknownRoom
from storage.event import event_id, parse, sign
from storage.federation import Receiver, ReceiverLimits
from storage.federation.gap import connected
from storage.ids import EventId, RoomId
from storage.testing import RoomBuilder, signing_key
from tests.federation.partial import join_partially
from tests.federation.peers import QUICK, Homeserver, fail, shown
from tests.federation.rooms import PUBLIC, agree, outcomes, shared_room


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


@pytest.mark.parametrize("version", ["1", "6", "12"])
async def test_own_events_between_the_missing_ones_are_not_requested(
    two: list[Homeserver], version: str
) -> None:
    """The other server has read everything of this one, whose own branch is as long as the gap."""
    one, other = two
    room_id = await shared_room(one, other, version=version)
    await other.fill(room_id)
    for number in range(90):
        await one.receive(other, [await other.say(room_id, f"here {number}")])
        await one.say(room_id, f"missed {number}")
    one.network.calls.clear()
    assert await outcomes(other, one, one.sent[-1]) == ["stored"]
    assert one.network.calls["get_missing_events"] == 5
    assert one.network.calls["state_ids"] == 0
    assert await other.store.gaps(room_id) == []
    await agree(room_id, one, other)


@pytest.mark.parametrize("is_partial", [False, True])
async def test_what_a_gap_has_left_is_filled_by_the_next_transactions(
    two: list[Homeserver], is_partial: bool
) -> None:
    """Nobody pages back. What came before the join stays where it is.

    A room whose members are missing is filled like any other, before and after its completion.
    """
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    before = [await one.say(room_id, f"before the join {number}") for number in range(3)]
    joined = await (join_partially(room_id, other, one) if is_partial else other.join(room_id, one))
    assert joined.is_partial is is_partial
    one.sent.clear()
    for number in range(350):
        await one.say(room_id, f"missed {number}")
    missed = [EventId(event_id(pdu, "12")) for pdu in one.sent]
    assert await outcomes(other, one, one.sent[-1]) == ["stored"]
    assert len(await other.store.events(missed)) == 101
    for stored in (201, 301, 350, 350):
        assert await outcomes(other, one, await one.say(room_id, "next")) == ["stored"]
        assert len(await other.store.events(missed)) == stored
        if is_partial and stored == 301:
            assert await other.receiver.complete_partial_rooms() == [room_id]
    assert await other.store.events([EventId(event_id(pdu, "12")) for pdu in before]) == {}
    [left] = await other.store.gaps(room_id)
    assert left.event_id == EventId(event_id(before[-1], "12"))
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


async def test_a_gap_on_a_fork_does_not_reach_below_the_join(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await one.store.create_room(one.user(), initial_state=[PUBLIC])
    before = [await one.say(room_id, f"before the join {number}") for number in range(3)]
    await other.join(room_id, one)
    await other.say(room_id, "one side")
    sent = [await one.say(room_id, f"another side {number}") for number in range(3)]
    assert await outcomes(other, one, sent[-1]) == ["stored"]
    ids = [EventId(event_id(pdu, "12")) for pdu in before]
    assert await other.store.events(ids) == {}
    assert len(await other.store.gaps(room_id)) == 1


async def test_another_server_is_asked_where_the_sender_fails(three: list[Homeserver]) -> None:
    one, other, third = three
    room_id = await shared_room(one, other, third)
    sent = [await one.say(room_id, f"message {number}") for number in range(9)]
    await third.receive(one, sent)
    one.network.faults["s1.test", "get_missing_events"] = fail
    assert await outcomes(other, one, sent[-1]) == ["stored"]
    await agree(room_id, one, other, third)


async def test_a_task_that_is_cancelled_at_any_request_is_completed_by_the_next(
    two: list[Homeserver],
) -> None:
    """As by a process that is killed: whatever was stored by then is used, and nothing else."""
    one, other = two
    room_id = await shared_room(one, other)
    await other.fill(room_id)
    other.receiver = Receiver(
        other.store, other.remote, limits=ReceiverLimits(missing_rounds_max=1, missing_events_max=2)
    )
    before = await other.store.current_state(room_id)
    for number in range(3):
        await one.do(room_id, "user", f"test.type{number}", {}, state_key="")
    latest = await one.say(room_id, "latest")
    number, found = 1, None
    while found is None:
        found = await one.network.interrupted(outcomes(other, one, latest), number)
        if found is None:
            assert await other.store.current_state(room_id) == before
            assert await other.store.events([EventId(event_id(latest, "12"))]) == {}
        number += 1
    assert found == ["stored"]
    assert number > 4
    await agree(room_id, one, other)


async def test_two_processes_fill_the_same_gap(two: list[Homeserver], another_dsn: str) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    await other.fill(room_id)
    for number in range(30):
        await one.say(room_id, f"missed {number}")
    latest = await one.say(room_id, "latest")
    second = storage.open(another_dsn, server_name="s2.test", instance_name="second")
    async with second as store:
        receivers = [other.receiver, Receiver(store, other.remote, limits=QUICK)]
        found = await asyncio.gather(
            *(receiver.transaction("s1.test", [latest]) for receiver in receivers)
        )
    [first], [last] = (results.values() for results in found)
    assert sorted([first.outcome, last.outcome]) in (["duplicate", "stored"], ["stored"] * 2)
    assert len(await other.store.forward_extremities(room_id)) == 1
    await agree(room_id, one, other)


async def test_a_transaction_is_bounded(two: list[Homeserver]) -> None:
    one, other = two
    room_id = await shared_room(one, other)
    with pytest.raises(InputError, match="at most 50"):
        await other.receive(one, [{}] * 51)
    with pytest.raises(InputError):
        await other.receiver.backfill(room_id, 0)
    with pytest.raises(UnknownRoom):
        await other.receiver.backfill(RoomId("!nowhere:s1.test"), 1)
    with pytest.raises(InputError):
        ReceiverLimits(pdus_max=0)


async def test_an_event_whose_auth_events_are_missing_gets_its_auth_chain(
    two: list[Homeserver],
) -> None:
    """Its parents are stored, but it cites power levels that came later in another branch."""
    one, other = two
    room_id = await shared_room(one, other)
    await other.fill(room_id)
    state = await one.store.current_state(room_id)
    levels = await one.do(
        room_id, "user", "m.room.power_levels", {"users_default": 1}, state_key=""
    )
    child = await one.say(room_id, "it cites the new levels")
    cited = event_id(levels, "12")
    assert cited in child["auth_events"]
    assert cited not in state.values()
    beside = {key: child[key] for key in child if key not in ("hashes", "signatures")}
    beside |= {"prev_events": levels["prev_events"], "depth": levels["depth"]}
    pdu = sign(beside, "12", "s1.test", signing_key("s1.test"))

    async def chain(_: dict[str, object]) -> dict[str, object]:
        events = await one.store.event_auth(EventId(event_id(child, "12")))
        return {"auth_chain": [event.json for event in events]}

    one.network.faults["s1.test", "event_auth"] = chain
    [result] = (await other.receive(one, [pdu])).values()
    assert result.outcome in ("stored", "rejected", "soft_failed"), result
    assert one.network.calls["event_auth"] == 1
    assert set(await other.store.events([EventId(cited)])) == {cited}


@pytest.mark.parametrize("lying", [("s1.test",), ("s1.test", "s3.test")])
async def test_what_one_server_lacks_is_requested_from_the_next(
    three: list[Homeserver], lying: tuple[str, ...]
) -> None:
    """And where no server has it, the gap is paused, while others are filled."""
    one, other, third = three
    room_id = await shared_room(one, other, third)
    for server in (other, third):
        await server.fill(room_id)
    other.receiver = Receiver(
        other.store, other.remote, limits=ReceiverLimits(missing_rounds_max=1, missing_events_max=1)
    )
    for _ in range(2):
        for number in range(4):
            await one.say(room_id, f"missed {number}")
        assert await outcomes(other, one, one.sent[-1]) == ["stored"]
    await third.receive(one, one.sent)
    lacked = {gap.event_id for gap in await other.store.gaps(room_id)}
    assert len(lacked) == 2
    hidden = min(lacked)

    async def without(body: dict[str, Any]) -> dict[str, Any]:
        return {"pdus": [pdu for pdu in body["pdus"] if event_id(pdu, "12") != hidden]}

    for name in lying:
        one.network.faults[name, "backfill"] = without
    assert (await other.receiver.backfill(room_id, 100)).outcome == "stored"
    left = [(gap.event_id, gap.failures) for gap in await other.store.gaps(room_id)]
    assert left == ([(hidden, 1)] if len(lying) == 2 else [])
    if left:
        assert (await other.receiver.backfill(room_id, 100)).outcome == "paused"
        await other.store.server_up("s3.test")
        del one.network.faults["s3.test", "backfill"]
        assert (await other.receiver.backfill(room_id, 100)).outcome == "stored"
    assert (await other.receiver.backfill(room_id, 100)).outcome == "nothing_missing"
    await agree(room_id, one, other, third)


def test_events_of_a_gap_stay_in_the_order_of_the_answer() -> None:
    """It must not follow from the order of a set, which is another in each process."""
    room = RoomBuilder("11", seed=4)
    room.start(room.user(1))
    start = list(room.events)
    forks = [room.fork(1)[0].message(room.user(1), str(number)) for number in range(12)]
    events = {one.event_id: parse(one.pdu, "11") for one in (*start, *forks)}
    ids = {one.event_id for one in forks}
    assert list(connected(events, ids)) == list(events)
    assert list(connected(events, list(reversed(events)))) == list(events)
    assert list(connected(events, [forks[0].event_id])) == list(events)[: len(start) + 1]
