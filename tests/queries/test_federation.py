"""Reads for other servers: history, missing events, states and auth chains."""

import pytest

import storage
from storage import Store
from storage.errors import InvalidIdentifier, StateUnknown, UnknownEvent, UnknownRoom
from storage.event import redact
from storage.ids import EventId, RoomId
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.oracle import Oracle
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, append, deliver, ids, messages_in, new_room


def forked() -> tuple[RoomBuilder, list[BuiltEvent]]:
    """Return a room with a fork between `base` and `top`, and these events: base, a, b, a2, top."""
    room = new_room()
    base = room.message(ADMIN, "base")
    left, right = room.fork(2)
    a, b = left.message(ADMIN, "a"), right.message(ADMIN, "b")
    a2 = left.message(ADMIN, "a2")
    room.merge(left, right)
    return room, [base, a, b, a2, room.message(ADMIN, "top")]


async def test_backfill_gives_the_events_and_their_ancestors_newest_first(
    store: Store, statements: StatementLog
) -> None:
    room, (base, a, b, a2, top) = forked()
    await deliver(store, room)
    statements.take()
    assert ids(await store.backfill(room.room_id, [top.event_id], 5)) == ids([top, a2, b, a, base])
    assert len(statements.take()) == 1
    assert ids(await store.backfill(room.room_id, [a2.event_id], 3)) == ids([a2, a, base])
    assert ids(await store.backfill(room.room_id, ids([a2, b]), 100)) == ids(
        [a2, b, a, *reversed(room.events[: room.events.index(a)])]
    )
    assert await store.backfill(room.room_id, ["$none"], 10) == []
    assert await store.backfill(room.room_id, [top.event_id], 0) == []


async def test_backfill_walks_through_what_it_does_not_give(store: Store) -> None:
    room = new_room(members=[REMOTE])
    base = room.message(ADMIN, "base")
    ours, theirs = room.fork(2)
    refused = ours.topic(REMOTE, "no", expected="rejected")
    ours.ban(ADMIN, REMOTE)
    soft = theirs.message(REMOTE, "soft")
    top = room.at(refused, soft).message(ADMIN, "top")
    outcomes = {
        event_id: result.outcome
        for event_id, result in zip(ids(room.events), await store.append(room.pdus), strict=True)
    }
    assert (outcomes[refused.event_id], outcomes[soft.event_id]) == ("rejected", "soft_failed")
    assert ids(await store.backfill(room.room_id, [top.event_id], 3)) == ids([top, soft, base])


async def test_what_a_server_may_not_see_comes_redacted(store: Store) -> None:
    room = new_room(visibility="joined")
    hidden = room.message(ADMIN, "hidden")
    room.join(REMOTE)
    seen = room.message(ADMIN, "seen")
    await deliver(store, room)
    found = {
        event.event_id: event
        for event in await store.backfill(room.room_id, [seen.event_id], 3, server_name="s2.test")
    }
    assert messages_in(found.values()) == ["seen", ""]
    copy = found[hidden.event_id]
    assert copy.withheld
    assert copy.json == redact(hidden.json, "11")
    assert b'"hidden"' not in copy.raw
    assert storage.event.parse(seen.pdu, "11").json == found[seen.event_id].json
    assert not found[seen.event_id].withheld
    [whole] = [
        event
        for event in await store.backfill(room.room_id, [seen.event_id], 3)
        if event.event_id == hidden.event_id
    ]
    assert (whole.raw, whole.withheld) == (hidden.pdu, False)
    [missed] = await store.missing_events(
        room.room_id, [], [room.events[-2].event_id], limit=1, server_name="s2.test"
    )
    assert (missed.event_id, missed.content) == (hidden.event_id, {})


