"""States at merges: the fast path against whole state resolution, and merges that must be free."""

import pytest

from storage import auth
from storage.ids import EventId
from storage.testing import RoomBuilder, build_room
from storage.testing.graph import ParsedEvents, merge
from storage.testing.world import FORK_HEAVY


@pytest.mark.parametrize("version", ["1", "2", "9", "11", "12"])
def test_states_are_those_of_state_resolution(version: str) -> None:
    room = build_room(FORK_HEAVY, 800, seed=6, version=version, sign=False)
    merges = [built for built in room.events if len(built.prev_events) > 1]
    assert sum(built.event_id in room.graph.resolution_changes for built in merges) > 20
    for built in merges:
        states = [dict(room.event(parent).state_after) for parent in built.prev_events]
        assert dict(built.state_before) == auth.resolve(version, states, ParsedEvents(room.graph))
        assert merge(room.graph, built.prev_events, exact=False).state == built.state_before


def test_a_ban_wins_over_what_the_banned_did_elsewhere() -> None:
    room = RoomBuilder("11")
    admin, mod = room.user(1), room.user(2)
    room.start(admin, users={mod: 50})
    room.join(mod)
    before = room.topic(admin, "before")
    left, right = room.fork()
    ban = left.ban(admin, mod)
    right.topic(mod, "after")
    room.merge(left, right)
    last = room.message(admin)
    assert set(last.prev_events) == {*left.heads, *right.heads}
    assert last.state_before["m.room.member", mod] == ban.event_id
    assert last.state_before["m.room.topic", ""] == before.event_id
    assert room.membership(mod) == "ban"


def test_branches_that_agree_are_not_resolved() -> None:
    room = RoomBuilder("11")
    admin = room.user(1)
    room.start(admin)
    left, right = room.fork()
    left.message(admin)
    right.message(admin)
    merged = room.merge(left, right).message(admin)
    assert merged.state_before is room.event(merged.prev_events[0]).state_after
    assert merged.event_id not in room.graph.resolution_changes


def test_a_message_shares_the_state_of_its_parent() -> None:
    room = RoomBuilder("11")
    admin = room.user(1)
    room.start(admin)
    said = room.message(admin)
    assert said.state_after is said.state_before is room.event(said.prev_events[0]).state_after


def test_a_merge_of_merges_finds_what_the_first_merge_decided() -> None:
    room = RoomBuilder("11")
    admin, mod = room.user(1), room.user(2)
    room.start(admin, users={mod: 50})
    room.join(mod)
    room.topic(admin, "before")
    left, right, other = room.fork(3)
    left.ban(admin, mod)
    right.topic(mod, "lost")
    left.merge(right)
    decided = left.message(admin)
    other.message(admin)
    room.merge(left, other)
    last = room.message(admin)
    assert set(last.prev_events) == {decided.event_id, EventId(other.heads[0])}
    assert last.state_before == decided.state_after


def test_a_room_can_be_trimmed_and_go_on() -> None:
    room = RoomBuilder("11")
    admin, other = room.user(1), room.user(2)
    room.start(admin)
    room.join(other)
    kept = room.message(other)
    room.graph.trim(kept.event_id)
    assert [built.event_id for built in room.events] == [kept.event_id]
    left, right = room.fork()
    left.topic(admin, "one")
    right.kick(admin, other)
    room.merge(left, right)
    assert room.membership(other) == "leave"
    assert room.content("m.room.topic") == {"topic": "one"}
