"""Servers that lie, fail or hang while a gap is filled: bounded work, and a result for each event.

The first server has sent an event after a gap that is too large for get_missing_events, so the
state before it is requested.
"""

import asyncio
from typing import Any

import pytest

from storage import EventId, RoomId
from storage.errors import UnknownRoom
from storage.event import event_id, sign
from storage.federation import Receiver, ReceiverLimits
from storage.testing import signing_key
from tests.federation.hanging import hang
from tests.federation.peers import Homeserver, Json, fail
from tests.federation.rooms import agree, outcomes, shared_room

NAME = "m.room.name"
ONE_ROUND = ReceiverLimits(missing_rounds_max=1, missing_events_max=3, request_seconds=60.0)


def limit(server: Homeserver, limits: ReceiverLimits = ONE_ROUND) -> None:
    server.receiver = Receiver(server.store, server.remote, limits=limits)


async def lagging(one: Homeserver, *others: Homeserver) -> tuple[RoomId, Json]:
    """A room in which the second server has missed messages and a name; the latest event."""
    room_id = await shared_room(one, *others)
    await others[0].fill(room_id)
    limit(others[0])
    for number in range(4):
        await one.say(room_id, f"missed {number}")
    await one.do(room_id, "user", NAME, {"name": "missed"}, state_key="")
    sent = [await one.say(room_id, f"also missed {number}") for number in range(4)]
    for third in others[1:]:
        await third.fill(room_id)
        await third.receive(one, one.sent)
    return room_id, sent[-1]


async def test_without_faults_the_state_is_fetched(two: list[Homeserver]) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)
    assert await outcomes(other, one, latest) == ["stored"]
    assert one.network.calls["state_ids"] == 1
    assert await other.store.current_state(room_id) == await one.store.current_state(room_id)
    await agree(room_id, one, other)


def replaced(body: Json, name: str, change: Any) -> Json:
    return {**body, name: change(body[name])}


async def _without_create(server: Homeserver, ids: list[str]) -> list[str]:
    events = await server.store.events(list(map(EventId, ids)))
    return [one for one in ids if events[EventId(one)].type != "m.room.create"]


async def test_a_state_that_no_room_can_have_is_refused(two: list[Homeserver]) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)
    elsewhere = await shared_room(one, other)
    foreign = (await one.store.current_state(elsewhere))["m.room.join_rules", ""]
    before = await one.store.state_before(EventId(event_id(latest, "12")))
    second_rules = await one.do(
        room_id, "user", "m.room.join_rules", {"join_rule": "knock"}, state_key=""
    )
    message = one.sent[0]

    def adding(added: str) -> Any:
        async def fault(body: Json) -> Json:
            return replaced(body, "pdu_ids", lambda ids: [*ids, added])

        return fault

    async def no_create(body: Json) -> Json:
        return {**body, "pdu_ids": await _without_create(one, body["pdu_ids"])}

    async def cut(_: Json) -> Json:
        return {"pdu_ids": [before["m.room.create", ""]]}

    async def text(body: Json) -> Json:
        return replaced(body, "pdu_ids", lambda ids: [*ids, 5])

    async def no_object(_: Json) -> Any:
        return []

    faults = {
        "foreign": adding(foreign),
        "message": adding(event_id(message, "12")),
        "twice": adding(event_id(second_rules, "12")),
        "no create": no_create,
        "cut": cut,
        "text": text,
        "no object": no_object,
    }
    for name, fault in faults.items():
        one.network.faults["s1.test", "state_ids"] = fault
        results = await other.receive(one, [latest])
        [result] = results.values()
        assert result.outcome == "missing_parents", name
        assert "s1.test: " in (result.reason or ""), name
        assert await other.store.events(results) == {}, name
    one.network.faults.clear()
    assert await outcomes(other, one, latest) == ["stored"]
    await other.receive(one, [second_rules])
    await agree(room_id, one, other)