async def test_missing_events_lie_between_oldest_first(
    store: Store, statements: StatementLog
) -> None:
    room, (base, a, b, a2, top) = forked()
    await deliver(store, room)
    statements.take()
    assert ids(await store.missing_events(room.room_id, [base.event_id], [top.event_id])) == ids(
        [a, b, a2]
    )
    assert len(statements.take()) == 1
    assert ids(await store.missing_events(room.room_id, ["$none"], [top.event_id], limit=2)) == ids(
        [b, a2]
    )
    assert ids(
        await store.missing_events(
            room.room_id, [base.event_id], [top.event_id], min_depth=a2.depth
        )
    ) == ids([a2])
    assert ids(await store.missing_events(room.room_id, [base.event_id], ids([top, a]))) == ids(
        [b, a2]
    )
    assert await store.missing_events(room.room_id, [top.event_id], [top.event_id]) == []
    assert (
        len(await store.missing_events(room.room_id, [], [top.event_id], limit=100))
        == len(room.events) - 1
    )


async def test_a_walk_reads_no_more_rows_than_configured(dsn: str) -> None:
    room = new_room()
    for number in range(20):
        room.message(ADMIN, str(number))
    async with storage.open(
        dsn, server_name="s1.test", config=storage.Config(traversal_rows_max=5)
    ) as store:
        await deliver(store, room)
        latest = [room.events[-1].event_id]
        assert ids(await store.backfill(room.room_id, latest, 100)) == ids(room.events[:-6:-1])
        assert ids(await store.missing_events(room.room_id, [], latest, limit=100)) == ids(
            room.events[-6:-1]
        )


async def test_state_ids_are_before_the_event_with_the_chain_of_that_state(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    renamed = room.name(ADMIN, "new")
    left = room.message(ADMIN)
    await deliver(store, room)
    oracle = Oracle()
    oracle.append(room.pdus)
    statements.take()
    for event in (room.events[0], room.events[1], renamed, left):
        found = await store.state_ids(event.event_id)
        assert found.state_ids == set(event.state_before.values())
        assert (set(found.state_ids), set(found.auth_chain_ids)) == oracle.state_ids(event.event_id)
    assert len(statements.take()) <= 3 * 4  # whether it is partial, the state, the chain


async def test_what_state_is_not_known_of(store: Store) -> None:
    room = new_room()
    outlier = room.message(ADMIN)
    await append(store, *room.events[:-1])
    await append(store, outlier, origin="outlier")
    with pytest.raises(StateUnknown):
        await store.state_ids(outlier.event_id)
    with pytest.raises(UnknownEvent):
        await store.state_ids(EventId("$none"))


async def test_auth_chains_also_of_rejected_events_and_outliers(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    refused = room.topic(REMOTE, "no", expected="rejected")
    outlier = room.message(ADMIN)
    results = await store.append([event.pdu for event in room.events if event is not outlier])
    assert results[-1].outcome == "rejected"
    await append(store, outlier, origin="outlier")
    statements.take()
    for event in (room.events[0], room.events[-3], refused, outlier):
        chain = room.graph.auth_chain([event.event_id]) - {event.event_id}
        assert set(ids(await store.event_auth(event.event_id))) == chain
        assert await store.auth_chain_ids([event.event_id]) == chain
    assert len(statements.take()) <= 4 + 2 * 4
    with pytest.raises(UnknownEvent):
        await store.event_auth(EventId("$none"))


async def test_the_difference_of_auth_chains(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    left, right = room.fork(2)
    left.power_levels(ADMIN, users={LOCAL: 50})
    left.topic(LOCAL, "left")
    right.join_rules(ADMIN, "invite")
    right.name(ADMIN, "right")
    await deliver(store, room)
    oracle = Oracle()
    oracle.append(room.pdus)
    sets = [set(branch.state.values()) for branch in (left, right)]
    assert await store.auth_chain_difference(sets) == oracle.auth_chain_difference(sets)
    assert await store.auth_chain_difference([sets[0], sets[0]]) == set()
    assert await store.auth_chain_difference([]) == set()


async def test_unknown_rooms_and_malformed_names(store: Store) -> None:
    nowhere = RoomId("!none:s1.test")
    with pytest.raises(UnknownRoom):
        await store.backfill(nowhere, ["$none"], 1)
    with pytest.raises(UnknownRoom):
        await store.missing_events(nowhere, [], ["$none"])
    for wrong in ("", "@user:s1.test"):
        with pytest.raises(InvalidIdentifier):
            await store.backfill(nowhere, [], 1, server_name=wrong)
    with pytest.raises(InvalidIdentifier):
        await store.backfill(nowhere, ["none"], 1)
