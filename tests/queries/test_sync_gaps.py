"""Timelines that would cross a gap or too many hidden events are limited.

Paging back returns the rest.
"""

import pytest

import storage
from storage import Config, EventFilter, Store, SyncFilter
from tests.queries.rooms import ADMIN, LOCAL, append, bodies, deliver, ids, messages_in, new_room


async def paged(
    store: Store, room_id: storage.RoomId, at: str, to: str | None = None
) -> list[storage.StoredEvent]:
    """Return the events before, by pages of three."""
    found: list[storage.StoredEvent] = []
    end: str | None = at
    while end is not None:
        page = await store.messages(room_id, LOCAL, from_=end, to=to, limit=3)
        found += page.chunk
        end = page.end
    return found


async def test_a_timeline_does_not_cross_a_gap(store: Store) -> None:
    """It does not once the gap is filled either: paging back returns the missing events.

    They are never returned as new.
    """
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    before = [room.message(ADMIN, f"before {number}") for number in range(2)]
    await append(store, *before)
    missing = [room.message(ADMIN, f"missing {number}") for number in range(2)]
    after = [room.message(ADMIN, "after"), room.topic(ADMIN, "after"), room.message(ADMIN, "later")]
    given = {after[0].event_id: list(after[0].state_before.values())}
    assert await append(store, *after, state_before=given) == ["stored"] * 3
    answer = await store.sync(LOCAL, since=since)
    timeline = answer.join[room.room_id].timeline
    assert (ids(timeline.events), timeline.limited) == (ids(after), True)
    assert ids(answer.join[room.room_id].state) == []
    page = await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, to=since)
    assert (bodies(page.chunk), [gap.backfill_from for gap in page.gaps]) == (
        ["before 1", "before 0"],
        [(missing[1].event_id,)],
    )
    assert await append(store, *missing, origin="backfill") == ["stored"] * 2
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty
    assert (await store.sync(LOCAL, since=since)).join == answer.join
    assert (
        ids(await paged(store, room.room_id, timeline.prev_batch)) == ids([*room.events[:-3]])[::-1]
    )
    initial = (await store.sync(LOCAL, timeline_limit=100)).join[room.room_id].timeline
    assert (ids(initial.events), initial.limited) == (ids(after), True)


