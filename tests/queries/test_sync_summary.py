"""Summaries of rooms, members loaded lazily, and filters of the state."""

import json
from typing import Any

import pytest

import storage
from storage import EventFilter, RoomSummary, Store, SyncFilter, UserId
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, ids, new_room

LAZY = SyncFilter(lazy_load_members=True)


def called(joined: int, invited: int, heroes: tuple[str, ...] | None) -> RoomSummary:
    return RoomSummary(joined, invited, None if heroes is None else tuple(map(UserId, heroes)))


def members(events: list[storage.StoredEvent]) -> set[str]:
    return {event.state_key or "" for event in events if event.type == "m.room.member"}


async def test_a_room_without_a_name_is_called_by_its_members(store: Store) -> None:
    room = new_room(members=[LOCAL, REMOTE])
    room.invite(ADMIN, OTHER)
    await deliver(store, room)
    answer = await store.sync(LOCAL)
    assert answer.join[room.room_id].summary == called(3, 1, (ADMIN, REMOTE, OTHER))
    await append(store, room.message(ADMIN))
    answer = await store.sync(LOCAL, since=answer.next_batch)
    assert answer.join[room.room_id].summary is None
    for change, expected in (
        (room.join(OTHER), called(4, 0, (ADMIN, REMOTE, OTHER))),
        (room.name(ADMIN, "called"), called(4, 0, None)),
        (room.leave(REMOTE), called(3, 0, None)),
        (room.name(ADMIN, ""), called(3, 0, (ADMIN, OTHER))),
        (
            room.send(ADMIN, "m.room.canonical_alias", {"alias": "#a:s1.test"}, state_key=""),
            called(3, 0, None),
        ),
        (
            room.send(ADMIN, "m.room.canonical_alias", {"alt_aliases": []}, state_key=""),
            called(3, 0, (ADMIN, OTHER)),
        ),
    ):
        await append(store, change)
        since = answer.next_batch
        answer = await store.sync(LOCAL, since=since)
        assert answer.join[room.room_id].summary == expected
        assert await store.sync(LOCAL, since=since) == answer


async def test_a_name_is_one_that_the_content_has_however_the_event_is_written(
    store: Store,
) -> None:
    """Blanks, escapes that Postgres refuses as text, and names elsewhere in the event."""
    room = new_room(members=[LOCAL])
    await deliver(store, room)
    answer = await store.sync(LOCAL)
    nobody = called(2, 0, (ADMIN,))
    for content, unsigned, expected in (
        ({"name": "called"}, {}, called(2, 0, None)),
        ({"name": ""}, {"prev_content": {"name": "called"}}, nobody),
        ({"name": "called"}, {"prev_content": {"name": ""}}, called(2, 0, None)),
        ({"name": 5, "more": {"name": "called"}}, {}, nobody),
        ({"name": "a NUL: \0"}, {}, called(2, 0, None)),
        ({"name": "", "more": "\0"}, {}, nobody),
        ({"name": "\U0001f600 \u00e9"}, {}, called(2, 0, None)),
        ({}, {}, nobody),
    ):
        event = room.state_event(ADMIN, "m.room.name", content)
        pdu = json.dumps(json.loads(event.pdu) | {"unsigned": unsigned}, indent=1).encode()
        assert [
            result.outcome for result in await store.append([pdu], room_version=room.version)
        ] == ["stored"]
        answer = await store.sync(LOCAL, since=answer.next_batch)
        assert answer.join[room.room_id].summary == expected, content


async def test_heroes_are_five_and_those_who_left_if_nobody_else_is_there(store: Store) -> None:
    many = new_room(members=[f"@member{number}:s2.test" for number in range(7)])
    many.join(LOCAL)
    alone = new_room(seed=1, members=[LOCAL, REMOTE])
    alone.kick(ADMIN, REMOTE)
    alone.leave(ADMIN)
    for room in (many, alone):
        await deliver(store, room)
    answer = await store.sync(LOCAL)
    assert answer.join[many.room_id].summary == called(
        9, 0, (ADMIN, *(f"@member{number}:s2.test" for number in range(4)))
    )
    assert answer.join[alone.room_id].summary == called(1, 0, (REMOTE, ADMIN))


