"""Reads leave out events of ignored users, except state."""

from storage import Store
from storage.ids import UserId
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, new_room


async def test_messages_of_ignored_users_are_left_out_and_their_state_is_not(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL, OTHER])
    heard = room.message(ADMIN)
    noise = [room.message(OTHER) for _ in range(5)]
    profile = room.join(OTHER, displayname="loud")
    last = room.message(ADMIN)
    await deliver(store, room)
    ignored = [UserId(OTHER), UserId("@nobody:nowhere.test")]
    statements.take()
    page = await store.messages(room.room_id, LOCAL, limit=3, ignored=ignored)
    assert [event.event_id for event in page.chunk] == [
        last.event_id,
        profile.event_id,
        heard.event_id,
    ]
    assert page.end is not None
    assert len(statements.take()) <= 2
    forwards = await store.messages(room.room_id, LOCAL, direction="f", limit=100, ignored=ignored)
    assert not {event.event_id for event in noise} & {event.event_id for event in forwards.chunk}
    around = await store.context(heard.event_id, LOCAL, limit=4, ignored=ignored)
    assert [event.event_id for event in around.events_after] == [profile.event_id, last.event_id]
    statements.take()
    timeline = (
        (await store.sync(LOCAL, timeline_limit=3, ignored=ignored)).join[room.room_id].timeline
    )
    assert len(statements.take()) <= 4
    assert [event.event_id for event in timeline.events] == [
        heard.event_id,
        profile.event_id,
        last.event_id,
    ]
    assert timeline.limited


async def test_nobody_is_ignored_unless_it_is_said(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    noise = room.message(OTHER)
    await deliver(store, room)
    assert (await store.messages(room.room_id, LOCAL, limit=1)).chunk[0].event_id == noise.event_id


async def test_an_invite_by_an_ignored_user_is_left_out(store: Store) -> None:
    """An initial sync leaves it out too.

    The room is there once the user has joined all the same.
    """
    room = new_room(join_rule="invite")
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    for token in (None, since):
        assert (await store.sync(LOCAL, since=token, ignored=[UserId(ADMIN)])).is_empty
        assert list((await store.sync(LOCAL, since=token, ignored=[UserId(OTHER)])).invite) == [
            room.room_id
        ]
    room.join(LOCAL)
    await deliver(store, room)
    assert list((await store.sync(LOCAL, since=since, ignored=[UserId(ADMIN)])).join) == [
        room.room_id
    ]


async def test_an_invite_over_federation_by_an_ignored_user_is_left_out(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, join_rule="invite")
    invite = room.invite(REMOTE, LOCAL)
    since = (await store.sync(LOCAL)).next_batch
    await append(store, *room.events[:-1], invite, origin="outlier")
    for token in (None, since):
        assert (await store.sync(LOCAL, since=token, ignored=[UserId(REMOTE)])).is_empty
        assert list((await store.sync(LOCAL, since=token)).invite) == [room.room_id]


async def test_a_knock_of_ones_own_is_told_whoever_is_ignored(store: Store) -> None:
    room = new_room(join_rule="knock")
    room.knock(LOCAL)
    await deliver(store, room)
    assert list((await store.sync(LOCAL, ignored=[UserId(ADMIN), UserId(LOCAL)])).knock) == [
        room.room_id
    ]
