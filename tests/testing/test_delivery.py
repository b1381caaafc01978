"""Deliveries: what a store may count on, and what it may not; the NDJSON form."""

import io
import json
import random
from pathlib import Path

import pytest

from storage import event as events
from storage.ids import EventId
from storage.testing import (
    GeneratedEvent,
    Odd,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_shuffled,
    deliver_with_gap,
    generate_room,
    ndjson_line,
    respell,
    write_ndjson,
)
from storage.testing.world import FORK_HEAVY, SMALL_CHAT


@pytest.fixture(scope="module")
def room() -> RoomBuilder:
    return build_room(FORK_HEAVY, 400, seed=1)


def test_shuffled_is_another_order_of_the_same(room: RoomBuilder) -> None:
    shuffled = deliver_shuffled(room, seed=1)
    assert [event.pdu for event in shuffled] != room.pdus
    assert sorted(shuffled.pdus) == sorted(room.pdus)
    assert shuffled.pdus == deliver_shuffled(room, seed=1).pdus


def test_late_keeps_parents_first(room: RoomBuilder) -> None:
    late = deliver_late(room, seed=1)
    seen: set[EventId] = set()
    for event in late:
        built = room.event(event.event_id)
        assert seen.issuperset({*built.prev_events, *built.auth_events})
        seen.add(event.event_id)
    assert len(late) == len(room.events)
    assert late.pdus != room.pdus


@pytest.mark.parametrize("start, stop", [(30, 60), (7, 200), (100, 101), (350, 400)])
def test_a_gap_leaves_nothing_unsaid(room: RoomBuilder, start: int, stop: int) -> None:
    delivered = deliver_with_gap(room, start, stop)
    held: set[EventId] = set()
    placed: set[EventId] = set()
    for event in delivered:
        built = room.event(event.event_id)
        assert held.issuperset(built.auth_events)
        if event.origin != "outlier":
            if event.state_before is None:
                assert placed.issuperset(built.prev_events)
            else:
                assert not placed.issuperset(built.prev_events)
                assert set(event.state_before) == set(built.state_before.values())
                assert held.issuperset(event.state_before)
            placed.add(event.event_id)
        held.add(event.event_id)
    assert placed == {built.event_id for built in room.events}
    backfilled = [event.event_id for event in delivered if event.origin == "backfill"]
    assert backfilled == [built.event_id for built in room.events[start:stop]]


def test_a_gap_that_swallows_state_brings_outliers(room: RoomBuilder) -> None:
    origins = {event.origin for event in deliver_with_gap(room, 7, 200)}
    assert origins == {"live", "outlier", "backfill"}


def test_the_create_event_cannot_be_lost(room: RoomBuilder) -> None:
    with pytest.raises(ValueError, match="create"):
        deliver_with_gap(room, 0, 10)


@pytest.mark.parametrize("version", ["1", "5", "6", "11", "12"])
def test_respelled_events_are_the_same_events(version: str) -> None:
    rng = random.Random(1)
    for event in generate_room(SMALL_CHAT, 40, version=version):
        other = respell(event, rng)
        assert other.pdu != event.pdu
        parsed = events.parse(other.pdu, version)
        assert parsed.event_id == event.event_id
        assert parsed.content_hash_valid


def test_ndjson_holds_the_bytes_and_what_the_store_must_know(
    room: RoomBuilder, tmp_path: Path
) -> None:
    delivered = deliver_with_gap(room, 30, 60)
    path = tmp_path / "room.ndjson"
    assert write_ndjson(delivered, path) == len(delivered)
    lines = path.read_bytes().splitlines()
    assert len(lines) == len(delivered)
    for line, event in zip(lines, delivered, strict=True):
        assert line.startswith(b'{"pdu":' + event.pdu + b',"room_version":')
        parsed = json.loads(line)
        assert (parsed["room_version"], parsed["origin"]) == ("11", event.origin)
        assert parsed.get("state_before") == (
            None if event.state_before is None else list(event.state_before)
        )


def test_ndjson_goes_to_an_open_file_too(room: RoomBuilder) -> None:
    file = io.BytesIO()
    assert write_ndjson((built.generated() for built in room.events), file) == 400
    assert file.getvalue().count(b"\n") == 400


def test_a_line_break_has_no_ndjson_form(room: RoomBuilder) -> None:
    event = room.generated().events[0]
    broken = GeneratedEvent(
        b"{\n" + event.pdu[1:], event.event_id, event.room_id, event.room_version
    )
    with pytest.raises(ValueError, match="line break"):
        ndjson_line(broken)


def test_odd_streams_respell_some() -> None:
    shape = SMALL_CHAT.replaced(odd=Odd(respelled=0.5))
    plain, odd = generate_room(SMALL_CHAT, 200, seed=1), generate_room(shape, 200, seed=1)
    assert 50 < sum(one.pdu != other.pdu for one, other in zip(plain, odd, strict=True)) < 150
    assert [event.event_id for event in plain] == [event.event_id for event in odd]