async def test_a_false_state_of_one_server_does_not_reject_the_event(
    three: list[Homeserver],
) -> None:
    """The sender is banned in the state that the first server returns, and not in the others'."""
    one, other, third = three
    room_id = await shared_room(one, other, third)
    for server in (other, third):
        await server.fill(room_id)
    missed = await third.say(room_id, "missed")
    latest = await third.say(room_id, "the latest")
    await one.receive(third, [missed, latest])
    ban = await one.do(
        room_id, "user", "m.room.member", {"membership": "ban"}, state_key=third.user()
    )

    async def banned(body: Json) -> Json:
        joined = (await third.store.current_state(room_id))["m.room.member", third.user()]
        ids = [event_id(ban, "12") if one == joined else one for one in body["pdu_ids"]]
        return {**body, "pdu_ids": ids}

    limit(other)
    one.network.faults["s1.test", "state_ids"] = banned
    for name in ("s1.test", "s3.test"):
        one.network.faults[name, "get_missing_events"] = fail
    assert await outcomes(other, one, latest) == ["stored"]
    assert one.network.calls["state_ids"] == 2


async def test_events_of_another_room_and_forged_ones_are_not_stored(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)
    elsewhere = await shared_room(one, other)
    foreign = await one.say(elsewhere, "foreign")
    other.receiver = Receiver(other.store, other.remote)

    async def mixed(body: Json) -> Json:
        forged = [{**event, "content": {"body": "forged"}} for event in body["events"][:2]]
        unsigned = [{**event, "signatures": {}} for event in body["events"][2:4]]
        return {"events": [foreign, *forged, *unsigned, *body["events"][4:]]}

    one.network.faults["s1.test", "get_missing_events"] = mixed
    assert await outcomes(other, one, latest) == ["stored"]
    assert await other.store.events([EventId(event_id(foreign, "12"))]) == {}
    one.network.faults.clear()
    await agree(room_id, one, other)
    history = await other.store.messages(room_id, other.user(), limit=100)
    assert "forged" not in [event.content.get("body") for event in history.chunk]
    assert all(event.json["signatures"] for event in history.chunk)


def chain_of(like: Json, length: int) -> list[Json]:
    """Signed messages, each the parent of the next; the parent of the first is nowhere."""
    chain: list[Json] = []
    parent = "$" + "x" * 43
    for number in range(length):
        pdu = {key: like[key] for key in ("auth_events", "room_id", "sender", "type")}
        pdu |= {"content": {"body": str(number)}, "depth": 1, "origin_server_ts": 1}
        pdu["prev_events"] = [parent]
        chain.append(sign(pdu, "12", "s1.test", signing_key("s1.test")))
        parent = event_id(chain[-1], "12")
    return chain


async def test_a_state_is_used_only_whole(three: list[Homeserver]) -> None:
    """A server does not return an event of its state: another returns it, or the gap stays open."""
    one, other, third = three
    room_id, latest = await lagging(one, other, third)
    for name in ("s1.test", "s3.test"):
        one.network.faults[name, "event"] = fail
    assert await outcomes(other, one, latest) == ["missing_parents"]
    del one.network.faults["s3.test", "event"]
    assert await outcomes(other, one, latest) == ["stored"]
    assert await other.store.current_state(room_id) == await one.store.current_state(room_id)
    await agree(room_id, one, other, third)


async def test_a_state_with_an_event_of_an_unknown_room_makes_no_room(
    two: list[Homeserver],
) -> None:
    one, other = two
    _, latest = await lagging(one, other)
    unknown = await one.store.create_room(one.user())
    state = await one.store.current_state(unknown)

    async def foreign(body: Json) -> Json:
        return replaced(body, "pdu_ids", lambda ids: [*ids, *state.values()])

    one.network.faults["s1.test", "state_ids"] = foreign
    assert await outcomes(other, one, latest) == ["missing_parents"]
    assert await other.store.events(list(state.values())) == {}
    with pytest.raises(UnknownRoom):
        await other.store.current_state(unknown)


async def test_events_that_are_not_connected_to_the_gap_are_dropped(
    two: list[Homeserver],
) -> None:
    """A signed event of the room whose parents are nowhere would cost the request of a state."""
    one, other = two
    room_id, latest = await lagging(one, other)
    limit(other, ReceiverLimits())
    [unrelated] = chain_of(latest, 1)

    async def more(body: Json) -> Json:
        return {"events": [unrelated, *body["events"]]}

    one.network.faults["s1.test", "get_missing_events"] = more
    assert await outcomes(other, one, latest) == ["stored"]
    assert one.network.calls["state_ids"] == 0
    assert await other.store.events([EventId(event_id(unrelated, "12"))]) == {}
    await agree(room_id, one, other)


