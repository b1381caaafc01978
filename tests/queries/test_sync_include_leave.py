"""Sync with `SyncFilter.include_leave`: rooms that were left before the token."""

import pytest

from storage import EventFilter, Store, SyncFilter
from storage.queries.sync.types import LeftRoom
from storage.testing import BuiltEvent, RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, append, deliver, ids, new_room

LEAVES = SyncFilter(include_leave=True)


async def first_leave(store: Store, room: RoomBuilder, limit: int = 10) -> LeftRoom:
    """The room in a first sync."""
    assert (await store.sync(LOCAL, timeline_limit=limit)).leave == {}, "only on request"
    answer = await store.sync(LOCAL, filter=LEAVES, timeline_limit=limit)
    assert answer.join == {}
    return answer.leave[room.room_id]


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    """A room that the user has left, and that went on."""
    made = new_room(visibility="shared", name="before", members=[LOCAL])
    made.message(ADMIN, "seen")
    made.leave(LOCAL)
    made.message(ADMIN, "not seen")
    made.name(ADMIN, "after")
    await deliver(store, made)
    return made


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_a_first_sync_has_the_room_as_of_the_leave(
    store: Store, room: RoomBuilder, limit: int
) -> None:
    leave = next(event for event in room.events if event.content == {"membership": "leave"})
    until = room.events[: room.events.index(leave) + 1]
    found = await first_leave(store, room, limit)
    assert ids(found.timeline.events) == ids(until[-limit:])
    assert found.timeline.limited is (limit < len(until))
    after = {**leave.state_before, ("m.room.member", LOCAL): leave.event_id}
    assert set(ids(found.state_after)) == set(after.values())
    assert set(ids(found.state)) == set(until[-limit:][0].state_before.values())
    page = await store.messages(room.room_id, LOCAL, from_=found.timeline.prev_batch, limit=100)
    assert {*ids(page.chunk), *ids(found.timeline.events)} == set(ids(until))


async def test_later_invites_and_bans_do_not_show_more(store: Store, room: RoomBuilder) -> None:
    expected = await first_leave(store, room)
    room.invite(ADMIN, LOCAL)
    room.topic(ADMIN, "secret")
    room.leave(LOCAL)
    room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    assert await first_leave(store, room) == expected


async def test_full_state_of_a_left_room(store: Store, room: RoomBuilder) -> None:
    since = (await store.sync(LOCAL)).next_batch
    assert (await store.sync(LOCAL, since=since, filter=LEAVES)).is_empty
    assert (await store.sync(LOCAL, since=since, full_state=True)).is_empty
    answer = await store.sync(LOCAL, since=since, full_state=True, filter=LEAVES)
    first = await first_leave(store, room)
    found = answer.leave[room.room_id]
    assert (found.timeline.events, found.timeline.limited) == ([], False)
    assert set(ids(found.state_after)) == set(ids(found.state)) == set(ids(first.state_after))
    again = await store.sync(LOCAL, since=answer.next_batch, filter=LEAVES)
    assert again.is_empty


async def test_a_leave_since_the_token_comes_once(store: Store) -> None:
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.leave(LOCAL)
    await deliver(store, room)
    for full in (False, True):
        without = await store.sync(LOCAL, since=since, full_state=full)
        answer = await store.sync(LOCAL, since=since, filter=LEAVES, full_state=full)
        assert answer == without
        assert list(answer.leave) == [room.room_id]
        assert (await store.sync(LOCAL, since=answer.next_batch, filter=LEAVES)).is_empty


async def test_a_declined_invite_has_the_own_membership_alone(store: Store) -> None:
    room = new_room(visibility="shared", join_rule="invite")
    room.invite(ADMIN, LOCAL)
    leave = room.leave(LOCAL)
    room.topic(ADMIN, "not for LOCAL")
    await deliver(store, room)
    found = await first_leave(store, room)
    assert set(ids(found.state_after)) == {leave.event_id}
    assert set(ids(found.timeline.events)) <= await store.visible_to_user(LOCAL, ids(room.events))
    since = (await store.sync(LOCAL)).next_batch
    assert (await store.sync(LOCAL, since=since, full_state=True, filter=LEAVES)).is_empty


ENDS = ("ban", "invite leave", "invite kick", "invite ban", "knock kick")


def ended(visibility: str, ways: str) -> tuple[RoomBuilder, BuiltEvent]:
    """Return a room that the user was never in, and their last membership. The room went on."""
    made = RoomBuilder("11", sign=False)
    made.start(ADMIN, history_visibility=visibility, join_rule="knock", name="before")
    made.message(ADMIN, "before")
    for way in ways.split():
        getattr(made, way)(*([LOCAL] if way in ("knock", "leave") else [ADMIN, LOCAL]))
        made.message(ADMIN, way)
    made.name(ADMIN, "after")
    return made, [event for event in made.events if event.state_key == LOCAL][-1]


