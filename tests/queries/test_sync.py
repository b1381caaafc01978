"""Sync: returned rooms, their timelines and states, tokens, parts, and the number of statements."""

import pytest

import storage
from storage import Store, Sync
from storage.errors import InputError, InvalidIdentifier, InvalidToken, ResyncNeeded
from storage.ids import UserId
from storage.queries.sync import rooms as looking
from storage.streams import SyncToken, VectorPosition
from tests.queries.conftest import StatementLog
from tests.queries.rooms import (
    ADMIN,
    LOCAL,
    OTHER,
    REMOTE,
    append,
    deliver,
    ids,
    messages_in,
    new_room,
)


def keys(events: list[storage.StoredEvent]) -> set[tuple[str, str]]:
    return {(event.type, event.state_key or "") for event in events}


# --------------------------------------------------------------------------------------------------
# joined rooms


async def test_an_initial_sync_tells_the_end_of_the_timeline_and_the_state_before_it(
    store: Store,
) -> None:
    room = new_room(members=[LOCAL], name="first")
    room.message(ADMIN, "one")
    renamed = room.name(ADMIN, "second")
    room.message(ADMIN, "two")
    await deliver(store, room)
    told = (await store.sync(LOCAL, timeline_limit=2)).join[room.room_id]
    assert ids(told.timeline.events) == ids(room.events[-2:])
    assert told.timeline.limited
    assert {event.event_id for event in told.state} == set(renamed.state_before.values())
    assert {event.event_id for event in told.state_after} == set(room.state.values())
    assert told.state_removed == []


async def test_a_short_room_is_told_whole(store: Store) -> None:
    room = new_room()
    await deliver(store, room)
    told = (await store.sync(ADMIN, timeline_limit=100)).join[room.room_id]
    assert ids(told.timeline.events) == ids(room.events)
    assert not told.timeline.limited
    assert told.state == []


async def test_what_is_new_is_told_once(store: Store) -> None:
    room, quiet = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    await deliver(store, room)
    await deliver(store, quiet)
    since = (await store.sync(LOCAL)).next_batch
    assert (await store.sync(LOCAL, since=since)).is_empty
    new = [room.message(ADMIN, "one"), room.topic(ADMIN, "two")]
    await append(store, *new)
    answer = await store.sync(LOCAL, since=since)
    assert list(answer.join) == [room.room_id]
    told = answer.join[room.room_id]
    assert (ids(told.timeline.events), told.timeline.limited) == (ids(new), False)
    assert (ids(told.state), ids(told.state_after)) == ([], [new[1].event_id])
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty
    assert (await store.sync(LOCAL, since=since)).join == answer.join


async def test_a_limited_timeline_has_the_state_up_to_its_start(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    first, _, second, _ = [
        room.topic(ADMIN, "1"),
        room.message(ADMIN, "2"),
        room.topic(ADMIN, "3"),
        room.message(ADMIN, "4"),
    ]
    await deliver(store, room)
    told = (await store.sync(LOCAL, since=since, timeline_limit=2)).join[room.room_id]
    assert told.timeline.limited
    assert ids(told.timeline.events) == ids(room.events[-2:])
    assert ids(told.state) == [first.event_id]
    assert ids(told.state_after) == [second.event_id]


async def test_paging_back_from_a_limited_timeline_meets_everything_else_once(store: Store) -> None:
    """Also events that arrived early and sort late topologically, and those backfilled since."""
    room = new_room(members=[LOCAL])
    early, late = room.fork(2)
    for number in range(4):
        early.message(ADMIN, f"early {number}")
    for number in range(3):
        late.message(ADMIN, f"late {number}")
    history = [event for event in room.events if event.content.get("body") == "early 0"]
    await append(
        store,
        *[
            event
            for event in room.events
            if "late" not in event.content.get("body", "") and event not in history
        ][:-3],
    )
    following = [
        event
        for event in room.events
        if event.content.get("body", "").startswith("early") and event not in history
    ]
    given = {following[0].event_id: list(following[0].state_before.values())}
    assert await append(store, *following, state_before=given) == ["stored"] * 3
    await append(
        store, *[event for event in room.events if event.content.get("body", "").startswith("late")]
    )
    timeline = (await store.sync(LOCAL, timeline_limit=2)).join[room.room_id].timeline
    assert messages_in(timeline.events) == ["late 1", "late 2"]
    assert await append(store, *history, origin="backfill") == ["stored"]
    found: list[storage.StoredEvent] = []
    end: str | None = timeline.prev_batch
    while end is not None:
        page = await store.messages(room.room_id, LOCAL, from_=end, limit=2)
        found += page.chunk
        end = page.end
    assert sorted(ids([*found, *timeline.events])) == sorted(ids(room.events))
    orders = [event.topological_ordering or 0 for event in found]
    assert orders == sorted(orders, reverse=True)


async def test_the_gap_between_two_syncs_is_what_lies_from_prev_batch_to_since(
    store: Store,
) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    for number in range(7):
        room.message(ADMIN, str(number))
    await deliver(store, room)
    timeline = (await store.sync(LOCAL, since=since, timeline_limit=2)).join[room.room_id].timeline
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, to=since, limit=100)
    assert messages_in(page.chunk) == ["4", "3", "2", "1", "0"]
    assert (messages_in(timeline.events), page.end) == (["5", "6"], None)


