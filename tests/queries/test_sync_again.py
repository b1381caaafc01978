"""Sync with events that come again, and with users who come again."""

from storage import Store
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, messages_in, new_room


async def test_a_room_joined_again_is_told_whole(store: Store) -> None:
    """Also if the leave and the join lie between two syncs.

    The client knows the room and gets the join once.
    """
    room = new_room(visibility="joined", members=[LOCAL])
    await deliver(store, room)
    stayed = (await store.sync(LOCAL)).next_batch
    left = room.leave(LOCAL)
    room.message(ADMIN, "unseen")
    topic = room.topic(ADMIN, "unseen")
    await deliver(store, room)
    gone = await store.sync(LOCAL, since=stayed)
    assert (list(gone.leave), ids(gone.leave[room.room_id].timeline.events)) == (
        [room.room_id],
        [left.event_id],
    )
    again = room.join(LOCAL)
    said = room.message(ADMIN, "seen")
    await deliver(store, room)
    told = (await store.sync(LOCAL, since=gone.next_batch)).join[room.room_id]
    assert {(event.type, event.state_key) for event in told.state_after} == set(room.state)
    assert ids(told.timeline.events)[-2:] == [again.event_id, said.event_id]
    assert "unseen" not in messages_in(told.timeline.events)
    at_once = (await store.sync(LOCAL, since=stayed)).join[room.room_id]
    assert ids(at_once.timeline.events) == ids([left, again, said])
    assert set(ids(at_once.state_after)) == {topic.event_id, again.event_id}


async def test_an_event_that_was_fetched_first_is_told_once_it_arrives(store: Store) -> None:
    """At its new position, and never again."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    topic = room.topic(ADMIN, "fetched")
    assert await append(store, topic, origin="outlier") == ["stored"]
    assert (await store.sync(LOCAL, since=since)).is_empty
    other = new_room(seed=1, members=[LOCAL])
    await deliver(store, other)
    between = (await store.sync(LOCAL, since=since)).next_batch
    assert await append(store, topic) == ["stored"]
    answer = await store.sync(LOCAL, since=between)
    assert {room_id: ids(told.timeline.events) for room_id, told in answer.join.items()} == {
        room.room_id: [topic.event_id]
    }
    assert await append(store, topic) == ["duplicate"]
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty


async def test_own_redactions_are_told_and_take_effect(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    secret = room.message(LOCAL, "secret")
    redaction = room.redact(LOCAL, secret)
    await append(store, secret)
    first = await store.sync(LOCAL, since=since)
    assert messages_in(first.join[room.room_id].timeline.events) == ["secret"]
    await append(store, redaction)
    assert ids(
        (await store.sync(LOCAL, since=first.next_batch)).join[room.room_id].timeline.events
    ) == [redaction.event_id]
    [told, _] = (await store.sync(LOCAL, since=since)).join[room.room_id].timeline.events
    assert (told.event_id, told.content, told.redacted_by) == (
        secret.event_id,
        {},
        redaction.event_id,
    )