@pytest.mark.parametrize("ways", ENDS)
@pytest.mark.parametrize("visibility", ["world_readable", "shared", "invited", "joined"])
async def test_a_room_that_the_user_was_never_in_ends_with_their_last_membership(
    store: Store, visibility: str, ways: str
) -> None:
    """Its state is whole where they could see the room then, else it is the membership alone."""
    made, end = ended(visibility, ways)
    earlier = (await store.sync(LOCAL)).next_batch
    await deliver(store, made)
    until = made.events[: made.events.index(end) + 1]
    visible = await store.visible_to_user(LOCAL, ids(until))
    assert (end.event_id in visible) == (
        visibility == "world_readable" or (visibility == "invited" and "invite" in ways)
    )
    whole = {**end.state_before, ("m.room.member", LOCAL): end.event_id}
    if end.event_id not in visible:
        whole = {("m.room.member", LOCAL): end.event_id}
    for limit in (1, 100):
        first = await first_leave(store, made, limit)
        later = (await store.sync(LOCAL, since=earlier, timeline_limit=limit)).leave[made.room_id]
        for found in (first, later):
            timeline = [one for one in ids(until) if one in visible][-limit:]
            assert ids(found.timeline.events) == timeline
            assert set(ids(found.state_after)) == set(whole.values())
            changed = {one.event_id for one in until if one.state_key is not None} & set(timeline)
            assert set(ids(found.state)) >= set(whole.values()) - changed
            assert found.state_removed == []
        assert later.timeline.limited is (end.event_id in visible)
        page = await store.messages(made.room_id, LOCAL, from_=first.timeline.prev_batch)
        seen = {*ids(page.chunk), *ids(first.timeline.events)}
        assert seen == (visible if end.event_id in visible else set())


async def test_a_forgotten_room_of_a_stranger_has_the_end_alone(store: Store) -> None:
    made, end = ended("world_readable", "invite leave")
    since = (await store.sync(LOCAL)).next_batch
    await deliver(store, made)
    await store.forget(LOCAL, made.room_id)
    for filter_ in (LEAVES, SyncFilter()):
        assert (await store.sync(LOCAL, filter=filter_)).leave == {}
        assert (await store.sync(LOCAL, since=since, filter=filter_)).leave == {}
    assert end.content["membership"] == "leave"


async def test_an_invite_that_was_declined_out_of_band(store: Store) -> None:
    room = new_room()
    leave_of = room.fork(1)[0]
    assert await append(store, room.invite(ADMIN, LOCAL), origin="out_of_band") == ["stored"]
    leave = room.leave(LOCAL)
    assert await append(store, leave, origin="out_of_band") == ["stored"]
    found = await first_leave(store, leave_of)
    assert ids(found.timeline.events) == [leave.event_id]


async def test_forgotten_rooms_are_left_out(store: Store, room: RoomBuilder) -> None:
    since = (await store.sync(LOCAL)).next_batch
    await store.forget(LOCAL, room.room_id)
    assert (await store.sync(LOCAL, filter=LEAVES)).is_empty
    answer = await store.sync(LOCAL, since=since, full_state=True, filter=LEAVES)
    assert answer.is_empty
    room.ban(ADMIN, LOCAL)
    await deliver(store, room)
    assert (await store.sync(LOCAL, filter=LEAVES)).is_empty


async def test_the_first_part_of_a_first_sync_has_them(store: Store, room: RoomBuilder) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in (1, 2)]
    for one in rooms:
        await deliver(store, one)
    part = await store.sync(LOCAL, rooms_limit=1, filter=LEAVES)
    assert list(part.leave) == [room.room_id]
    part = await store.sync(LOCAL, since=part.next_rooms, rooms_limit=1, filter=LEAVES)
    assert (len(part.join), part.leave) == (1, {})


async def test_other_filters_apply(store: Store, room: RoomBuilder) -> None:
    only = EventFilter(types=["m.room.message"])
    for lazy in (False, True):
        wanted = SyncFilter(include_leave=True, timeline=only, state=only, lazy_load_members=lazy)
        found = (await store.sync(LOCAL, filter=wanted)).leave[room.room_id]
        assert [event.type for event in found.timeline.events] == ["m.room.message"]
        assert found.state_after == []
    without = SyncFilter(include_leave=True, not_rooms=[room.room_id])
    assert (await store.sync(LOCAL, filter=without)).is_empty
    lazy_filter = SyncFilter(include_leave=True, lazy_load_members=True)
    found = (await store.sync(LOCAL, filter=lazy_filter, timeline_limit=1)).leave[room.room_id]
    members = {event.state_key for event in found.state_after if event.type == "m.room.member"}
    assert members == {LOCAL}


async def test_purged_state_changes_show_no_later_state(store: Store, room: RoomBuilder) -> None:
    async with store.database.connection() as conn:
        await conn.execute("DELETE FROM state_deltas WHERE stream_ordering < 11")
    found = await first_leave(store, room)
    assert found.state == found.state_after == []