async def test_a_part_of_an_initial_sync_has_the_summary_of_its_position(store: Store) -> None:
    rooms = [new_room(seed=seed, members=[LOCAL]) for seed in range(2)]
    for room in rooms:
        await deliver(store, room)
    first = await store.sync(LOCAL, rooms_limit=1)
    await append(store, rooms[0].join(REMOTE), rooms[0].name(ADMIN, "named"))
    second = await store.sync(LOCAL, since=first.next_rooms, rooms_limit=1)
    assert second.join[rooms[0].room_id].summary == called(2, 0, (ADMIN,))
    third = await store.sync(LOCAL, since=second.next_batch)
    assert third.join[rooms[0].room_id].summary == called(3, 0, None)


async def test_members_are_loaded_lazily(store: Store) -> None:
    room = new_room(
        members=[LOCAL, OTHER, *(f"@member{number}:s2.test" for number in range(9)), REMOTE],
        name="a room without heroes",
    )
    before = set(room.state)
    room.message(REMOTE, "first")
    kick = room.kick(ADMIN, "@member3:s2.test")
    await deliver(store, room)
    answer = await store.sync(LOCAL, filter=LAZY, timeline_limit=2)
    told = answer.join[room.room_id]
    assert (
        members(told.state)
        == members(told.state_after)
        == {ADMIN, LOCAL, REMOTE, "@member3:s2.test"}
    )
    assert kick.event_id in ids(told.state_after)
    assert kick.event_id not in ids(told.state)
    assert {
        (event.type, event.state_key) for event in told.state if event.type != "m.room.member"
    } == {key for key in before if key[0] != "m.room.member"}
    gone, speaks = room.leave("@member5:s2.test"), room.message(OTHER, "second")
    await append(store, gone, speaks)
    told = (await store.sync(LOCAL, since=answer.next_batch, filter=LAZY, timeline_limit=1)).join[
        room.room_id
    ]
    assert members(told.state) == members(told.state_after) == {OTHER, "@member5:s2.test"}
    assert gone.event_id in ids(told.state)
    told = (await store.sync(LOCAL, since=answer.next_batch, timeline_limit=1)).join[room.room_id]
    assert members(told.state) == {"@member5:s2.test"}


async def test_whoever_speaks_and_then_changes_is_known_as_they_were(store: Store) -> None:
    """The client is in the room and may not know a member who changes within the timeline.

    The state at the start of the timeline has them.
    """
    room = new_room(members=[LOCAL, REMOTE])
    await deliver(store, room)
    since = (await store.sync(LOCAL, filter=LAZY, timeline_limit=1)).next_batch
    before = room.state["m.room.member", REMOTE]
    said = room.message(REMOTE, "hello")
    renamed = room.join(REMOTE, displayname="somebody else")
    await append(store, said, renamed)
    told = (await store.sync(LOCAL, since=since, filter=LAZY)).join[room.room_id]
    assert ids(told.timeline.events) == [said.event_id, renamed.event_id]
    assert {event.event_id for event in told.state if event.state_key == REMOTE} == {before}
    assert {event.event_id for event in told.state_after if event.state_key == REMOTE} == {
        renamed.event_id
    }


@pytest.mark.parametrize(
    "visibility, spoke, shown",
    [("invited", {ADMIN, LOCAL}, {ADMIN, LOCAL}), ("shared", set(), {LOCAL})],
)
async def test_who_was_never_in_the_room_is_told_of_the_members_that_they_may_see(
    store: Store, visibility: str, spoke: set[str], shown: set[str]
) -> None:
    room = new_room(visibility=visibility)
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    since = (await store.sync(LOCAL, filter=LAZY)).next_batch
    await append(store, room.message(ADMIN), room.leave(LOCAL))
    told = (await store.sync(LOCAL, since=since, filter=LAZY)).leave[room.room_id]
    assert {event.sender for event in told.timeline.events} == spoke
    assert members(told.state) | members(told.state_after) == shown