async def test_without_the_state_before_the_lowest_event_that_of_the_latest_is_used(
    two: list[Homeserver],
) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)

    async def fail_once(body: Json) -> Json:
        return body if one.network.calls["state_ids"] > 1 else await fail(body)

    one.network.faults["s1.test", "state_ids"] = fail_once
    assert await outcomes(other, one, latest) == ["stored"]
    [gap] = await other.store.gaps(room_id)
    assert gap.children == (event_id(latest, "12"),)
    await agree(room_id, one, other)


async def test_an_endless_gap_ends(two: list[Homeserver]) -> None:
    """Each answer has new events, whose parents are missing again."""
    one, other = two
    room_id, latest = await lagging(one, other)
    limit(other, ReceiverLimits(missing_rounds_max=4, missing_events_max=5))
    chain = chain_of(latest, 100)
    last = chain.pop()

    async def endless(_: Json) -> Json:
        return {"events": [chain.pop() for _ in range(5)]}

    one.network.faults["s1.test", "get_missing_events"] = endless
    [result] = (await other.receive(one, [last])).values()
    assert result.outcome == "missing_parents"
    assert one.network.calls["get_missing_events"] == 4
    assert await other.store.gaps(room_id) == []
    assert await outcomes(other, one, latest) == ["stored"]


async def test_a_slow_server_costs_its_time_once_and_another_fills_the_gap(
    three: list[Homeserver],
) -> None:
    one, other, third = three
    room_id, latest = await lagging(one, other, third)
    hanging: list[str] = []

    def slow(request: str) -> Any:
        async def fault(body: Json) -> Json:
            hanging.append(request)
            return await hang(body)

        return fault

    for request in ("get_missing_events", "state_ids", "backfill"):
        one.network.faults["s1.test", request] = slow(request)
    assert await outcomes(other, one, latest) == ["stored"]
    assert hanging == ["get_missing_events", "state_ids"], "each request once"
    await agree(room_id, one, other, third)


async def test_where_all_fail_the_event_waits_and_says_why(two: list[Homeserver]) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)

    async def broken(_: Json) -> Json:
        raise ValueError("not JSON")

    one.network.faults["s1.test", "get_missing_events"] = hang
    one.network.faults["s1.test", "state_ids"] = broken
    [result] = (await other.receive(one, [latest])).values()
    assert result.outcome == "missing_parents"
    assert "s1.test: ValueError: not JSON" in (result.reason or "")
    assert await other.store.gaps(room_id) == []
    one.network.faults.clear()
    assert await outcomes(other, one, latest) == ["stored"]
    await agree(room_id, one, other)


async def test_events_without_a_gap_do_not_wait_for_one(two: list[Homeserver]) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)
    first_missed = next(event for event in one.sent if event["content"].get("body") == "missed 0")
    is_asked, is_stored = asyncio.Event(), asyncio.Event()

    async def signal(body: Json) -> Json:
        is_asked.set()
        await is_stored.wait()
        return await hang(body)

    one.network.faults["s1.test", "get_missing_events"] = signal
    one.network.faults["s1.test", "state_ids"] = fail
    slow = asyncio.create_task(outcomes(other, one, latest))
    await is_asked.wait()
    assert await outcomes(other, one, first_missed) == ["stored"]
    assert not slow.done()
    is_stored.set()
    assert await slow == ["missing_parents"]
    one.network.faults.clear()
    assert await outcomes(other, one, latest) == ["stored"]
    await agree(room_id, one, other)


async def test_transactions_with_the_same_gap_request_it_once(two: list[Homeserver]) -> None:
    one, other = two
    room_id, latest = await lagging(one, other)
    limit(other, ReceiverLimits())

    is_asked, others_wait = asyncio.Event(), asyncio.Event()

    async def slowly(body: Json) -> Json:
        is_asked.set()
        await others_wait.wait()
        return body

    one.network.faults["s1.test", "get_missing_events"] = slowly
    one.network.calls.clear()
    first = asyncio.ensure_future(outcomes(other, one, latest))
    await is_asked.wait()
    others = [asyncio.ensure_future(outcomes(other, one, latest)) for _ in range(4)]
    for number in range(10):  # appends take turns, so that the others come to their second one
        await other.say(room_id, f"meanwhile {number}")
    others_wait.set()
    found = await asyncio.gather(first, *others)
    assert sorted(outcome for [outcome] in found) == ["duplicate"] * 4 + ["stored"]
    assert one.network.calls["get_missing_events"] == 1
    for event in other.sent:
        await one.receive(other, [event])
    await agree(room_id, one, other)
