"""Incremental resolution against resolution of the whole, on random rooms; and its work."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.auth import (
    Change,
    Resolution,
    auth_difference,
    conflicted_subgraph,
    resolve,
    split_conflicts,
)
from storage.auth.resolution.incremental import MAINLINE, POWER
from storage.auth.resolution.v2 import (
    ConflictedEvents,
    power_phase,
    remaining_order,
    reverse_topological_power_order,
)
from storage.event import Event
from storage.event.versions import version_of
from storage.ids import EventId, StateKey
from tests.auth.events import ROOM, make_event
from tests.auth.random_rooms import RandomRoom, random_step
from tests.auth.settings import thorough
from tests.auth.test_resolution_random import ALGORITHMS

State = dict[StateKey, EventId]


class Lazy:
    """Events and keys of a state of which each has to be loaded before it can be read."""

    def __init__(
        self, events: Mapping[EventId, Event], base: State, rejected: AbstractSet[EventId]
    ) -> None:
        self.held = events
        self.loaded: dict[EventId, Event] = {}
        self.wanted: set[EventId] = set()
        self.rejected = rejected
        self.rounds = 0
        self.reads: list[EventId] = []
        self.start_from(base)

    def start_from(self, base: State) -> None:
        self.state = base
        self.keys: set[StateKey] = set()
        self.wanted_keys: set[StateKey] = set()

    def event(self, event_id: EventId, /) -> Event | None:
        self.reads.append(event_id)
        if event_id in self.held and event_id not in self.loaded:
            self.wanted.add(event_id)
        return self.loaded.get(event_id)

    def base(self, key: StateKey, /) -> EventId | None:
        if key not in self.keys:
            self.wanted_keys.add(key)
            return None
        return self.state.get(key)

    @property
    def lacking(self) -> bool:
        return bool(self.wanted or self.wanted_keys)

    def load(self) -> None:
        self.loaded |= {event_id: self.held[event_id] for event_id in self.wanted}
        self.keys |= self.wanted_keys
        self.wanted.clear()
        self.wanted_keys.clear()
        self.rounds += 1


class IncrementalResolution:
    """A resolution that follows the states as they change."""

    def __init__(
        self,
        version: str,
        events: Mapping[EventId, Event],
        rejected: AbstractSet[EventId] = frozenset(),
    ) -> None:
        self.version, self.is_newer = version, version_of(version).state_resolution == "v2.1"
        self.source = Lazy(events, {}, rejected)
        self.resolution = Resolution()
        self.passed: set[EventId] = set()
        self.conflict = ConflictedEvents(frozenset(), None, {})
        self.steps = 0

    def resolved(self, states: list[State]) -> dict[StateKey, EventId]:
        events = self.source.held
        unconflicted, conflicted = split_conflicts(states)
        values = set().union(*conflicted.values())
        full = values | auth_difference([state.values() for state in states], events)
        between = conflicted_subgraph(values, events)
        full, passed = (full | between, set()) if self.is_newer else (full, between - full)
        removed = self.resolution.full - full
        base = {} if self.is_newer else unconflicted
        changed = {
            key
            for key in base.keys() | self.source.state.keys()
            if base.get(key) != self.source.state.get(key)
        }
        self.source.start_from(base)
        self.passed -= removed
        self.run(Change(full - self.resolution.full, removed, passed - self.passed, changed))
        self.passed |= passed | full
        self.conflict = ConflictedEvents(full, full | passed, base)
        return self.resolution.decided() | unconflicted

    def run(self, change: Change) -> None:
        for lacking in self.resolution.change(change, self.source):
            assert lacking == self.source.lacking
            self.steps += 1
            if lacking:
                self.source.load()

    def orders(self) -> tuple[list[EventId], list[EventId]]:
        return self.resolution.ledger.order(POWER), self.resolution.ledger.order(MAINLINE)

    def orders_of_the_whole(self) -> tuple[list[EventId], list[EventId]]:
        """Those of `storage.auth.resolution.v2`."""
        lookup = self.source.held.get
        decided, judged = power_phase(self.conflict, lookup, self.source.rejected)
        return reverse_topological_power_order(judged, lookup), remaining_order(
            self.conflict, decided, judged, lookup
        )


def histories(versions: tuple[str, ...], number: int, length: int) -> tuple[RandomRoom, Random]:
    random = Random(number)
    room = RandomRoom(random.choice(versions), random.randrange(64))
    room.begin()
    for _ in range(length):
        room.take(random_step(random))
    return room, random


def questions(room: RandomRoom, random: Random) -> Iterator[list[State]]:
    """States of the room; from one question to the next mostly one of them goes on a little."""
    points = list(room.points)
    at = [random.randrange(len(points)) for _ in range(random.choice((2, 2, 3)))]
    for _ in range(12):
        yield [points[one] for one in at]
        which, kind = random.randrange(len(at)), random.randrange(8)
        if kind == 0:
            at[which] = random.randrange(len(points))
        elif kind == 1 and len(at) < 4:
            at.append(random.randrange(len(points)))
        elif kind == 2 and len(at) > 2:
            at.pop(which)
        else:
            at[which] = min(at[which] + random.randrange(3), len(points) - 1)


@pytest.mark.parametrize("algorithm", ["2", "2.1"])
@thorough
@given(number=st.integers(0, 2**40), length=st.integers(5, 50))
def test_comes_to_what_the_whole_comes_to(algorithm: str, number: int, length: int) -> None:
    room, random = histories(ALGORITHMS[algorithm], number, length)
    rejected = frozenset(room.refused) if random.randrange(2) else frozenset()
    missing = set(random.sample(sorted(room.events), 2)) if random.randrange(4) == 0 else set()
    events = {event_id: event for event_id, event in room.events.items() if event_id not in missing}
    follower = IncrementalResolution(room.version, events, rejected)
    for states in questions(room, random):
        assert follower.resolved(states) == resolve(room.version, states, events, rejected=rejected)
        assert follower.orders() == follower.orders_of_the_whole()


def with_circles(events: Mapping[EventId, Event], random: Random) -> dict[EventId, Event]:
    """Have join rules and memberships cite later ones, too.

    Power levels stay in line: in a circle the mainline depends on where it is entered.
    """
    some = [
        event for event in events.values() if event.type in {"m.room.join_rules", "m.room.member"}
    ]
    citing = {
        event.event_id: (*event.auth_event_ids, random.choice(some).event_id)
        for event in random.sample(some, len(some) // 2)
    }
    return {
        event_id: replace(event, auth_event_ids=citing.get(event_id, event.auth_event_ids))
        for event_id, event in events.items()
    }


@thorough
@given(number=st.integers(0, 2**40), length=st.integers(5, 50))
def test_comes_to_the_same_where_events_cite_each_other_in_a_circle(
    number: int, length: int
) -> None:
    room, random = histories(("2",), number, length)
    events = with_circles(room.events, random)
    follower = IncrementalResolution("2", events)
    for states in questions(room, random):
        assert follower.resolved(states) == resolve("2", states, events)
        assert follower.orders() == follower.orders_of_the_whole()


def chains(
    version: str, length: int, *, later: bool
) -> tuple[dict[EventId, Event], list[list[State]]]:
    """Two chains of power levels, and the states as the second grows beside the whole first one."""
    creator = "@0:a"
    events: dict[EventId, Event] = {}

    def add(kind: str, key: str, content: dict[str, Any], cited: list[EventId], ts: int) -> EventId:
        room = ROOM if version != "12" or not events else "!" + next(iter(events))[1:]
        event = make_event(
            version,
            f"${len(events)}",
            kind,
            creator,
            key,
            content,
            room_id=room,
            ts=ts,
            auth=cited,
            prev=("$p",),
        )
        events[event.event_id] = event
        return event.event_id

    create = add("m.room.create", "", {"creator": creator, "room_version": version}, [], 0)
    named = [] if version == "12" else [create]
    member = add("m.room.member", creator, {"membership": "join"}, named, 1)
    users = {} if version == "12" else {creator: 100}
    power = add("m.room.power_levels", "", {"users": users}, [*named, member], 2)
    state = {
        ("m.room.create", ""): create,
        ("m.room.member", creator): member,
        ("m.room.power_levels", ""): power,
    }
    ends: list[list[State]] = [[state], [state]]
    for number in range(length):
        for branch, own in enumerate(ends):
            last = own[-1]["m.room.power_levels", ""]
            ts = 10 + 2 * number + branch if not (later and branch) else 10_000 + number
            content = {"users": users | {"@x:a": number % 50}}
            own.append(
                own[-1]
                | {
                    ("m.room.power_levels", ""): add(
                        "m.room.power_levels", "", content, [*named, member, last], ts
                    )
                }
            )
    return events, [[ends[0][-1], one] for one in ends[1][1:]]


@pytest.mark.parametrize("version", ["2", "11", "12"])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("at_once", [1, 2])
def test_the_work_for_an_event_does_not_grow_with_the_chain(
    version: str, later: bool, at_once: int
) -> None:
    """One more event costs one or two auth checks, for any chain length and any position."""
    work = {}
    for length in (20, 200):
        events, states = chains(version, length, later=later)
        follower = IncrementalResolution(version, events)
        counts = []
        for question in states[at_once - 1 :: at_once]:
            assert follower.resolved(question)["m.room.power_levels", ""] in {
                *question[0].values(),
                *question[1].values(),
            }
            counts.append(
                (follower.resolution.ledger.checks, follower.steps, follower.source.rounds)
            )
        work[length] = [
            max(after - before for before, after in pairwise(one))
            for one in zip(*counts, strict=True)
        ]
        assert follower.resolved(states[-1]) == resolve(version, states[-1], events)
    assert work[200] == work[20]
    assert work[200][0] <= 2 * at_once


def small(version: str) -> tuple[dict[EventId, Event], State, Callable[..., EventId]]:
    """Return a room with a moderator, its state, and a function that adds an event.

    The event cites this state and the given events.
    """
    creator = "@0:a"
    events: dict[EventId, Event] = {}
    state: State = {}

    def add(
        name: str,
        kind: str,
        key: str,
        content: dict[str, Any],
        *,
        sender: str = creator,
        ts: int = 0,
        cited: Sequence[str] = (),
    ) -> EventId:
        room = "!create" if version == "12" else ROOM
        named = [one for (of, _), one in state.items() if version != "12" or of != "m.room.create"]
        event = make_event(
            version,
            f"${name}",
            kind,
            sender,
            key,
            content,
            room_id=room,
            ts=ts,
            auth=[*named, *cited],
            prev=("$p",),
        )
        events[event.event_id] = event
        return event.event_id

    begun: list[tuple[str, str, str, dict[str, Any]]] = [
        ("create", "m.room.create", "", {"creator": creator, "room_version": version}),
        ("creator", "m.room.member", creator, {"membership": "join"}),
        (
            "power",
            "m.room.power_levels",
            "",
            {"users": {"@1:a": 99} | ({} if version == "12" else {creator: 100})},
        ),
    ]
    for name, kind, key, content in begun:
        state[kind, key] = add(name, kind, key, content)
    return events, state, add


def test_what_stays_in_its_order_is_not_checked_again() -> None:
    events, state, add = small("11")
    topics = [add(f"{number}", "m.topic", str(number), {}, ts=number) for number in range(20)]
    follower = IncrementalResolution("11", events)
    follower.source.start_from(state)
    follower.run(Change(topics[::2]))
    ledger = follower.resolution.ledger
    assert (follower.orders(), ledger.checks) == (([], topics[::2]), 10)
    follower.run(Change([topics[5]]))
    assert (follower.orders()[1][2:5], ledger.checks) == (topics[4:7], 11)
    follower.run(Change([topics[1], topics[19]], {topics[0], topics[8]}))
    assert (follower.orders()[1][:3], ledger.checks) == ([topics[1], topics[2], topics[4]], 13)
    assert follower.orders()[1][-2:] == topics[18:]


def test_the_mainline_is_loaded_as_far_back_as_the_events_cite_it() -> None:
    """The topic under the oldest power levels goes first, though it was sent last."""
    events, state, add = small("11")
    topics = []
    for number in range(6):
        topics.append(add(f"{number}", "m.topic", str(number), {}, ts=100 - number))
        state["m.room.power_levels", ""] = add(
            f"p{number}",
            "m.room.power_levels",
            "",
            {"users": {"@0:a": 100, "@1:a": number}},
            ts=number,
        )
    follower = IncrementalResolution("11", events)
    follower.source.start_from(state)
    follower.run(Change(topics[::2]))
    assert follower.orders() == ([], topics[::2])
    follower.run(Change(topics[1::2]))
    assert follower.orders() == ([], topics)
    follower.source.reads.clear()
    follower.run(Change(()))
    assert all(
        events[event_id].type == "m.room.power_levels" for event_id in follower.source.reads
    )  # it is known which each cites
