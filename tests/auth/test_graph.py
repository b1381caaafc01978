"""Graphs of auth events: long chains, circles, missing parts; work does not grow with the room."""

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.auth import (
    auth_chain,
    auth_difference,
    conflicted_subgraph,
    needed_events,
    resolve,
    resolve_conflicts,
    split_conflicts,
)
from storage.auth.resolution.v2 import Mainline
from storage.event import Event
from storage.ids import EventId, StateKey
from tests.auth.events import CREATOR, ROOM, make_create, make_event
from tests.auth.settings import thorough

LONG = 20_000


def power_chain(version: str, length: int) -> dict[EventId, Event]:
    """A room whose power levels were changed `length` times, each change citing the one before."""
    create = make_create(version)
    events: dict[EventId, Event] = {create.event_id: create}
    cited = [] if version == "12" else [create.event_id]
    joined = make_event(
        version,
        "$join:a",
        *("m.room.member", CREATOR, CREATOR, {"membership": "join"}),
        room_id=create.room_id,
        auth=cited,
        prev=[create.event_id],
    )
    events[joined.event_id] = joined
    last: list[EventId] = []
    for n in range(length):
        content = {"users": {} if version == "12" else {CREATOR: 100}, "ban": n % 50}
        power = make_event(
            version,
            f"$p{n}:a",
            *("m.room.power_levels", CREATOR, "", content),
            room_id=create.room_id,
            auth=[*cited, joined.event_id, *last],
            ts=n,
            depth=n,
        )
        events[power.event_id] = power
        last = [power.event_id]
    return events


def state_at(events: Mapping[EventId, Event], *ids: str) -> dict[StateKey, EventId]:
    return {events[EventId(i)].key: EventId(i) for i in ("$create:a", "$join:a", *ids)}


@pytest.mark.parametrize("version", ["1", "2", "11", "12"])
def test_chains_as_long_as_a_room_gets(version: str) -> None:
    events = power_chain(version, LONG)
    assert len(auth_chain([EventId(f"$p{LONG - 1}:a")], events)) == LONG - 1 + (
        1 if version == "12" else 2
    )
    old, new = state_at(events, "$p5:a"), state_at(events, f"$p{LONG - 1}:a")
    assert resolve(version, [old, new], events) == new


def test_the_mainline_is_walked_no_further_than_the_fork() -> None:
    events = power_chain("10", LONG)
    asked: list[EventId] = []

    def lookup(event_id: EventId) -> Event | None:
        asked.append(event_id)
        return events.get(event_id)

    mainline = Mainline(EventId(f"$p{LONG - 1}:a"), lookup)
    topic = make_event(
        "10",
        "$t:a",
        "m.room.topic",
        CREATOR,
        "",
        auth=[EventId("$create:a"), EventId(f"$p{LONG - 11}:a")],
    )
    assert mainline.position(topic) == 10
    assert len(asked) < 200


class CountedEvents(dict[EventId, Event]):
    """Events that count how often they are asked for, and may not be walked."""

    count = 0

    def get(self, key: EventId, default: object = None) -> object:  # type: ignore[override]
        self.count += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[EventId]:
        raise AssertionError("all events were walked")


def fork(
    version: str, members: int
) -> tuple[dict[EventId, Event], dict[StateKey, EventId], dict[StateKey, EventId]]:
    """Return a room with many members and power changes, and two states.

    The states differ in ten topics' worth of state.
    """
    events = power_chain(version, members)
    create = events[EventId("$create:a")]
    power = f"$p{members - 1}:a"
    cited = [EventId("$join:a"), EventId(power)] + ([] if version == "12" else [create.event_id])
    state = state_at(events, power)
    for n in range(members):
        user = f"@u{n}:b"
        joined = make_event(
            version,
            f"$u{n}:a",
            "m.room.member",
            user,
            user,
            {"membership": "join"},
            room_id=create.room_id,
            auth=cited,
        )
        events[joined.event_id] = joined
        state[joined.key] = joined.event_id
    states = (dict(state), dict(state))
    for n in range(10):
        for side, forked in enumerate(states):
            topic = make_event(
                version,
                f"$t{n}.{side}:a",
                "m.x",
                CREATOR,
                str(n),
                room_id=create.room_id,
                auth=cited,
                ts=side,
            )
            events[topic.event_id] = topic
            forked[topic.key] = topic.event_id
    return events, *states


