"""A redaction is shown to users once it has taken effect, and not before; servers get it as any event."""

import pytest

from storage import Store
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, OTHER, append, ids, new_room


async def shown(store: Store, room: RoomBuilder, event: BuiltEvent) -> bool:
    """Whether all reads of a user agree that the event is shown."""
    page = await store.messages(room.room_id, LOCAL, limit=100)
    timeline = (await store.sync(LOCAL, timeline_limit=100)).join[room.room_id].timeline.events
    seen = await store.visible_to_user(LOCAL, [event.event_id])
    answers = {event.event_id in {one.event_id for one in found} for found in (page.chunk, timeline)} | {bool(seen)}
    assert len(answers) == 1
    return answers.pop()


@pytest.mark.parametrize("version", ["6", "11"])
async def test_one_that_is_not_allowed_is_not_shown(store: Store, version: str) -> None:
    room = new_room(members=[LOCAL, OTHER], version=version)
    said = room.message(LOCAL)
    refused = room.redact(ADMIN.replace("user1", "user4"), said)
    by_level = room.redact(ADMIN, said)
    await append(store, *room.events)
    assert await shown(store, room, refused)  # one's own message
    assert await shown(store, room, by_level)


async def test_one_of_another_server_without_the_level_is_not_shown_but_given_to_servers(store: Store) -> None:
    stranger = "@user2:s2.test"
    room = new_room(members=[LOCAL, stranger])
    said = room.message(LOCAL)
    refused = room.redact(stranger, said)
    await append(store, *room.events)
    assert not await shown(store, room, refused)
    assert (await store.events([said.event_id]))[said.event_id].redacted_by is None
    assert await store.visible_to_server("s2.test", [refused.event_id]) == {refused.event_id}
    assert refused.event_id in {event.event_id for event in await store.backfill(room.room_id, [refused.event_id], 5)}


async def test_one_that_came_before_its_target_is_shown_when_that_arrives(store: Store) -> None:
    room = new_room(members=[LOCAL])
    left, right = room.fork(2)
    said = left.message(LOCAL)
    redaction = right.redact(LOCAL, said)
    await append(store, *[event for event in room.events if event is not said])
    assert not await shown(store, room, redaction)
    await append(store, said)
    assert await shown(store, room, redaction)
    assert (await store.events([said.event_id]))[said.event_id].redacted_by == redaction.event_id


async def test_one_of_what_is_in_no_room_of_ours_or_in_another_is_not_shown(store: Store) -> None:
    room, other = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    elsewhere = other.message(LOCAL)
    across = room.redact(LOCAL, elsewhere)
    nothing = room.redact(LOCAL, "$" + "n" * 43)
    await append(store, *other.events)
    await append(store, *room.events)
    assert await store.visible_to_user(LOCAL, ids([across, nothing])) == set()
    assert (await store.events([elsewhere.event_id]))[elsewhere.event_id].redacted_by is None
