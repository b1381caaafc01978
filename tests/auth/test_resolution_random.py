"""The fast resolution against the literal one, on random rooms that would reveal mistakes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import permutations
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.auth import (
    auth_difference,
    conflicted_subgraph,
    needed_events,
    resolve,
    resolve_conflicts,
    split_conflicts,
)
from storage.event import Event
from storage.ids import EventId, StateKey
from tests.auth.literal_resolution import CORRECT, LiteralRoom, Variant, resolve_literally, split
from tests.auth.literal_resolution import auth_difference as literal_difference
from tests.auth.random_rooms import RandomConflict, build_conflict, conflicts
from tests.auth.settings import thorough


def literal(conflict: RandomConflict, variant: Variant = CORRECT) -> dict[StateKey, EventId]:
    return resolve_literally(
        LiteralRoom(conflict.version, conflict.events, conflict.rejected, variant), conflict.states
    )


def fast(conflict: RandomConflict) -> dict[StateKey, EventId]:
    return resolve(conflict.version, conflict.states, conflict.events, rejected=conflict.rejected)


ALGORITHMS = {"1": ("1",), "2": ("2", "5", "6", "8", "10", "11"), "2.1": ("12",)}
"""Room versions by the version of state resolution; each gets as many rooms."""

numbers = st.integers(0, 2**40)
lengths = st.integers(5, 50)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@thorough
@given(number=numbers, length=lengths)
def test_agrees_with_the_literal_transcription(algorithm: str, number: int, length: int) -> None:
    conflict = build_conflict(ALGORITHMS[algorithm], number, length)
    assert fast(conflict) == literal(conflict)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@thorough
@given(number=numbers, length=lengths)
def test_the_order_of_the_states_and_of_the_events_does_not_matter(
    algorithm: str, number: int, length: int
) -> None:
    conflict = build_conflict(ALGORITHMS[algorithm], number, length)
    results = []
    for states in permutations(conflict.states):
        events = dict(reversed(conflict.events.items()))
        shuffled = [dict(reversed(state.items())) for state in states]
        results.append(resolve(conflict.version, shuffled, events, rejected=conflict.rejected))
    assert all(result == fast(conflict) for result in results)


class SingleKeyState(dict[StateKey, EventId]):
    """A state that may be asked for single keys only."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("the unconflicted state was walked")

    keys = items = values = __len__ = __iter__


@thorough
@given(conflicts())
def test_the_live_path_comes_to_the_same(conflict: RandomConflict) -> None:
    """Resolve from an auth difference and a subgraph of an index, and load events in rounds.

    Never walk the unconflicted state.
    """
    unconflicted, conflicted = split_conflicts(conflict.states)
    difference = auth_difference([state.values() for state in conflict.states], conflict.events)
    subgraph = conflicted_subgraph(set().union(*conflicted.values()), conflict.events)
    asked_only = SingleKeyState(unconflicted)
    for known_subgraph in (subgraph, None):
        loaded: dict[EventId, Event] = {}
        absent: set[EventId] = set()
        given_: dict[str, Any] = {
            "rejected": conflict.rejected,
            "conflicted_subgraph": known_subgraph,
        }
        for _ in range(100):
            wanted = needed_events(
                conflict.version,
                asked_only,
                conflicted,
                difference,
                loaded,
                absent=absent,
                **given_,
            )
            assert not wanted & loaded.keys()
            assert not wanted & absent
            if not wanted:
                break
            loaded |= {
                event_id: conflict.events[event_id]
                for event_id in wanted
                if event_id in conflict.events
            }
            absent |= wanted - conflict.events.keys()
        else:
            pytest.fail("asks for more and more")
        decided = resolve_conflicts(
            conflict.version, asked_only, conflicted, difference, loaded, **given_
        )
        assert decided.keys().isdisjoint(unconflicted)
        assert unconflicted | decided == fast(conflict)


IN_VERSIONS = {
    "without_subgraph": ("12",),
    "start_from_unconflicted": ("12",),
    "start_from_nothing": ("2", "6", "10"),
    "v1_lowest_depth": ("1",),
    "missing_key_is_no_conflict": ("2", "10", "12"),
}


@pytest.mark.parametrize("mistake", [field.name for field in fields(Variant)])
def test_the_random_rooms_show_mistakes(mistake: str) -> None:
    """Each wrong variant of the algorithm differs from the right one in some random room.

    So the comparison above can fail.
    """
    wrong = Variant(**{mistake: True})
    rooms = (
        build_conflict(IN_VERSIONS.get(mistake, ("2", "6", "10", "12")), number, 40)
        for number in range(2000)
    )
    assert any(literal(room) != literal(room, wrong) for room in rooms)


def hard_parts(conflict: RandomConflict) -> Iterator[str]:
    """Return the features that make a room hard to resolve."""
    room = LiteralRoom(conflict.version, conflict.events, conflict.rejected)
    _, conflicted = split(room, conflict.states)
    difference = literal_difference(room, conflict.states)
    full = [conflict.events[one] for one in conflicted | difference if one in conflict.events]
    kinds = {"ban" if event.content.get("membership") == "ban" else event.type for event in full}
    cited = {one for event in full for one in event.auth_event_ids}
    yield from (f"{kind} in conflict" for kind in kinds)
    if {"ban", "m.room.power_levels"} <= kinds:
        yield "a ban against a change of power levels"
    if difference - conflicted:
        yield "more in the auth difference than in the states"
    if conflicted - conflict.events.keys():
        yield "an event of a state is not held"
    if cited - conflict.events.keys():
        yield "an auth event is not held"
    if cited & conflict.rejected:
        yield "an auth event is rejected"
    if conflicted & conflict.rejected:
        yield "an event of a state is rejected"
    if len({frozenset(state.items()) for state in conflict.states}) > 2:
        yield "a fork of a fork"


HARD = {
    "ban in conflict",
    "m.room.power_levels in conflict",
    "m.room.join_rules in conflict",
    "m.room.member in conflict",
    "m.room.topic in conflict",
    "a ban against a change of power levels",
    "more in the auth difference than in the states",
    "an event of a state is not held",
    "an auth event is not held",
    "an auth event is rejected",
    "an event of a state is rejected",
    "a fork of a fork",
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_random_rooms_are_hard(algorithm: str) -> None:
    """Each of the hard parts is in at least one of twenty rooms, whatever the algorithm.

    So the comparisons above exercise them.
    """
    found = Counter(
        part
        for number in range(300)
        for part in hard_parts(build_conflict(ALGORITHMS[algorithm], number, 40))
    )
    assert {part: found[part] for part in HARD if found[part] < 15} == {}, found
