"""Timelines that begin at an event given with `state_before`.

`state` has the changes in the missing history.
"""

from collections.abc import Iterable

import storage
from storage import Store, SyncFilter
from storage.ids import EventId
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids

NAME = ("m.room.name", "")
TOPIC = ("m.room.topic", "")


async def after_a_gap(store: Store, room: RoomBuilder, *events: BuiltEvent) -> None:
    """Store events whose parents are missing: the states before them first, as outliers."""
    state = {event_id for event in events for event_id in event.state_before.values()}
    needed = {*state, *room.graph.auth_chain([*state, *ids(events)])} - {*ids(events)}
    await append(
        store, *[event for event in room.events if event.event_id in needed], origin="outlier"
    )
    given = {event.event_id: list(event.state_before.values()) for event in events}
    assert set(await append(store, *events, state_before=given)) == {"stored"}


def state_of(events: Iterable[storage.StoredEvent]) -> dict[tuple[str, str], EventId]:
    return {(event.type, event.state_key or ""): event.event_id for event in events}


def remote_room(*members: str) -> RoomBuilder:
    """Of a user of another server; ADMIN may do there what they may."""
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, name="the name", users={ADMIN: 50})
    room.topic(REMOTE, "the topic")
    for member in members:
        room.join(member)
    return room


def after(event: BuiltEvent) -> dict[tuple[str, str], EventId]:
    """The state after a state event."""
    return {**event.state_before, (event.type, event.state_key or ""): event.event_id}


async def test_a_room_joined_over_federation_has_the_state_before_the_join(store: Store) -> None:
    room = remote_room()
    room.invite(REMOTE, LOCAL)
    since = (await store.sync(LOCAL)).next_batch
    join = room.join(LOCAL)
    await after_a_gap(store, room, join)
    for token in (None, since):
        told = (await store.sync(LOCAL, since=token)).join[room.room_id]
        assert (ids(told.timeline.events), told.timeline.limited) == ([join.event_id], True)
        assert state_of(told.state) == dict(join.state_before)
        assert state_of(told.state_after) == after(join)
        assert told.state_removed == []


async def test_a_rejoin_has_what_changed_during_the_absence(store: Store) -> None:
    room = remote_room()
    join = room.join(LOCAL)
    await after_a_gap(store, room, join)
    joined = (await store.sync(LOCAL)).next_batch
    leave = room.leave(LOCAL)
    await append(store, leave)
    left = (await store.sync(LOCAL, since=joined)).next_batch
    renamed = room.name(REMOTE, "the new name")
    room.join(OTHER)
    back = room.join(LOCAL)
    await after_a_gap(store, room, back)
    for token in (None, left):
        told = (await store.sync(LOCAL, since=token)).join[room.room_id]
        assert ids(told.timeline.events) == [back.event_id]
        assert state_of(told.state) == dict(back.state_before)
        assert state_of(told.state_after) == after(back)
    told = (await store.sync(LOCAL, since=joined)).join[room.room_id]
    changed = {NAME: renamed.event_id, ("m.room.member", LOCAL): leave.event_id}
    assert {
        key: one for key, one in state_of(told.state).items() if key != ("m.room.member", OTHER)
    } == changed
    assert state_of(told.state_after)[NAME] == renamed.event_id


async def test_a_rename_inside_a_gap_reaches_the_client(
    store: Store, statements: StatementLog
) -> None:
    room = remote_room(LOCAL, ADMIN)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    renamed = room.name(REMOTE, "new")
    first, second = room.message(REMOTE, "first"), room.message(REMOTE, "second")
    await after_a_gap(store, room, first)
    await append(store, second)
    statements.take()
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert len(statements.take()) <= 4
    assert (ids(told.timeline.events), ids(told.state)) == (
        ids([first, second]),
        [renamed.event_id],
    )
    assert ids(told.state_after) == [renamed.event_id]
    initial = (await store.sync(LOCAL)).join[room.room_id]
    assert state_of(initial.state) == dict(first.state_before)
    assert state_of(initial.state_after) == dict(first.state_before)
    whole = (await store.sync(LOCAL, since=since, full_state=True)).join[room.room_id]
    assert state_of(whole.state) == dict(first.state_before)
    lazy = (await store.sync(LOCAL, since=since, filter=SyncFilter(lazy_load_members=True))).join[
        room.room_id
    ]
    assert state_of(lazy.state) == {
        key: one
        for key, one in first.state_before.items()
        if one == renamed.event_id or key[1] == REMOTE
    }


