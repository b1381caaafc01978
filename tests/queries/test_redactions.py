"""A redaction is visible to users once it has taken effect. Servers get it as any event."""

from typing import Any

import pytest

from storage import Store
from storage.errors import UnknownEvent
from storage.ids import UserId
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, ids, new_room


async def shown(store: Store, room: RoomBuilder, event: BuiltEvent) -> bool:
    """Whether all reads of a user agree that the event is shown."""
    page = await store.messages(room.room_id, LOCAL, limit=100)
    timeline = (await store.sync(LOCAL, timeline_limit=100)).join[room.room_id].timeline.events
    seen = await store.visible_to_user(LOCAL, [event.event_id])
    answers = {
        event.event_id in {one.event_id for one in found} for found in (page.chunk, timeline)
    } | {bool(seen)}
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


async def test_one_of_another_server_without_the_level_is_not_shown_but_given_to_servers(
    store: Store,
) -> None:
    stranger = "@user2:s2.test"
    room = new_room(members=[LOCAL, stranger])
    said = room.message(LOCAL)
    refused = room.redact(stranger, said)
    await append(store, *room.events)
    assert not await shown(store, room, refused)
    assert (await store.events([said.event_id]))[said.event_id].redacted_by is None
    assert await store.visible_to_server("s2.test", [refused.event_id]) == {refused.event_id}
    assert refused.event_id in {
        event.event_id for event in await store.backfill(room.room_id, [refused.event_id], 5)
    }


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


def refused_target(how: str) -> tuple[RoomBuilder, BuiltEvent, list[BuiltEvent]]:
    """Return a room, an event that a store rejects or soft-fails, and the events it depends on."""
    room = new_room(members=[LOCAL, OTHER, REMOTE])
    if how == "rejected":
        first = room.events
        return room, room.topic(OTHER, "no", expected="rejected"), first
    ours, theirs = room.fork(2)
    ours.ban(ADMIN, OTHER)
    first = room.events
    target = theirs.message(OTHER)
    room.heads = ours.heads
    return room, target, first


def redacting(room: RoomBuilder, target: BuiltEvent, related: BuiltEvent, **how: Any) -> BuiltEvent:
    """A redaction that claims to be in a thread: relations and aggregations could return it."""
    content = {
        "redacts": target.event_id,
        "m.relates_to": {"rel_type": "m.thread", "event_id": related.event_id},
    }
    return room.send(ADMIN, "m.room.redaction", content, redacts=target, **how)


@pytest.mark.parametrize("target_first", [True, False])
@pytest.mark.parametrize("how", ["rejected", "soft_failed"])
async def test_one_of_what_was_refused_takes_no_effect_and_is_hidden_from_all_reads(
    store: Store, how: str, *, target_first: bool
) -> None:
    """There is nothing that it could take away from what a client has."""
    room, target, first = refused_target(how)
    root = room.message(ADMIN)
    redaction = redacting(room, target, root)
    await append(store, *first, root)
    for event in (target, redaction) if target_first else (redaction, target):
        assert await append(store, event) == [how if event is target else "stored"]
    assert not await shown(store, room, redaction)
    assert (await store.events([target.event_id]))[target.event_id].redacted_by is None
    with pytest.raises(UnknownEvent):
        await store.context(redaction.event_id, LOCAL)
    assert ids((await store.context(root.event_id, LOCAL)).events_after) == []
    near = await store.event_near(room.room_id, LOCAL, redaction.origin_server_ts, "b")
    assert near is not None
    assert near.event_id == root.event_id
    for recurse in (False, True):
        assert (await store.relations(root.event_id, LOCAL, recurse=recurse)).chunk == []
    assert await store.aggregations(LOCAL, [root.event_id]) == {}
    assert (
        "without effect"
        in (await store.explain_visibility(redaction.event_id, UserId(LOCAL))).sentence
    )
    assert await store.visible_to_server("s2.test", [redaction.event_id]) == {redaction.event_id}


async def test_one_of_what_was_accepted_is_shown_by_all_reads(store: Store) -> None:
    """So that the test above could fail."""
    room = new_room(members=[LOCAL, OTHER])
    target, root = room.message(OTHER), room.message(ADMIN)
    redaction = redacting(room, target, root)
    await append(store, *room.events)
    assert await shown(store, room, redaction)
    assert ids((await store.context(root.event_id, LOCAL)).events_after) == [redaction.event_id]
    assert ids((await store.relations(root.event_id, LOCAL)).chunk) == [redaction.event_id]
    assert (await store.aggregations(LOCAL, [root.event_id])) != {}
