"""Verdicts of the caller: a refused event is soft-failed, until it is readmitted."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

import storage
from storage import InputError, InvalidIdentifier, Store, UnknownEvent
from storage.ids import EventId, RoomId
from storage.maintenance.verify import verify
from storage.testing import BuiltEvent
from storage.testing.generate import build_room
from storage.testing.world import ALL_ACTIONS, Odd, Shape
from tests.persist.planning import SERVER, begun, take
from tests.persist.tables import logical_tables
from tests.persist.writing import WRITES, listen, lossy

SHAPE = Shape(
    "verdicts",
    mix=ALL_ACTIONS,
    members=6,
    fork_rate=0.1,
    odd=Odd(early_redaction=0.02, soft_failed=0.02, rejected=0.02),
)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def refuse(store: Store, event: BuiltEvent, reason: str = "spam", **how: Any) -> None:
    [result] = await take(store, event, refused={event.event_id: reason}, **how)
    assert (result.outcome, result.reason) == ("soft_failed", reason)


async def timeline(store: Store, user: str, since: str | None = None) -> list[EventId]:
    answer = await store.sync(user, since=since, timeline_limit=100)
    return [one.event_id for room in answer.join.values() for one in room.timeline.events]


async def page(store: Store, room_id: RoomId, user: str) -> list[EventId]:
    return [one.event_id for one in (await store.messages(room_id, user, limit=100)).chunk]


async def findings(store: Store) -> list[str]:
    return [str(finding) async for finding in verify(store.database, server_name=SERVER)]


async def test_a_refused_event_is_stored_and_hidden(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    before = await store.sync(admin)
    spam = room.message(other, "spam")
    heads = await store.forward_extremities(room.room_id)
    await refuse(store, spam)
    kept = await store.event(spam.event_id)
    assert kept is not None
    assert (kept.soft_failed, kept.refused, kept.rejected) == (True, "spam", None)
    assert await store.forward_extremities(room.room_id) == heads
    assert await timeline(store, admin) == await timeline(store, admin, None)
    assert spam.event_id not in await timeline(store, admin)
    assert await timeline(store, admin, before.next_batch) == []
    assert spam.event_id not in await page(store, room.room_id, admin)
    child = room.message(admin, "what was that?")
    assert child.prev_events == (spam.event_id,)
    assert [one.outcome for one in await take(store, child)] == ["stored"]
    assert await store.forward_extremities(room.room_id) == {child.event_id}
    served = await store.backfill(room.room_id, [child.event_id], 10)
    assert [one.event_id for one in served[:2]] == [child.event_id, spam.event_id]
    assert await findings(store) == []


async def test_a_readmitted_event_arrives_now_at_its_old_place(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    spam = room.message(other, "spam")
    await refuse(store, spam)
    order = (await store.events([spam.event_id]))[spam.event_id].topological_ordering
    child = room.message(admin, "hm")
    await take(store, child)
    since = (await store.sync(admin)).next_batch
    result = await store.readmit(spam.event_id)
    assert (result.outcome, result.topological_ordering) == ("stored", order)
    kept = (await store.events([spam.event_id]))[spam.event_id]
    assert (kept.soft_failed, kept.refused) == (False, None)
    assert kept.stream_ordering == result.stream_ordering
    assert await timeline(store, admin, since) == [spam.event_id]
    assert (await page(store, room.room_id, admin))[:2] == [child.event_id, spam.event_id]
    assert await store.forward_extremities(room.room_id) == {child.event_id}
    again = await store.readmit(spam.event_id)
    assert again == result._replace(outcome="duplicate")
    assert await findings(store) == []


async def test_a_readmitted_state_event_changes_the_current_state(store: Store) -> None:
    room, admin, _ = begun()
    await take(store, *room.events)
    topic = room.topic(admin, "cheap jam")
    await refuse(store, topic)
    key = ("m.room.topic", "")
    assert key not in await store.current_state(room.room_id)
    since = (await store.sync(admin)).next_batch
    await store.readmit(topic.event_id)
    assert (await store.current_state(room.room_id))[key] == topic.event_id
    assert await store.forward_extremities(room.room_id) == {topic.event_id}
    assert await timeline(store, admin, since) == [topic.event_id]
    assert await findings(store) == []


async def test_a_readmitted_fork_is_resolved_with_the_other_extremity(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    left, right = room.fork(2)
    topic, said = left.topic(admin, "left"), right.message(other, "right")
    await refuse(store, topic)
    await take(store, said)
    await store.readmit(topic.event_id)
    assert await store.forward_extremities(room.room_id) == {topic.event_id, said.event_id}
    assert (await store.current_state(room.room_id))["m.room.topic", ""] == topic.event_id
    assert await findings(store) == []


async def test_a_readmitted_join_makes_a_member(store: Store) -> None:
    room, _, _ = begun()
    await take(store, *room.events)
    user = room.user(3, SERVER)
    join = room.join(user)
    await refuse(store, join)
    assert await store.membership(room.room_id, user) is None
    await store.readmit(join.event_id)
    assert await store.membership(room.room_id, user) == "join"
    assert room.room_id in (await store.sync(user)).join
    assert await findings(store) == []


@pytest.mark.parametrize("child_first", [False, True])
async def test_a_refused_redaction_takes_effect_when_it_is_readmitted(
    store: Store, child_first: bool
) -> None:
    room, admin, other = begun()
    said = room.message(other, "hello")
    await take(store, *room.events)
    redaction = room.redact(admin, said)
    await refuse(store, redaction)
    if child_first:
        await take(store, room.message(admin, "done"))
    assert (await store.events([said.event_id]))[said.event_id].redacted_by is None
    await store.readmit(redaction.event_id)
    assert (await store.events([said.event_id]))[said.event_id].redacted_by == redaction.event_id
    assert await findings(store) == []


@pytest.mark.parametrize("redaction_first", [False, True])
async def test_a_redaction_of_a_refused_event_waits_for_it(
    store: Store, redaction_first: bool
) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    left, right = room.fork(2)
    said = left.message(other, "hello")
    redaction = right.redact(admin, said)
    if redaction_first:
        await take(store, redaction)
    await refuse(store, said)
    if not redaction_first:
        await take(store, redaction)
    assert (await store.events([said.event_id]))[said.event_id].redacted_by is None
    assert await findings(store) == []
    await store.readmit(said.event_id)
    assert (await store.events([said.event_id]))[said.event_id].redacted_by == redaction.event_id
    assert await findings(store) == []


async def test_history_can_be_refused_and_readmitted(store: Store) -> None:
    room, admin, other = begun()
    said = room.message(other, "old")
    last = room.message(admin, "new")
    await take(store, *(one for one in room.events if one not in (said, last)))
    state = list((await store.current_state(room.room_id)).values())
    await take(store, last, state_before={last.event_id: state})
    await refuse(store, said, origin="backfill")
    assert said.event_id not in await page(store, room.room_id, admin)
    since = (await store.sync(admin)).next_batch
    assert (await store.readmit(said.event_id)).outcome == "stored"
    assert said.event_id in await page(store, room.room_id, admin)
    assert await timeline(store, admin, since) == []
    assert await store.forward_extremities(room.room_id) == {last.event_id}
    assert await findings(store) == []


async def test_a_gap_below_a_readmitted_event_is_superseded(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    state = list((await store.current_state(room.room_id)).values())
    lost = room.message(admin, "lost")
    spam = room.message(other, "spam")
    await refuse(store, spam, state_before={spam.event_id: state})
    await store.readmit(spam.event_id)
    await take(store, lost)
    assert spam.event_id in await store.forward_extremities(room.room_id)
    assert lost.event_id not in await store.forward_extremities(room.room_id)
    assert await findings(store) == []


@pytest.mark.parametrize("is_outlier", [False, True])
async def test_a_refused_event_that_comes_after_its_child(
    store: Store, *, is_outlier: bool
) -> None:
    """It fills a gap below an accepted event. So it is no extremity once it is readmitted."""
    room, admin, other = begun()
    await take(store, *room.events)
    state = list((await store.current_state(room.room_id)).values())
    spam = room.message(other, "spam")
    child = room.message(admin, "child")
    if is_outlier:
        await take(store, spam, origin="outlier")
    await take(store, child, state_before={child.event_id: state})
    await refuse(store, spam)
    assert await findings(store) == []
    await store.readmit(spam.event_id)
    assert await store.forward_extremities(room.room_id) == {child.event_id}
    assert await findings(store) == []


async def test_what_the_rules_refuse_stays_as_it_is(store: Store) -> None:
    room, admin, other = begun()
    await take(store, *room.events)
    left, right = room.fork(2)
    banned = left.ban(admin, other)
    late, denied = right.message(other, "late"), right.topic(other, "mine", expected="rejected")
    await take(store, banned)
    reasons = {late.event_id: "spam", denied.event_id: "spam"}
    outcomes = [
        (one.outcome, one.reason == "spam")
        for one in await take(store, late, denied, refused=reasons)
    ]
    assert outcomes == [("soft_failed", False), ("rejected", False)]
    for event, flag in ((late, "soft-failed"), (denied, "rejected")):
        with pytest.raises(InputError, match=flag):
            await store.readmit(event.event_id)
    assert (await store.events([late.event_id]))[late.event_id].refused is None


async def test_a_stored_event_is_not_refused_later(store: Store) -> None:
    room, _, _ = begun()
    await take(store, *room.events)
    last = room.events[-1]
    [result] = await take(store, last, refused={last.event_id: "spam"})
    assert result.outcome == "duplicate"
    assert (await store.events([last.event_id]))[last.event_id].soft_failed is False
    assert (await store.readmit(last.event_id)).outcome == "duplicate"


async def test_an_outlier_has_no_verdict(store: Store) -> None:
    room, _, other = begun()
    await take(store, *room.events)
    said = room.message(other, "spam")
    await take(store, said, origin="outlier")
    with pytest.raises(InputError, match="outlier"):
        await store.readmit(said.event_id)
    await refuse(store, said)
    assert (await store.readmit(said.event_id)).outcome == "stored"
    assert await findings(store) == []


@pytest.mark.parametrize(
    "refused, said",
    [
        ({"$other": "spam"}, "not among the PDUs"),
        ([], "mapping"),
        ({"$x": ""}, "1 to 500"),
        ({"$x": "s" * 501}, "1 to 500"),
        ({"$x": "\0"}, "1 to 500"),
        ({"$x": "\ud800"}, "1 to 500"),
        ({"$x": 5}, "1 to 500"),
    ],
)
async def test_a_malformed_verdict_is_an_error(store: Store, refused: Any, said: str) -> None:
    room, _, _ = begun()
    with pytest.raises(InputError, match=said):
        await take(store, *room.events, refused=refused)
    assert await store.rooms([room.room_id]) == {}


@pytest.mark.parametrize("origin", ["outlier", "out_of_band"])
async def test_only_timeline_events_are_refused(store: Store, origin: Any) -> None:
    room, _, _ = begun()
    with pytest.raises(InputError, match="live or backfilled"):
        await take(store, room.events[0], origin=origin, refused={room.events[0].event_id: "x"})


async def test_a_bad_pdu_does_not_fail_a_batch_with_verdicts(store: Store) -> None:
    room, _, _ = begun()
    pdus = [*room.pdus, b"{"]
    results = await store.append(pdus, room_version="11", refused={EventId("$unread"): "x"})
    assert [one.outcome for one in results] == [*["stored"] * len(room.events), "invalid"]


async def test_what_is_not_stored_cannot_be_readmitted(store: Store) -> None:
    with pytest.raises(UnknownEvent):
        await store.readmit(EventId("$nothing"))
    with pytest.raises(InvalidIdentifier):
        await store.readmit(EventId("nothing"))


async def test_the_reason_is_not_in_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    room, _, other = begun()
    await take(store, *room.events)
    with caplog.at_level(logging.INFO, "storage.persist.append"):
        await refuse(store, room.message(other, "x"), "says: a secret")
    [record] = [one for one in caplog.records if getattr(one, "outcome", "") == "soft_failed"]
    assert record.__dict__["rule"] == "refused"
    assert "secret" not in caplog.text


async def test_two_processes_readmit_once(dsn: str) -> None:
    async with (
        storage.open(dsn, server_name=SERVER, instance_name="one") as one,
        storage.open(dsn, server_name=SERVER, instance_name="two") as two,
    ):
        room, _, other = begun()
        await take(one, *room.events)
        events = [room.message(other, f"spam {number}") for number in range(6)]
        await take(one, *events, refused={event.event_id: "spam" for event in events})
        for event in events:
            results = await asyncio.gather(
                *(store.readmit(event.event_id) for store in (one, two, one, two))
            )
            outcomes = sorted(result.outcome for result in results)
            assert outcomes == ["duplicate", "duplicate", "duplicate", "stored"]
            assert len({result.stream_ordering for result in results}) == 1
        assert await one.forward_extremities(room.room_id) == {events[-1].event_id}
        assert await findings(one) == []


@pytest.mark.parametrize("is_refused", [True, False])
async def test_a_process_that_knows_the_event_as_an_outlier_readmits_it(
    dsn: str, is_refused: bool
) -> None:
    """Its cached row is out of date, and only a write would notice that."""
    async with (
        storage.open(dsn, server_name=SERVER, instance_name="one") as one,
        storage.open(dsn, server_name=SERVER, instance_name="two") as two,
    ):
        room, _, other = begun()
        await take(one, *room.events)
        said = room.message(other, "spam")
        await take(one, said, origin="outlier")
        refused = {said.event_id: "spam"} if is_refused else {}
        [placed] = await take(two, said, refused=refused)
        result = await one.readmit(said.event_id)
        assert result.outcome == ("stored" if is_refused else "duplicate")
        assert result.topological_ordering == placed.topological_ordering
        assert await one.forward_extremities(room.room_id) == {said.event_id}
        assert await findings(one) == []


async def test_a_readmission_whose_answer_is_lost_is_done_once(dsn: str) -> None:
    """It has no new event to look up: the second attempt finds it accepted."""
    room, _, other = begun()
    async with lossy(dsn) as (eater, store):
        await take(store, *room.events)
        first, second = room.message(other, "one"), room.message(other, "two")
        await refuse(store, first)
        await refuse(store, second)
        await store.readmit(first.event_id)  # prepares the statement
        told = listen(store)
        eater.eat(*WRITES)
        result = await store.readmit(second.event_id)
        assert eater.eaten.is_set()
        assert result.outcome == "duplicate"
        kept = (await store.events([second.event_id]))[second.event_id]
        assert (kept.refused, kept.stream_ordering) == (None, result.stream_ordering)
        assert [fact.stream_id for fact in told] == [result.stream_ordering]
        assert await findings(store) == []


@pytest.mark.parametrize("seed", range(4))
async def test_readmitted_rooms_equal_rooms_without_verdicts(
    dsn: str, another_dsn: str, seed: int
) -> None:
    """Messages, redactions and reactions do not change what the rules say of others."""
    room = build_room(SHAPE, 120, seed=seed, sign=False)
    rng = random.Random(seed)
    async with storage.open(dsn, server_name=SERVER) as plain:
        results = await plain.append(room.pdus, room_version=room.version)
        expected = await logical_tables(plain.database)
    accepted = {one.event_id for one in results if one.outcome == "stored"}
    may = [
        one.event_id
        for one in room.events
        if one.event_id in accepted and "state_key" not in one.json
    ]
    refused = dict.fromkeys(rng.sample(may, len(may) // 3), "policy")
    async with storage.open(another_dsn, server_name=SERVER) as store:
        hidden = await store.append(room.pdus, room_version=room.version, refused=refused)
        assert {one.event_id for one in hidden if one.reason == "policy"} == refused.keys()
        assert await findings(store) == []
        for event_id in rng.sample(sorted(refused), len(refused)):
            assert (await store.readmit(event_id)).outcome == "stored"
        assert await findings(store) == []
        found = await logical_tables(store.database)
        assert found == expected