async def test_filters_of_the_state(store: Store) -> None:
    room = new_room(members=[LOCAL], name="the name")
    room.message(ADMIN)
    await deliver(store, room)
    picked = SyncFilter(state=EventFilter(types=["m.room.name", "m.room.m*"], not_senders=[LOCAL]))
    told = (await store.sync(LOCAL, filter=picked, timeline_limit=1)).join[room.room_id]
    assert {(event.type, event.state_key) for event in told.state} == {
        ("m.room.name", ""),
        ("m.room.member", ADMIN),
    }
    assert ids(told.state) == ids(told.state_after)


async def test_heroes_are_among_the_lazily_loaded_members(store: Store) -> None:
    """Client-server API, "Room summary": `m.heroes` are of use with their member events."""
    room = new_room(members=[LOCAL, OTHER, REMOTE])
    for number in range(3):
        room.message(ADMIN, str(number))
    await deliver(store, room)
    first = await store.sync(LOCAL, filter=LAZY, timeline_limit=1)
    for events in (first.join[room.room_id].state, first.join[room.room_id].state_after):
        assert members(events) == {LOCAL, ADMIN, OTHER, REMOTE}
    await append(store, room.message(ADMIN))
    second = await store.sync(LOCAL, filter=LAZY, since=first.next_batch)
    assert members(second.join[room.room_id].state) == {ADMIN}, "there is no summary"
    await append(store, room.leave(OTHER))
    third = await store.sync(LOCAL, filter=LAZY, since=second.next_batch)
    assert third.join[room.room_id].summary == called(3, 0, (ADMIN, REMOTE))
    assert members(third.join[room.room_id].state) == {ADMIN, OTHER, REMOTE}


async def test_a_filter_that_leaves_nothing_leaves_no_room(store: Store) -> None:
    """Also where members are loaded lazily: the user's own membership is no news."""
    room = new_room(members=[LOCAL], name="named")
    await deliver(store, room)
    only = EventFilter(types=["m.room.topic"])
    for lazy in (False, True):
        wanted = SyncFilter(timeline=only, lazy_load_members=lazy)
        since = (await store.sync(LOCAL, filter=wanted)).next_batch
        await append(store, room.message(ADMIN))
        assert (await store.sync(LOCAL, since=since, filter=wanted, device_id="PHONE")).is_empty
        topic = room.topic(ADMIN, f"wanted {lazy}")
        await append(store, topic)
        found = (await store.sync(LOCAL, since=since, filter=wanted)).join[room.room_id]
        assert ids(found.timeline.events) == [topic.event_id]


async def test_members_that_the_client_has_are_not_repeated(store: Store) -> None:
    """Client-server API, "Lazy-loading room members": without include_redundant_members."""
    room = new_room(members=[LOCAL, OTHER, REMOTE], name="named")
    room.message(ADMIN)
    await deliver(store, room)
    again = SyncFilter(lazy_load_members=True, include_redundant_members=True)

    async def told(
        since: str | None, wanted: SyncFilter = LAZY, **how: Any
    ) -> tuple[set[str], str]:
        asked = {"device_id": "PHONE", **how}
        found = await store.sync(LOCAL, filter=wanted, since=since, timeline_limit=1, **asked)
        one = found.join[room.room_id]
        assert members(one.state) == members(one.state_after)
        return members(one.state), found.next_batch

    found, first = await told(None)
    assert found == {LOCAL, ADMIN}
    await append(store, room.message(OTHER), room.message(OTHER))
    found, second = await told(first)
    assert found == {OTHER}
    await append(store, room.message(OTHER))
    assert (await told(second, device_id="LAPTOP"))[0] == {OTHER}, "another device"
    assert (await told(second, device_id=None))[0] == {OTHER}, "nobody knows which"
    assert (await told(second))[0] == set()
    assert (await told(second, again))[0] == {LOCAL, OTHER}
    found, third = await told(first)
    assert found == {OTHER}, "the client has lost a response"
    await append(store, room.join(OTHER, displayname="other"), room.message(OTHER))
    found, fourth = await told(third)
    assert found == {OTHER}, "it has changed"
    await append(store, room.message(LOCAL), room.message(OTHER))
    found, fifth = await told(fourth)
    assert found == set()
    await append(store, room.leave(LOCAL), room.join(LOCAL), room.message(OTHER))
    assert (await told(fifth))[0] == {LOCAL, OTHER}, "the room is new to it"
    assert (await told(None))[0] == {LOCAL, OTHER}, "a first sync"
