"""What ignored users have sent is left out of reads, but for state."""

from storage import Store
from storage.ids import UserId
from tests.queries.conftest import Statements
from tests.queries.rooms import ADMIN, LOCAL, OTHER, deliver, new_room


async def test_messages_of_ignored_users_are_left_out_and_their_state_is_not(store: Store, statements: Statements) -> None:
    room = new_room(members=[LOCAL, OTHER])
    heard = room.message(ADMIN)
    noise = [room.message(OTHER) for _ in range(5)]
    profile = room.join(OTHER, displayname="loud")
    last = room.message(ADMIN)
    await deliver(store, room)
    ignored = [UserId(OTHER), UserId("@nobody:nowhere.test")]
    statements.take()
    page = await store.messages(room.room_id, LOCAL, limit=3, ignored=ignored)
    assert [event.event_id for event in page.chunk] == [last.event_id, profile.event_id, heard.event_id]
    assert page.end is not None
    assert len(statements.take()) <= 2
    forwards = await store.messages(room.room_id, LOCAL, direction="f", limit=100, ignored=ignored)
    assert not {event.event_id for event in noise} & {event.event_id for event in forwards.chunk}
    around = await store.context(heard.event_id, LOCAL, limit=4, ignored=ignored)
    assert [event.event_id for event in around.events_after] == [profile.event_id, last.event_id]
    statements.take()
    timeline = (await store.sync(LOCAL, timeline_limit=3, ignored=ignored)).join[room.room_id].timeline
    assert len(statements.take()) <= 4
    assert [event.event_id for event in timeline.events] == [heard.event_id, profile.event_id, last.event_id]
    assert timeline.limited


async def test_nobody_is_ignored_unless_it_is_said(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    noise = room.message(OTHER)
    await deliver(store, room)
    assert (await store.messages(room.room_id, LOCAL, limit=1)).chunk[0].event_id == noise.event_id
