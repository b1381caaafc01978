"""Sync: rooms that a user is invited to, knocks at, leaves, or was in since the last sync."""

from storage import Store
from storage.testing import RoomBuilder
from tests.queries.rooms import (
    ADMIN,
    LOCAL,
    REMOTE,
    append,
    deliver,
    ids,
    new_room,
)


async def test_invited_then_joined_then_kicked(store: Store) -> None:
    room = new_room(visibility="joined", name="the name", join_rule="invite")
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    answer = await store.sync(LOCAL, since=since)
    assert (answer.join, answer.leave) == ({}, {})
    state = {event["type"]: event for event in answer.invite[room.room_id].invite_state}
    assert set(state) == {"m.room.create", "m.room.join_rules", "m.room.name", "m.room.member"}
    assert state["m.room.name"] == {
        "type": "m.room.name",
        "state_key": "",
        "sender": ADMIN,
        "content": {"name": "the name"},
    }
    assert state["m.room.member"]["state_key"] == LOCAL
    assert list((await store.sync(LOCAL)).invite) == [room.room_id]
    room.message(ADMIN, "while invited")
    await deliver(store, room)
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty
    room.join(LOCAL)
    await deliver(store, room)
    answer = await store.sync(LOCAL, since=answer.next_batch)
    assert (list(answer.join), answer.invite) == ([room.room_id], {})
    said = room.message(ADMIN, "before the kick")
    topic = room.topic(ADMIN, "before the kick")
    kick = room.kick(ADMIN, LOCAL)
    room.message(ADMIN, "after the kick")
    room.name(ADMIN, "after the kick")
    await deliver(store, room)
    answer = await store.sync(LOCAL, since=answer.next_batch)
    assert (answer.join, list(answer.leave)) == ({}, [room.room_id])
    told = answer.leave[room.room_id]
    assert ids(told.timeline.events) == ids([said, topic, kick])
    assert set(ids(told.state_after)) == set(ids([topic, kick]))
    room.message(ADMIN, "much later")
    await deliver(store, room)
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty
    assert (await store.sync(LOCAL)).is_empty


async def test_a_room_joined_and_left_since_is_told_whole(store: Store) -> None:
    """The client knows nothing of it, or an old state from before it was left the last time."""
    room = new_room(name="the name")
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    for limit in (2, 100):
        room.join(LOCAL)
        room.message(ADMIN, "seen")
        leave = room.leave(LOCAL)
        room.name(ADMIN, "after the leave")
        await deliver(store, room)
        answer = await store.sync(LOCAL, since=since, timeline_limit=limit)
        told = answer.leave[room.room_id]
        assert (answer.join, told.timeline.limited) == ({}, True)
        assert told.timeline.events[-1].event_id == leave.event_id
        first = told.timeline.events[0].event_id
        assert {event.event_id for event in told.state} == set(
            room.event(first).state_before.values()
        )
        assert {event.event_id for event in told.state_after} == {
            *leave.state_before.values(),
            leave.event_id,
        } - {leave.state_before["m.room.member", LOCAL]}
        assert (told.state_removed, told.summary) == ([], None)
        page = await store.messages(room.room_id, LOCAL, from_=told.timeline.prev_batch, limit=100)
        seen = await store.visible_to_user(LOCAL, ids(room.events))
        assert {*ids(page.chunk), *ids(told.timeline.events)} == seen
        since = answer.next_batch


async def test_who_only_declined_is_told_no_state(store: Store) -> None:
    room = new_room(visibility="joined", join_rule="invite")
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.topic(ADMIN, "not for LOCAL")
    leave = room.leave(LOCAL)
    await deliver(store, room)
    told = (await store.sync(LOCAL, since=since)).leave[room.room_id]
    assert told.timeline.events == []
    assert ids(told.state) == ids(told.state_after) == [leave.event_id]


async def test_a_knock_shows_stripped_state(store: Store) -> None:
    room = new_room(join_rule="knock", name="the name")
    room.knock(LOCAL)
    await deliver(store, room)
    answer = await store.sync(LOCAL)
    assert (answer.join, answer.invite) == ({}, {})
    assert "m.room.name" in {event["type"] for event in answer.knock[room.room_id].knock_state}


async def test_an_invite_over_federation_shows_what_it_brought_along(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, join_rule="invite")
    brought = {
        "type": "m.room.name",
        "state_key": "",
        "sender": REMOTE,
        "content": {"name": "elsewhere"},
        "origin_server_ts": 1,
    }
    bad = [{"type": "m.room.topic"}, "text", {**brought, "content": None}]
    invite = room.invite(REMOTE, LOCAL, extra={"unsigned": {"invite_room_state": [brought, *bad]}})
    await append(
        store,
        *[
            event
            for event in room.events
            if event.event_id in {*invite.auth_events, *room.graph.auth_chain([invite.event_id])}
        ],
        origin="outlier",
    )
    since = (await store.sync(LOCAL)).next_batch
    assert await append(store, invite, origin="outlier") == ["stored"]
    answer = await store.sync(LOCAL, since=since)
    name, member = answer.invite[room.room_id].invite_state
    assert name == {key: value for key, value in brought.items() if key != "origin_server_ts"}
    assert (member["state_key"], member["content"]) == (LOCAL, {"membership": "invite"})
    assert (await store.sync(LOCAL, since=answer.next_batch)).is_empty
    assert list((await store.sync(LOCAL)).invite) == [room.room_id]
