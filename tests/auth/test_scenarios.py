"""Resolutions whose outcome is known in words: who should win, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from storage.auth import auth_event_keys, resolve
from storage.event import Event
from storage.ids import EventId, StateKey
from tests.auth.events import ROOM, make_event
from tests.auth.literal_resolution import LiteralRoom, resolve_literally

ALICE, BOB, CHARLIE, EVELYN = "@alice:a", "@bob:a", "@charlie:b", "@evelyn:c"
State = dict[StateKey, EventId]
POWER: StateKey = ("m.room.power_levels", "")
RULES: StateKey = ("m.room.join_rules", "")
TOPIC: StateKey = ("m.room.topic", "")


def of(user: str) -> StateKey:
    return "m.room.member", user


class RoomScenario:
    """A room in which Alice has 100, Bob and Charlie are joined, and everybody may join."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.events: dict[EventId, Event] = {}
        create = make_event(
            version, self._id("create"), "m.room.create", ALICE, "", {"creator": ALICE}, prev=()
        )
        self.room_id = create.room_id if version == "12" else ROOM
        self.create_id = create.event_id
        self.events[create.event_id] = create
        state: State = {create.key: create.event_id}
        state = self.after(state, "alice", ALICE, of(ALICE), {"membership": "join"})
        state = self.after(state, "power", ALICE, POWER, self.power({}))
        state = self.after(state, "public", ALICE, RULES, {"join_rule": "public"})
        state = self.after(state, "bob", BOB, of(BOB), {"membership": "join"})
        self.start = self.after(state, "charlie", CHARLIE, of(CHARLIE), {"membership": "join"})

    def power(self, users: Mapping[str, int]) -> dict[str, Any]:
        return {"users": dict(users) if self.version == "12" else {ALICE: 100, **users}}

    def _id(self, name: str) -> str:
        return f"${name}:a" if self.version in {"1", "2"} else f"${name}"

    def after(
        self, state: State, name: str, sender: str, key: StateKey, content: dict[str, Any]
    ) -> State:
        """The state after one more event."""
        draft = make_event(
            self.version, self._id(name), key[0], sender, key[1], content, room_id=self.room_id
        )
        event = make_event(
            self.version,
            self._id(name),
            *(key[0], sender, key[1], content),
            room_id=self.room_id,
            auth=[state[k] for k in sorted(auth_event_keys(draft)) if k in state],
            prev=[self.create_id if len(self.events) == 1 else "$p"],
            ts=len(self.events),
            depth=len(self.events),
        )
        self.events[event.event_id] = event
        return state | {key: event.event_id}

    def resolved(self, *states: State, changes: Sequence[str]) -> None:
        """The states come to the start with these events put in, by both implementations."""
        expected = dict(self.start)
        for name in changes:
            event = self.events[EventId(self._id(name))]
            expected[event.key] = event.event_id
        assert resolve(self.version, states, self.events) == expected
        assert (
            resolve_literally(LiteralRoom(self.version, self.events, frozenset()), states)
            == expected
        )


versions_2 = pytest.mark.parametrize("version", ["2", "6", "11", "12"])


@versions_2
def test_a_ban_wins_over_what_the_banned_user_did_meanwhile(version: str) -> None:
    story = RoomScenario(version)
    promoted = story.after(story.start, "promote", ALICE, POWER, story.power({BOB: 50}))
    banned = story.after(promoted, "ban", ALICE, of(BOB), {"membership": "ban"})
    changed = story.after(promoted, "bobs", BOB, POWER, story.power({BOB: 50, CHARLIE: 25}))
    story.resolved(banned, changed, changes=["promote", "ban"])


@versions_2
def test_a_private_room_is_not_entered_through_an_older_fork(version: str) -> None:
    story = RoomScenario(version)
    private = story.after(story.start, "private", ALICE, RULES, {"join_rule": "invite"})
    evelyn = story.after(story.start, "evelyn", EVELYN, of(EVELYN), {"membership": "join"})
    story.resolved(private, evelyn, changes=["private"])