@pytest.mark.parametrize("version", ["1", "2", "11", "12"])
def test_work_does_not_grow_with_the_room(version: str) -> None:
    counts = []
    for members in (10, 1000):
        events, first, second = fork(version, members)
        unconflicted, conflicted = split_conflicts([first, second])
        difference = auth_difference([first.values(), second.values()], events)
        loaded, rounds = CountedEvents(), 0
        while wanted := needed_events(
            version, unconflicted, conflicted, difference, loaded, conflicted_subgraph=frozenset()
        ):
            loaded.update({event_id: events[event_id] for event_id in wanted})
            rounds += 1
        loaded.count = 0
        decided = resolve_conflicts(
            version, unconflicted, conflicted, difference, loaded, conflicted_subgraph=frozenset()
        )
        assert set(decided) == {("m.x", str(n)) for n in range(10)}
        assert rounds <= 4
        counts.append((len(loaded), loaded.count))
    assert counts[0] == counts[1]


nodes = st.integers(0, 11)


@thorough
@given(
    st.lists(st.tuples(nodes, nodes), max_size=40),
    st.lists(st.sets(nodes, min_size=1), min_size=1, max_size=4),
)
def test_sets_of_any_graph(edges: list[tuple[int, int]], states: list[set[int]]) -> None:
    """Against the definitions, circles included."""
    events = {
        EventId(str(n)): make_event(
            "2", str(n), "m.x", CREATOR, str(n), auth=[str(b) for a, b in edges if a == n]
        )
        for n in range(10)
    }
    reached = {str(n): {str(b) for a, b in edges if a == n and a < 10} for n in range(12)}
    for _ in range(12):
        reached = {a: below.union(*(reached[b] for b in below)) for a, below in reached.items()}
    chains = [set().union(*(reached[str(n)] for n in state)) for state in states]
    ids = [[EventId(str(n)) for n in state] for state in states]
    assert [auth_chain(state, events) for state in ids] == chains
    assert auth_difference(ids, events) == set().union(*chains) - chains[0].intersection(*chains)
    conflicted = {str(n) for n in states[0]}
    between = {
        x
        for a in conflicted
        for b in conflicted & reached[a]
        for x in {a, b}
        | {str(n) for n in range(12) if str(n) in reached[a] and b in reached[str(n)]}
    }
    assert conflicted_subgraph(ids[0], events) == between


@thorough
@given(
    st.sampled_from(["1", "2"]),
    st.lists(st.tuples(nodes, nodes), max_size=40),
    st.lists(st.sets(nodes, min_size=3), min_size=2, max_size=3),
)
def test_circles_of_auth_events_end(
    version: str, edges: list[tuple[int, int]], picks: list[set[int]]
) -> None:
    """Ids chosen by their senders can cite each other in a circle.

    The result still does not depend on the order of the states.
    """
    create = make_create(version)
    events = {create.event_id: create}
    for n in range(12):
        kind = ("m.room.power_levels", "m.room.join_rules", "m.room.member", "m.x")[n % 4]
        content = {
            "users": {CREATOR: 100 - n},
            "membership": "join" if n < 9 else "ban",
            "join_rule": "public",
        }
        cited = [create.event_id, *(f"${b}:a" for a, b in edges if a == n)]
        key = CREATOR if n % 4 == 2 and n < 9 else "@other:a" if n % 4 == 2 else ""
        event = make_event(
            version,
            f"${n}:a",
            kind,
            CREATOR,
            key,
            content,
            auth=cited,
            room_id=ROOM,
            depth=n // 2,
            prev=[create.event_id],
        )
        events[event.event_id] = event
    states = [
        {create.key: create.event_id}
        | {events[EventId(f"${n}:a")].key: EventId(f"${n}:a") for n in sorted(pick)}
        for pick in picks
    ]
    assert resolve(version, states, events) == resolve(version, states[::-1], events)
    unconflicted, conflicted = split_conflicts(states)
    difference = auth_difference([s.values() for s in states], events)
    assert needed_events(version, unconflicted, conflicted, difference, events) == set()
