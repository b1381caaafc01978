"""A child sorts after its parents: any order of arrival, with gaps, history and outliers.

Any depth may be claimed. Rooms are graphs of messages, so that only the order matters. tests/oracle
does the same with all kinds of events.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.graph import topological_ordering
from storage.ids import EventId
from storage.persist import Origin
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.store_subject import StoreSubject
from tests.oracle.worlds import deepest

SERVER = "s1.test"
INT8_MAX = 2**63 - 1

_seeds = count(1)


@dataclass(frozen=True)
class ArrivingGraph:
    """A graph, and how it arrives.

    ``parents`` are numbers of earlier messages; none: the end of the room's beginning.
    """

    version: str
    parents: tuple[frozenset[int], ...]
    depths: tuple[int | None, ...]
    batches: tuple[tuple[Origin, tuple[int, ...]], ...]  # origin and messages
    joined_over_federation: bool  # the beginning comes as outliers, and as history at the end


@st.composite
def stories(draw: st.DrawFn) -> ArrivingGraph:
    version = draw(st.sampled_from(("1", "4", "6", "11", "12")))
    size = draw(st.integers(2, 14))
    parents = tuple(
        draw(st.frozensets(st.integers(max(0, one - 5), one - 1), max_size=3))
        if one
        else frozenset()
        for one in range(size)
    )
    most = deepest(version)
    lie = st.sampled_from(
        [
            most,
            most - 1,
            topological_ordering.HINT_CEILING - 1,
            topological_ordering.HINT_SLACK,
            0,
            1,
            -1,
            -most,
        ]
    ) | st.integers(-most, most)
    depths = tuple(
        draw(st.none() | lie.map(lambda depth: max(-most, min(depth, most)))) for _ in range(size)
    )
    arrival = draw(st.permutations(range(size)))
    batches: list[tuple[Origin, tuple[int, ...]]] = []
    origins: st.SearchStrategy[Origin] = st.sampled_from(("live", "live", "backfill"))
    while arrival:
        size = draw(st.integers(1, 4))
        batch, arrival = arrival[:size], arrival[size:]
        batches.append((draw(origins), tuple(batch)))
    return ArrivingGraph(version, parents, depths, tuple(batches), draw(st.booleans()))


def built(story: ArrivingGraph) -> tuple[RoomBuilder, list[BuiltEvent], list[BuiltEvent]]:
    """The room, its beginning, and the messages."""
    room = RoomBuilder(story.version, seed=next(_seeds), sign=False)
    admin = room.user(1)
    room.start(admin)
    begun, end = room.events, room.heads[0]
    messages: list[BuiltEvent] = []
    for number, (parents, depth) in enumerate(zip(story.parents, story.depths, strict=True)):
        prev = [messages[one].event_id for one in sorted(parents)] or [end]
        how: dict[str, Any] = {} if depth is None else {"depth": depth}
        messages.append(room.message(admin, f"message {number}", prev=prev, **how))
    return room, begun, messages


def violations(events: list[BuiltEvent], orders: Mapping[EventId, int]) -> list[str]:
    return [
        f"{event.event_id} at {orders[event.event_id]}, its parent {parent} at {orders[parent]}"
        for event in events
        for parent in event.prev_events
        if event.event_id in orders
        and parent in orders
        and not 0 < orders[parent] < orders[event.event_id] < INT8_MAX
    ]


@pytest.fixture
def subject(dsn: str) -> Iterator[StoreSubject]:
    opened = StoreSubject(dsn, server_name=SERVER)
    yield opened
    opened.close()


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(story=stories())
def test_a_child_sorts_after_its_parents(subject: StoreSubject, story: ArrivingGraph) -> None:
    room, begun, messages = built(story)
    subject.append(
        [event.pdu for event in begun],
        room_version=story.version,
        origin="outlier" if story.joined_over_federation else "live",
        state_before=None,
    )
    state = list(room.state.values())
    orders: dict[EventId, int] = {}
    steps: list[tuple[Origin, list[BuiltEvent]]] = [
        (origin, [messages[one] for one in batch]) for origin, batch in story.batches
    ]
    if story.joined_over_federation:
        steps.append(("backfill", begun))
    for origin, batch in steps:
        answers = subject.append(
            [event.pdu for event in batch],
            room_version=story.version,
            origin=origin,
            state_before={event.event_id: state for event in batch if batch is not begun},
        )
        assert {outcome for _, outcome in answers} == {"stored"}, answers
        orders = {
            event_id: position[0] for event_id, position in subject.positions(room.room_id).items()
        }
        assert violations(room.events, orders) == []
    assert len(orders) == len(room.events)
