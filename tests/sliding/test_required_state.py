"""Required state: patterns, state that changes, grows, shrinks, and is taken away."""

import pytest

from storage import Store
from storage.ids import StateKey
from storage.queries.sliding.room_state import Required, beyond, printed, read, union
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, new_room
from tests.sliding.client import EVERYTHING, SlidingClient, state_of

CREATE = ("m.room.create", "")
NAME = ("m.room.name", "")
TOPIC = ("m.room.topic", "")
LAZY = ("m.room.member", "$LAZY")
MEMBERS = ("m.room.member", "*")


def _set(included: list[StateKey], *excluded: StateKey) -> Required:
    return Required(frozenset(included), frozenset(excluded))


def member(user_id: str) -> StateKey:
    return "m.room.member", user_id


@pytest.mark.parametrize(
    "required, found",
    [
        ([], set()),
        ([CREATE, TOPIC], {CREATE}),
        ([("m.room.member", "$ME")], {member(LOCAL)}),
        ([MEMBERS], {member(ADMIN), member(LOCAL), member(OTHER)}),
        ([("m.room.name", "*")], {NAME}),
        ([("*", ADMIN)], {member(ADMIN)}),
        ([LAZY], {member(ADMIN)}),
        ([("none", ""), ("none", "*")], set()),
    ],
)
async def test_the_state_that_matches_is_sent(
    store: Store, required: list[StateKey], found: set[StateKey]
) -> None:
    room = new_room(members=[LOCAL, OTHER], name="first")
    room.message(ADMIN, "one")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    shown = (await client.sync((0, 19), limit=1, required=required)).rooms[room.room_id]
    assert state_of(shown) == found


async def test_with_lazy_members_everything_has_no_other_members(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER], name="first")
    room.message(ADMIN, "one")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 19), limit=1, required=[*EVERYTHING, LAZY])
    others = {key for key in room.state if key[0] != "m.room.member"}
    assert state_of(answer.rooms[room.room_id]) == {*others, member(ADMIN)}


async def test_lazy_members_are_senders_and_changed_members(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[LAZY])
    await append(store, room.message(OTHER, "one"))
    shown = (await client.sync((0, 19), required=[LAZY])).rooms[room.room_id]
    assert state_of(shown) == {member(OTHER)}
    await append(store, room.kick(ADMIN, OTHER), room.message(ADMIN, "two"))
    shown = (await client.sync((0, 19), required=[LAZY], limit=1)).rooms[room.room_id]
    assert state_of(shown) == {member(ADMIN)}, "a gap: the client flushes its members"
    await append(store, room.join(OTHER), room.message(ADMIN, "two"))
    shown = (await client.sync((0, 19), required=[LAZY], limit=2)).rooms[room.room_id]
    assert state_of(shown) == {member(ADMIN), member(OTHER)}


async def test_state_that_is_required_later_is_sent_at_once(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[CREATE])
    shown = (await client.sync((0, 19), required=[CREATE, NAME])).rooms[room.room_id]
    assert (state_of(shown), shown.timeline) == ({NAME}, [])
    assert (await client.sync((0, 19), required=[CREATE, NAME])).rooms == {}


async def test_state_that_was_not_required_for_a_while_is_sent_if_it_changed(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[CREATE, NAME])
    assert (await client.sync((0, 19), required=[CREATE])).rooms == {}
    assert (await client.sync((0, 19), required=[CREATE, NAME])).rooms == {}, "unchanged"
    await client.sync((0, 19), required=[CREATE])
    renamed = room.name(ADMIN, "second")
    await append(store, renamed)
    shown = (await client.sync((0, 19), required=[CREATE])).rooms[room.room_id]
    assert (state_of(shown), shown.name) == (set(), "second")
    shown = (await client.sync((0, 19), required=[CREATE, NAME])).rooms[room.room_id]
    assert [event.event_id for event in shown.required_state] == [renamed.event_id]