async def test_what_the_first_event_replaces_is_as_before_it(store: Store) -> None:
    """Its key changed inside the gap, too: neither the value before the gap nor its own."""
    room = remote_room(LOCAL, ADMIN)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    renamed = [room.name(REMOTE, str(number)) for number in range(1, 3)]
    joined = room.join(OTHER)
    first = room.name(REMOTE, "3")
    await after_a_gap(store, room, first)
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert state_of(told.state) == {
        NAME: renamed[1].event_id,
        ("m.room.member", OTHER): joined.event_id,
    }
    assert state_of(told.state_after) == {
        NAME: first.event_id,
        ("m.room.member", OTHER): joined.event_id,
    }
    initial = (await store.sync(LOCAL)).join[room.room_id]
    assert state_of(initial.state) == dict(first.state_before)
    assert state_of(initial.state_after) == after(first)


async def test_a_membership_that_the_first_event_replaces_is_as_before_it(store: Store) -> None:
    room = remote_room(LOCAL, ADMIN)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    invite = room.invite(REMOTE, OTHER)
    first = room.join(OTHER)
    await after_a_gap(store, room, first)
    for lazy in (False, True):
        told = (
            await store.sync(LOCAL, since=since, filter=SyncFilter(lazy_load_members=lazy))
        ).join[room.room_id]
        assert state_of(told.state)["m.room.member", OTHER] == invite.event_id
        assert state_of(told.state_after)["m.room.member", OTHER] == first.event_id


async def test_what_was_said_here_meanwhile_is_not_taken_back(store: Store) -> None:
    """The other side of the gap lacks it. The room's state has it, and so does the client."""
    room = remote_room(LOCAL, ADMIN)
    await deliver(store, room)
    here, there = room.fork(2)
    topic = here.topic(ADMIN, "here")
    await append(store, topic)
    since = (await store.sync(LOCAL)).next_batch
    renamed = there.name(REMOTE, "there")
    first = there.message(REMOTE, "first")
    await after_a_gap(store, there, first)
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert state_of(told.state) == state_of(told.state_after) == {NAME: renamed.event_id}
    initial = (await store.sync(LOCAL)).join[room.room_id]
    assert state_of(initial.state) == {**first.state_before, TOPIC: topic.event_id}


async def test_behind_a_refused_event_after_a_gap(store: Store) -> None:
    """The refused one has the state, and the next one brings it into the room."""
    room = remote_room(LOCAL, ADMIN)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    renamed = room.name(REMOTE, "new")
    refused = room.topic(LOCAL, "no", expected="rejected")
    state = [*refused.state_before.values()]
    await append(store, renamed, origin="outlier")
    assert await append(store, refused, state_before={refused.event_id: state}) == ["rejected"]
    first = room.message(ADMIN, "first", prev=[refused])
    assert await append(store, first) == ["stored"]
    told = (await store.sync(LOCAL, since=since)).join[room.room_id]
    assert (ids(told.timeline.events), ids(told.state)) == ([first.event_id], [renamed.event_id])


async def test_a_timeline_that_begins_behind_the_first_event(store: Store) -> None:
    room = remote_room(LOCAL, ADMIN)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    topic = room.topic(REMOTE, "in the gap")
    first, second = room.name(REMOTE, "new"), room.message(REMOTE, "second")
    await after_a_gap(store, room, first)
    await append(store, second)
    told = (await store.sync(LOCAL, since=since, timeline_limit=1)).join[room.room_id]
    assert state_of(told.state) == {NAME: first.event_id, TOPIC: topic.event_id}


async def test_a_timeline_begins_after_what_the_value_at_both_ends_overrules(
    store: Store,
) -> None:
    """That value is given with the first event, and arrives later than what it overrules."""
    sender = "@user5:s2.test"
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, name="the name", users={ADMIN: 50, sender: 50})
    for member in (LOCAL, ADMIN, sender):
        room.join(member)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    branch, overruled = room.fork()
    weaker = overruled.name(ADMIN, "weaker")
    kept = branch.name(sender, "kept")
    first = branch.message(REMOTE, "first")
    await after_a_gap(store, branch, first)
    assert await append(store, branch.leave(sender), weaker) == ["stored", "stored"]
    last = branch.message(REMOTE, "last")
    assert await append(store, last) == ["stored"]
    assert await append(store, kept) == ["soft_failed"]
    assert (await store.current_state(room.room_id))[NAME] == kept.event_id
    for limit in (10, 1):
        response = await store.sync(LOCAL, since=since, timeline_limit=limit)
        told = response.join[room.room_id]
        assert (ids(told.timeline.events), told.timeline.limited) == ([last.event_id], True)
        assert state_of(told.state)[NAME] == state_of(told.state_after)[NAME] == kept.event_id