async def test_a_gap_that_the_client_is_past_does_not_matter(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    room.message(ADMIN, "missing")
    after = room.message(ADMIN, "after")
    await append(store, after, state_before={after.event_id: list(after.state_before.values())})
    since = (await store.sync(LOCAL)).next_batch
    new = room.message(ADMIN, "new")
    await append(store, new)
    timeline = (await store.sync(LOCAL, since=since)).join[room.room_id].timeline
    assert (ids(timeline.events), timeline.limited) == ([new.event_id], False)


async def test_a_gap_before_what_is_not_shown_is_none_to_jump_over_either(store: Store) -> None:
    """The event that arrived after the gap was not accepted; what stands on it is."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    seen = room.message(ADMIN, "before")
    await append(store, seen)
    room.message(ADMIN, "missing")
    refused = room.topic(LOCAL, "no", expected="rejected")
    assert await append(
        store, refused, state_before={refused.event_id: list(refused.state_before.values())}
    ) == ["rejected"]
    timeline = (await store.sync(LOCAL, since=since)).join[room.room_id].timeline
    assert (timeline.events, timeline.limited) == ([], True)
    assert ids(
        (await store.messages(room.room_id, LOCAL, from_=timeline.prev_batch, to=since)).chunk
    ) == [seen.event_id]


async def test_too_much_that_is_hidden_limits_a_timeline(dsn: str) -> None:
    async with storage.open(
        dsn, server_name="s1.test", config=Config(traversal_rows_max=20)
    ) as store:
        room = new_room(visibility="joined", members=[LOCAL])
        room.message(ADMIN, "seen first")
        room.leave(LOCAL)
        for number in range(30):
            room.message(ADMIN, f"hidden {number}")
        room.join(LOCAL)
        room.message(ADMIN, "seen last")
        await deliver(store, room)
        timeline = (await store.sync(LOCAL)).join[room.room_id].timeline
        assert (messages_in(timeline.events), timeline.limited) == (["seen last"], True)
        earlier = await paged(store, room.room_id, timeline.prev_batch)
        assert messages_in(earlier) == ["seen first"]
        everything = {event.event_id for event in [*timeline.events, *earlier]}
        assert everything == await store.visible_to_user(LOCAL, ids(room.events))
        sparse = SyncFilter(timeline=EventFilter(types=["org.test.none"]))
        timeline = (await store.sync(LOCAL, filter=sparse)).join[room.room_id].timeline
        assert (timeline.events, timeline.limited) == ([], True)


async def test_what_a_sparse_filter_passes_over_is_behind_prev_batch(dsn: str) -> None:
    """The timeline skips more than it may read: it is limited though it might be full.

    Pages go on from it.
    """
    async with storage.open(
        dsn, server_name="s1.test", config=Config(traversal_rows_max=20)
    ) as store:
        room = new_room(members=[LOCAL])
        rare = [room.send(ADMIN, "org.test.rare", {"n": n}) for n in range(2)]
        for number in range(30):
            room.message(ADMIN, str(number))
        await deliver(store, room)
        wanted = EventFilter(types=["org.test.*"])
        for found in ([], [room.send]):
            latest = [send(ADMIN, "org.test.rare", {"n": 2}) for send in found]
            await deliver(store, room)
            timeline = (
                (await store.sync(LOCAL, filter=SyncFilter(timeline=wanted)))
                .join[room.room_id]
                .timeline
            )
            assert (ids(timeline.events), timeline.limited) == (ids(latest), True)
            page = await store.messages(
                room.room_id, LOCAL, from_=timeline.prev_batch, filter=wanted
            )
            assert ids(page.chunk) == ids(rare[::-1])
            everything = [*timeline.events, *await paged(store, room.room_id, timeline.prev_batch)]
            assert sorted(ids(everything)) == sorted(ids(room.events))


async def test_state_that_came_with_history_is_returned_with_the_next_event(store: Store) -> None:
    """The topic in the gap is older, so the one before the gap wins until the gap is filled."""
    room, other = new_room(members=[LOCAL]), new_room(members=[LOCAL], seed=1)
    before = room.topic(ADMIN, "before")
    await deliver(store, room)
    await deliver(store, other)
    missing = [room.message(ADMIN, "missing"), room.topic(ADMIN, "missing", ts=1000)]
    after = room.message(ADMIN, "after")
    assert await append(store, missing[1], origin="outlier") == ["stored"]
    assert await append(
        store, after, state_before={after.event_id: list(after.state_before.values())}
    ) == ["stored"]
    first = await store.sync(LOCAL)
    assert [
        event.event_id
        for event in first.join[room.room_id].state_after
        if event.type == "m.room.topic"
    ] == [before.event_id]
    assert await append(store, *missing, origin="backfill") == ["stored"] * 2
    await append(store, other.message(ADMIN, "elsewhere"))
    second = await store.sync(LOCAL, since=first.next_batch)
    assert room.room_id not in second.join
    await append(store, room.message(ADMIN, "later"))
    third = await store.sync(LOCAL, since=second.next_batch)
    assert ids(third.join[room.room_id].state_after) == [missing[1].event_id]
    await append(store, room.message(ADMIN, "and later"))
    assert (
        ids((await store.sync(LOCAL, since=third.next_batch)).join[room.room_id].state_after) == []
    )


@pytest.mark.parametrize("is_elsewhere", [True, False], ids=["elsewhere", "here"])
async def test_an_own_membership_that_came_with_history_is_returned_once(
    store: Store, is_elsewhere: bool
) -> None:
    """The leave in the gap has the older time, so the join wins until the gap is filled.

    It is returned as soon as a token covers its position.
    """
    room, other = new_room(members=[LOCAL]), new_room(members=[LOCAL], seed=1)
    await deliver(store, room)
    await deliver(store, other)
    missing = [room.message(ADMIN, "missing"), room.leave(LOCAL, ts=1000)]
    after = room.message(ADMIN, "after")
    assert await append(store, missing[1], origin="outlier") == ["stored"]
    assert await append(
        store, after, state_before={after.event_id: list(after.state_before.values())}
    ) == ["stored"]
    answers = [await store.sync(LOCAL)]
    assert set(answers[0].join) == {room.room_id, other.room_id}
    assert await append(store, *missing, origin="backfill") == ["stored"] * 2
    for next_event in (None, (other if is_elsewhere else room).message(ADMIN, "later"), None):
        if next_event is not None:
            await append(store, next_event)
        answers.append(await store.sync(LOCAL, since=answers[-1].next_batch))
    left = [answer.leave[room.room_id] for answer in answers if room.room_id in answer.leave]
    assert [ids(one.state_after) for one in left] == [[missing[1].event_id]]
    assert not any(room.room_id in answer.join for answer in answers[1:])