async def test_state_that_resolution_takes_away_is_named(store: Store) -> None:
    """On one branch a guest joins, on the other the room is closed: resolution removes the join."""
    room = new_room(members=[LOCAL])
    left, right = room.fork(2)
    closed, joined = left.join_rules(ADMIN, "invite"), right.join(REMOTE)
    await append(store, *[event for event in room.events if event is not closed])
    client = SlidingClient(store, LOCAL)
    shown = (await client.sync((0, 19), required=[MEMBERS])).rooms[room.room_id]
    assert joined.event_id in {event.event_id for event in shown.required_state}
    await append(store, closed)
    shown = (await client.sync((0, 19), required=[MEMBERS])).rooms[room.room_id]
    assert (state_of(shown), list(shown.removed_state)) == (set(), [member(REMOTE)])
    assert shown.joined_count == 2


async def test_a_limited_timeline_has_no_other_changed_members(store: Store) -> None:
    """Resolution takes back that a guest returned: the timeline has no event of the guest."""
    room = new_room(members=[LOCAL, REMOTE])
    room.leave(REMOTE)
    left, right = room.fork(2)
    closed = left.join_rules(ADMIN, "invite")
    right.join(REMOTE)
    right.message(ADMIN, "one")
    await append(store, *[event for event in room.events if event is not closed])
    follower = SlidingClient(store, LOCAL, conn_id="follower")
    await follower.sync((0, 19), required=[LAZY], limit=50)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[LAZY], limit=1)
    await append(store, closed)
    shown = (await follower.sync((0, 19), required=[LAZY], limit=50)).rooms[room.room_id]
    assert (shown.limited, state_of(shown)) == (False, {member(ADMIN), member(REMOTE)})
    shown = (await client.sync((0, 19), required=[LAZY], limit=2)).rooms[room.room_id]
    assert (shown.limited, shown.num_live, shown.expanded_timeline) == (True, 1, True)
    assert state_of(shown) == {member(ADMIN)}, "the client forgets its members"


async def test_everything_that_is_required_later_has_no_lazy_members(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[CREATE], limit=50)
    answer = await client.sync((0, 19), required=[*EVERYTHING, LAZY], limit=50)
    assert state_of(answer.rooms[room.room_id]) == {
        key for key in room.state if key[0] != "m.room.member"
    }


async def test_a_key_of_all_types_has_the_member_that_was_loaded_lazily(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    room.message(ADMIN, "one")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    known = [*EVERYTHING, LAZY]
    assert member(OTHER) not in state_of(
        (await client.sync((0, 19), required=known, limit=1)).rooms[room.room_id]
    )
    answer = await client.sync((0, 19), required=[*known, ("*", OTHER)], limit=1)
    assert member(OTHER) in state_of(answer.rooms[room.room_id])


async def test_members_that_a_limited_timeline_flushed_are_sent_again(store: Store) -> None:
    room = new_room(members=[LOCAL, OTHER])
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[MEMBERS], limit=1)
    await append(store, room.message(ADMIN, "one"), room.message(ADMIN, "two"))
    shown = (await client.sync((0, 19), required=[LAZY], limit=1)).rooms[room.room_id]
    assert (shown.limited, state_of(shown)) == (True, {member(ADMIN)})
    shown = (await client.sync((0, 19), required=[MEMBERS], limit=1)).rooms[room.room_id]
    assert state_of(shown) == {member(ADMIN), member(LOCAL), member(OTHER)}


async def test_state_that_is_taken_away_is_named_though_no_longer_required(store: Store) -> None:
    room = new_room(members=[LOCAL])
    left, right = room.fork(2)
    closed = left.join_rules(ADMIN, "invite")
    right.join(REMOTE)
    await append(store, *[event for event in room.events if event is not closed])
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[MEMBERS])
    await append(store, closed)
    shown = (await client.sync((0, 19))).rooms[room.room_id]
    assert (state_of(shown), list(shown.removed_state)) == (set(), [member(REMOTE)])


