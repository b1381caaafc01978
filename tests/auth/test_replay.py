"""A replay has the checks of the resolution, in their order, and comes to its result."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.auth import (
    auth_difference,
    check,
    replay_conflicts,
    resolve,
    resolve_conflicts,
    split_conflicts,
)
from storage.auth.resolution import Replay
from storage.auth.resolution.v2 import mainline_order
from storage.auth.state_keys import POWER_LEVELS
from tests.auth.random_rooms import RandomConflict, build_conflict
from tests.auth.settings import EXAMPLES, thorough
from tests.auth.test_resolution_random import ALGORITHMS
from tests.auth.test_scenarios import ALICE, BOB, POWER, RoomScenario, of

some = settings(thorough, max_examples=max(20, EXAMPLES // 10))
numbers = st.integers(0, 2**40)
lengths = st.integers(5, 50)


def replayed(conflict: RandomConflict) -> Replay:
    unconflicted, conflicted = split_conflicts(conflict.states)
    difference = auth_difference([state.values() for state in conflict.states], conflict.events)
    return replay_conflicts(
        conflict.version,
        unconflicted,
        conflicted,
        difference,
        conflict.events,
        rejected=conflict.rejected,
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@some
@given(number=numbers, length=lengths)
def test_the_steps_lead_to_the_result(algorithm: str, number: int, length: int) -> None:
    conflict = build_conflict(ALGORITHMS[algorithm], number, length)
    unconflicted, conflicted = split_conflicts(conflict.states)
    replay = replayed(conflict)
    result = resolve(conflict.version, conflict.states, conflict.events, rejected=conflict.rejected)
    if conflicted:
        assert unconflicted | dict(replay.decided) == result
    if algorithm == "1":
        return
    values = dict.fromkeys(conflicted)
    for step in replay.steps:
        assert step.replaced == values.get(step.event.key)
        if step.refused is None:
            values[step.event.key] = step.event.event_id
    decided = {key: value for key, value in values.items() if value and key not in unconflicted}
    assert decided == dict(replay.decided)
    checked = [step.event.event_id for step in replay.steps]
    assert len(set(checked)) == len(checked)
    assert set(checked) <= replay.full
    phases = [step.phase for step in replay.steps]
    assert phases == sorted(phases, reverse=True)  # power, then mainline


@pytest.mark.parametrize("algorithm", ["2", "2.1"])
@some
@given(number=numbers, length=lengths)
def test_the_numbers_explain_the_order(algorithm: str, number: int, length: int) -> None:
    conflict = build_conflict(ALGORITHMS[algorithm], number, length)
    replay = replayed(conflict)
    rest = [step for step in replay.steps if step.phase == "mainline"]
    keys = [
        (-(step.mainline or 0), step.event.origin_server_ts, step.event.event_id) for step in rest
    ]
    assert keys == sorted(keys)
    power = [step for step in replay.steps if step.phase == "power"]
    for earlier, later in pairwise(power):
        cites = earlier.event.event_id in later.event.auth_event_ids
        by_key = (-earlier.level, earlier.event.origin_server_ts, earlier.event.event_id) < (
            -later.level,
            later.event.origin_server_ts,
            later.event.event_id,
        )
        assert (
            cites
            or by_key
            or any(
                step.event.event_id in earlier.event.auth_event_ids
                or step.event.event_id in later.event.auth_event_ids
                for step in power
            )
        )
    newest = next(
        (
            s.event.event_id
            for s in reversed(power)
            if (s.event.key, s.refused) == (POWER_LEVELS, None)
        ),
        None,
    )
    if newest is not None:
        events = [step.event for step in rest]
        assert mainline_order(events, newest, conflict.events.get) == [e.event_id for e in events]


@pytest.mark.parametrize("version", ["1", "2", "11", "12"])
def test_a_refusal_names_the_rule(version: str) -> None:
    story = RoomScenario(version)
    promoted = story.after(story.start, "promote", ALICE, POWER, story.power({BOB: 50}))
    banned = story.after(promoted, "ban", ALICE, of(BOB), {"membership": "ban"})
    changed = story.after(promoted, "bobs", BOB, POWER, story.power({BOB: 50, "@x:a": 25}))
    unconflicted, conflicted = split_conflicts([banned, changed])
    difference = auth_difference([banned.values(), changed.values()], story.events)
    arguments = (version, unconflicted, conflicted, difference, story.events)
    replay = replay_conflicts(*arguments)
    assert replay.decided == resolve_conflicts(*arguments)
    refused = [step for step in replay.steps if step.refused is not None]
    [step] = refused
    assert step.event is story.events[changed[POWER]]
    assert step.refused is not None
    assert step.refused.rule == "sender.not_joined"
    state = {one.event.key: one.event for one in replay.steps if one.refused is None}
    state |= {key: story.events[unconflicted[key]] for key in unconflicted}
    with pytest.raises(type(step.refused)):
        check(step.event, state, version)


def test_a_check_without_an_event_is_refused_for_that() -> None:
    story = RoomScenario("11")
    promoted = story.after(story.start, "promote", ALICE, POWER, story.power({BOB: 50}))
    other = story.after(story.start, "other", ALICE, POWER, story.power({BOB: 10}))
    lacking = {key: one for key, one in story.events.items() if key != story.create_id}
    unconflicted, conflicted = split_conflicts([promoted, other])
    replay = replay_conflicts("11", unconflicted, conflicted, set(), lacking)
    assert {step.refused.rule for step in replay.steps if step.refused} == {"resolution.missing"}
    assert replay.decided == {}