async def test_a_room_joined_since_is_told_from_its_beginning(store: Store) -> None:
    room = new_room(visibility="joined")
    room.message(ADMIN, "unseen")
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.join(LOCAL)
    room.message(ADMIN, "seen")
    await deliver(store, room)
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert ids(told.timeline.events) == ids(
        [*room.events[:5], *room.events[-2:]]
    )  # what was said before it was "joined" was shared
    assert (told.timeline.limited, told.state, keys(told.state_after)) == (
        False,
        [],
        set(room.state),
    )
    told = (await store.sync(LOCAL, since=since, timeline_limit=2)).join[room.room_id]
    assert (ids(told.timeline.events), told.timeline.limited) == (ids(room.events[-2:]), True)
    assert {event.event_id for event in told.state} == set(room.events[-2].state_before.values())


async def test_a_new_profile_is_no_new_join(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    renamed = room.join(LOCAL, displayname="new name")
    await deliver(store, room)
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert (ids(told.timeline.events), told.state, told.timeline.limited) == (
        [renamed.event_id],
        [],
        False,
    )


async def test_a_key_that_resolution_takes_away_is_told(store: Store) -> None:
    """On one branch a guest joins, on the other the room is closed: resolution removes the join."""
    room = new_room(members=[LOCAL])
    left, right = room.fork(2)
    closed, joined = left.join_rules(ADMIN, "invite"), right.join(REMOTE)
    await append(store, *[event for event in room.events if event is not closed])
    since = (await store.sync(LOCAL)).next_batch
    assert (await store.current_state(room.room_id))["m.room.member", REMOTE] == joined.event_id
    await append(store, closed)
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert told.state_removed == [("m.room.member", REMOTE)]
    assert ("m.room.member", REMOTE) not in await store.current_state(room.room_id)


async def test_full_state_tells_every_joined_room(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    told = (await store.sync(LOCAL, since=since, full_state=True)).join[room.room_id]
    assert told.timeline.events == []
    assert keys(told.state) == keys(told.state_after) == set(room.state)


async def test_soft_failed_rejected_and_backfilled_events_are_not_in_a_timeline(
    store: Store,
) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    ours, theirs = room.fork(2)
    ban = ours.ban(ADMIN, REMOTE)
    soft = theirs.message(REMOTE)
    refused = ours.topic(REMOTE, "no", expected="rejected")
    history = ours.message(ADMIN, "history")
    assert await append(store, ban, soft, refused) == ["stored", "soft_failed", "rejected"]
    await append(store, history, origin="backfill")
    assert ids((await store.sync(LOCAL, since=since)).join[room.room_id].timeline.events) == [
        ban.event_id
    ]


async def test_a_redacted_event_is_told_pruned(store: Store) -> None:
    room = new_room(members=[LOCAL])
    secret = room.message(ADMIN, "secret")
    room.redact(ADMIN, secret)
    await deliver(store, room)
    [told, redaction] = (
        (await store.sync(LOCAL, timeline_limit=2)).join[room.room_id].timeline.events
    )
    assert (told.event_id, told.content, told.redacted_by) == (
        secret.event_id,
        {},
        redaction.event_id,
    )
    assert b"secret" in told.raw


# --------------------------------------------------------------------------------------------------
# in parts


async def parts(store: Store, limit: int) -> list[Sync]:
    answers = [await store.sync(LOCAL, rooms_limit=limit)]
    while answers[-1].next_rooms is not None:
        answers.append(await store.sync(LOCAL, since=answers[-1].next_rooms, rooms_limit=limit))
    return answers


async def test_rooms_come_in_parts_latest_activity_first(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(5)]
    invited = new_room(seed=9)
    invited.invite(ADMIN, LOCAL)
    for room in [*rooms, invited]:
        await deliver(store, room)
    rooms[1].message(ADMIN)
    await deliver(store, rooms[1])
    answers = await parts(store, 2)
    assert [list(answer.join) for answer in answers] == [
        [rooms[1].room_id, rooms[4].room_id],
        [rooms[3].room_id, rooms[2].room_id],
        [rooms[0].room_id],
    ]
    assert [list(answer.invite) for answer in answers] == [[invited.room_id], [], []]
    assert len({answer.next_batch for answer in answers}) == 1


async def test_what_happens_between_the_parts_is_told_by_the_sync_that_follows(
    store: Store,
) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(4)]
    for room in rooms:
        await deliver(store, room)
    first = await store.sync(LOCAL, rooms_limit=2)
    assert first.next_rooms is not None
    late = new_room(seed=8, members=[LOCAL])
    await deliver(store, late)
    new = [room.topic(ADMIN, "new") for room in rooms]
    for room in rooms:
        await deliver(store, room)
    second = await store.sync(LOCAL, since=first.next_rooms, rooms_limit=2)
    assert (list(second.join), second.next_rooms) == ([rooms[1].room_id, rooms[0].room_id], None)
    for room, topic in zip(rooms, new, strict=True):
        told = {**first.join, **second.join}[room.room_id]
        assert topic.event_id not in ids([*told.timeline.events, *told.state, *told.state_after])
        assert {event.event_id for event in told.state_after} == set(topic.state_before.values())
    third = await store.sync(LOCAL, since=second.next_batch)
    assert {room_id: len(told.timeline.events) for room_id, told in third.join.items()} == {
        **{room.room_id: 1 for room in rooms},
        late.room_id: len(late.events),
    }


# ----------------------------------------------------------------------------------------------
# statements, waiting, bad input


async def test_the_number_of_statements_does_not_grow(
    store: Store, statements: StatementLog
) -> None:
    counts = []
    for seed in range(6):
        room = new_room(seed=seed, members=[LOCAL])
        await deliver(store, room)
        statements.take()
        await store.sync(LOCAL)
        counts.append(len(statements.take()))
    assert counts == [3] * 6
    invited = new_room(seed=10)
    invited.invite(ADMIN, LOCAL)
    await deliver(store, invited)
    statements.take()
    answer = await store.sync(LOCAL)
    assert len(statements.take()) == 3
    await store.sync(LOCAL, since=answer.next_batch)
    assert len(statements.take()) == 1


async def test_what_a_writer_committed_late_is_told_once(dsn: str, store: Store) -> None:
    """A token from between two commits: the one of the larger position came first.

    Only the other one is new to it.
    """
    first, second, quiet = (new_room(seed=seed, members=[LOCAL]) for seed in range(3))
    async with storage.open(dsn, server_name="s1.test", instance_name="other") as other:
        for room in (first, second, quiet):
            await deliver(store, room)
        since = SyncToken.parse((await store.sync(LOCAL)).next_batch, store.deployment_id)
        late = [first.message(ADMIN, "late"), first.topic(ADMIN, "late")]
        reserved = [
            result.stream_ordering or 0
            for result in await other.append([event.pdu for event in late])
        ]
        await append(store, second.message(ADMIN, "early"))
        now = await store.sync(LOCAL)
    main = (
        SyncToken.parse(now.next_batch, store.deployment_id).positions()["events"].position("main")
    )
    assert main > max(reserved)
    between = SyncToken.of({"events": VectorPosition.of(min(reserved) - 1, {"main": main})})
    assert not since >= between
    answer = await store.sync(LOCAL, since=between.print(store.deployment_id))
    assert list(answer.join) == [first.room_id]
    told = answer.join[first.room_id]
    assert (ids(told.timeline.events), ids(told.state_after)) == (ids(late), [late[1].event_id])
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty
    page = await store.messages(
        first.room_id, LOCAL, from_=between.print(store.deployment_id), limit=100
    )
    assert (
        ids(page.chunk) == ids(first.events[:-2])[::-1]
    )  # what the sync tells is not told by paging back from where it began
    page = await store.messages(
        first.room_id, LOCAL, to=between.print(store.deployment_id), limit=100
    )
    assert ids(page.chunk) == ids(late)[::-1]
    page = await store.messages(
        first.room_id, LOCAL, from_=between.print(store.deployment_id), direction="f", limit=100
    )
    assert ids(page.chunk) == ids(late)
    before = await store.sync(LOCAL, since=since.print(store.deployment_id))
    assert set(before.join) == {first.room_id, second.room_id}


async def test_only_the_rooms_that_were_named_are_looked_at(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(3)]
    for room in rooms:
        await deliver(store, room)
    since = await store.sync(LOCAL)
    for room in rooms:
        room.message(ADMIN)
        await deliver(store, room)
    now = await store.sync(LOCAL)
    asked = (
        SyncToken.parse(answer.next_batch, store.deployment_id).position("events")
        for answer in (since, now)
    )
    before, upto = (position or VectorPosition() for position in asked)
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        nids = await conn.fetchvals(
            "SELECT room_nid FROM rooms WHERE room_id = ANY($1::text[])",
            [room.room_id for room in rooms[1:]],
        )
        for among, expected in ((None, rooms), (nids, rooms[1:]), ([], [])):
            found = await looking.rooms(
                conn, UserId(LOCAL), looking.SyncRange(before, upto, 10, room_nids=among)
            )
            assert {told.row.room_id for told in found} == {room.room_id for room in expected}


async def test_a_user_without_rooms_is_told_nothing(store: Store) -> None:
    answer = await store.sync(OTHER)
    assert answer.is_empty
    assert (await store.sync(OTHER, since=answer.next_batch)).next_batch == answer.next_batch


async def test_bad_questions_are_refused(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    timeline = (await store.sync(LOCAL)).join[room.room_id].timeline
    for since in ("", "nonsense", timeline.prev_batch, "s1~00000000~~0"):
        with pytest.raises(InvalidToken):
            await store.sync(LOCAL, since=since)
    for user in ("local", REMOTE):
        with pytest.raises(InvalidIdentifier):
            await store.sync(user)
    with pytest.raises(InputError, match="negative"):
        await store.sync(LOCAL, timeline_limit=-1)
    assert (await store.sync(LOCAL, timeline_limit=0)).join[room.room_id].timeline.events == []
    assert len(
        (await store.sync(LOCAL, timeline_limit=10**9)).join[room.room_id].timeline.events
    ) == len(room.events)


async def test_who_is_from_before_a_purge_begins_anew(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(2)]
    for room in rooms:
        await deliver(store, room)
    old, part = (
        (await store.sync(LOCAL)).next_batch,
        (await store.sync(LOCAL, rooms_limit=1)).next_rooms,
    )
    await append(store, *(room.message(ADMIN) for room in rooms))
    new = (await store.sync(LOCAL)).next_batch
    await append(store, rooms[0].message(ADMIN))
    purged = SyncToken.parse(new, store.deployment_id).positions()["events"].min
    async with store.database.connection() as conn:
        await conn.execute(
            "INSERT INTO purged_streams (stream_name, purged_upto) VALUES ('events', $1::bigint)",
            purged,
        )
    for since, limit in ((old, None), (part, 1)):
        with pytest.raises(ResyncNeeded):
            await store.sync(LOCAL, since=since, rooms_limit=limit)
    assert list((await store.sync(LOCAL, since=new)).join) == [rooms[0].room_id]
    assert len((await store.sync(LOCAL)).join) == 2


async def test_results_print_well(store: Store) -> None:
    room = new_room()
    await deliver(store, room)
    assert f"<StoredEvent {room.events[0].event_id} m.room.create" in repr(await store.sync(ADMIN))