@pytest.mark.parametrize(
    "required, known, grown",
    [
        ([NAME], [NAME], []),
        ([NAME], [("m.room.name", "*")], []),
        ([NAME], [("*", "")], []),
        ([NAME], EVERYTHING, []),
        (EVERYTHING, [NAME], [*EVERYTHING, MEMBERS]),
        (EVERYTHING, [*EVERYTHING, LAZY], [MEMBERS]),
        ([*EVERYTHING, LAZY], EVERYTHING, []),
        ([member(ADMIN)], [*EVERYTHING, LAZY], [member(ADMIN)]),
        ([("*", ADMIN)], [*EVERYTHING, LAZY], [("*", ADMIN)]),
        ([("*", ADMIN)], EVERYTHING, []),
        ([LAZY], [NAME], []),
        ([("m.room.name", "*")], [NAME], [("m.room.name", "*")]),
    ],
)
def test_what_a_set_has_beyond_another(
    required: list[StateKey], known: list[StateKey], grown: list[StateKey]
) -> None:
    assert beyond(_set(required), _set(known)) == set(grown)


def test_the_union_keeps_the_members_of_a_set_without_lazy_ones() -> None:
    everything, lazy = _set(EVERYTHING), _set([*EVERYTHING, LAZY])
    assert union([lazy]) == lazy
    assert union([lazy, everything]) == _set([*EVERYTHING, LAZY, MEMBERS])


@pytest.mark.parametrize(
    "other, excluded",
    [
        (_set([TOPIC]), [CREATE]),
        (_set([CREATE]), []),
        (_set([("*", "")]), []),
        (_set([CREATE], CREATE), [CREATE]),
        (_set([("*", "key")]), [CREATE]),
        (_set([LAZY]), [CREATE]),
    ],
)
def test_a_union_excludes_what_no_set_includes(other: Required, excluded: list[StateKey]) -> None:
    assert union([_set([NAME], CREATE), other]).excluded == set(excluded)


def test_a_set_with_exclusions_is_read_as_it_was_printed() -> None:
    for one in (_set([NAME, LAZY]), _set(EVERYTHING, CREATE), _set([])):
        assert read(printed(one)) == one


@pytest.mark.parametrize(
    "required, excluded, found",
    [
        (EVERYTHING, [MEMBERS, ("m.room.power_levels", "")], {CREATE, NAME}),
        ([CREATE, NAME], [("*", "")], set()),
        ([MEMBERS], [("m.room.member", "$ME")], {member(ADMIN), member(OTHER)}),
        ([NAME, LAZY], [MEMBERS], {NAME, member(ADMIN)}),
        ([MEMBERS, LAZY], [MEMBERS], {member(ADMIN)}),
    ],
)
async def test_excluded_state_is_left_out(
    store: Store, required: list[StateKey], excluded: list[StateKey], found: set[StateKey]
) -> None:
    room = new_room(members=[LOCAL, OTHER], name="first")
    room.message(ADMIN, "one")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    answer = await client.sync((0, 19), limit=1, required=required, excluded=excluded)
    ignorable = {("m.room.join_rules", ""), ("m.room.history_visibility", "")}
    assert state_of(answer.rooms[room.room_id]) - ignorable == found


async def test_state_that_is_excluded_no_more_is_sent_at_once(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=EVERYTHING, excluded=[NAME])
    assert (await client.sync((0, 19), required=EVERYTHING, excluded=[NAME])).rooms == {}
    shown = (await client.sync((0, 19), required=EVERYTHING)).rooms[room.room_id]
    assert NAME in state_of(shown)
    assert (await client.sync((0, 19), required=EVERYTHING)).rooms == {}


async def test_state_that_changed_while_it_was_excluded_is_sent_later(store: Store) -> None:
    room = new_room(members=[LOCAL], name="first")
    await deliver(store, room)
    client = SlidingClient(store, LOCAL)
    await client.sync((0, 19), required=[CREATE, NAME])
    assert (await client.sync((0, 19), required=[CREATE, NAME], excluded=[NAME])).rooms == {}
    assert (await client.sync((0, 19), required=[CREATE, NAME])).rooms == {}, "unchanged"
    await client.sync((0, 19), required=[CREATE, NAME], excluded=[NAME])
    renamed = room.name(ADMIN, "second")
    await append(store, renamed)
    shown = (await client.sync((0, 19), required=[CREATE, NAME], excluded=[NAME])).rooms
    assert state_of(shown[room.room_id]) == set()
    shown = (await client.sync((0, 19), required=[CREATE, NAME])).rooms
    assert [one.event_id for one in shown[room.room_id].required_state] == [renamed.event_id]