@versions_2
def test_power_levels_are_not_reset_by_an_old_state(version: str) -> None:
    story = RoomScenario(version)
    first = story.after(story.start, "a", ALICE, POWER, story.power({BOB: 50}))
    second = story.after(first, "b", BOB, POWER, story.power({BOB: 50, CHARLIE: 50}))
    third = story.after(second, "c", CHARLIE, POWER, story.power({BOB: 50, CHARLIE: 0}))
    story.resolved(third, first, changes=["a", "b", "c"])


@versions_2
def test_a_topic_of_a_banned_user_falls_back(version: str) -> None:
    story = RoomScenario(version)
    topic = story.after(story.start, "topic1", ALICE, TOPIC, {"topic": "1"})
    promoted = story.after(topic, "promote", ALICE, POWER, story.power({BOB: 50}))
    second = story.after(promoted, "topic2", BOB, TOPIC, {"topic": "2"})
    banned = story.after(second, "ban", ALICE, of(BOB), {"membership": "ban"})
    story.resolved(banned, topic, changes=["topic1", "promote", "ban"])


@versions_2
def test_the_topic_based_on_later_power_levels_wins(version: str) -> None:
    story = RoomScenario(version)
    topic = story.after(story.start, "topic1", ALICE, TOPIC, {"topic": "1"})
    promoted = story.after(topic, "promote", ALICE, POWER, story.power({BOB: 50}))
    second = story.after(promoted, "topic2", BOB, TOPIC, {"topic": "2"})
    story.resolved(
        second,
        story.after(topic, "topic3", ALICE, TOPIC, {"topic": "3"}),
        changes=["promote", "topic2"],
    )


def test_an_unconflicted_membership_does_not_judge_the_past() -> None:
    """MSC4297: with version 2 a membership that all states share authorises older conflict events.

    Version 2.1 starts from nothing.
    """
    outcomes = {}
    for version in ("11", "12"):
        story = RoomScenario(version)
        promoted = story.after(story.start, "promote", ALICE, POWER, story.power({BOB: 50}))
        renamed = story.after(promoted, "rules", BOB, RULES, {"join_rule": "invite"})
        gone = {
            of(BOB): story.after(renamed, "gone", BOB, of(BOB), {"membership": "leave"})[of(BOB)]
        }
        older, newer = promoted | gone, renamed | gone
        result = resolve(version, [older, newer], story.events)
        assert result == resolve_literally(
            LiteralRoom(version, story.events, frozenset()), [older, newer]
        )
        outcomes[version] = result[RULES]
    assert outcomes == {"11": "$public", "12": "$rules"}


def test_version_1_takes_the_deepest_that_is_allowed() -> None:
    story = RoomScenario("1")
    topic = story.after(story.start, "topic1", ALICE, TOPIC, {"topic": "1"})
    refused = story.after(topic, "topic2", BOB, TOPIC, {"topic": "2"})
    latest = story.after(topic, "topic3", ALICE, TOPIC, {"topic": "3"})
    story.resolved(refused, latest, changes=["topic3"])
    story.resolved(refused, topic, changes=["topic1"])


def test_version_1_a_key_that_one_state_lacks_is_no_conflict() -> None:
    story = RoomScenario("1")
    topic = story.after(
        story.start, "topic1", BOB, TOPIC, {"topic": "1"}
    )  # not allowed, yet nothing judges it
    story.resolved(topic, story.start, changes=["topic1"])


def test_version_1_power_levels_before_memberships() -> None:
    story = RoomScenario("1")
    promoted = story.after(story.start, "promote", ALICE, POWER, story.power({BOB: 50}))
    banned = story.after(promoted, "ban", BOB, of(CHARLIE), {"membership": "ban"})
    renamed = story.after(
        story.start, "rename", CHARLIE, of(CHARLIE), {"membership": "join", "displayname": "c"}
    )
    story.resolved(banned, renamed, changes=["promote", "ban"])


@pytest.mark.parametrize("version", ["1", "2", "12"])
def test_nothing_to_resolve(version: str) -> None:
    story = RoomScenario(version)
    assert resolve(version, [], story.events) == {}
    assert resolve(version, [story.start], story.events) == story.start
    assert resolve(version, [story.start, dict(story.start)], {}) == story.start
