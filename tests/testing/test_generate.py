"""Generated rooms: valid and odd where they should be, the same bytes every time."""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import pytest

from storage import auth
from storage import event as events
from storage.errors import AuthDenied, InvalidEvent, InvalidSignature
from storage.event import Event
from storage.ids import EventId, StateKey
from storage.testing import (
    KEY_ID,
    ODD_SOME,
    SHAPES,
    BuiltEvent,
    Odd,
    RoomBuilder,
    build_room,
    generate,
    generate_room,
    stream_room,
    world,
)
from storage.testing.assembly import auth_keys
from storage.testing.world import ALL_ACTIONS, FORK_HEAVY, HUGE_ROOM, SMALL_CHAT, Shape

VERSIONS = [str(number) for number in range(1, 13)]
CREATE: StateKey = ("m.room.create", "")
BUSY = SMALL_CHAT.replaced(
    name="busy",
    mix={name: weight**0.3 for name, weight in ALL_ACTIONS.items()},
    fork_rate=0.2,
    fork_width=3,
)


def denial(built: BuiltEvent, parsed: Event, held: dict[EventId, Event]) -> AuthDenied | None:
    auth_state = {
        key: held[built.state_before[key]]
        for key in {*auth.keys_needed(parsed), CREATE}
        if key in built.state_before
    }
    try:
        auth.check(parsed, auth_state, built.room_version)
    except AuthDenied as denied:
        return denied
    return None


def checked_events(room: RoomBuilder) -> list[tuple[BuiltEvent, Event, dict[EventId, Event]]]:
    held: dict[EventId, Event] = {}
    checked = []
    for built in room.events:
        if built.expected != "invalid":
            parsed = held[built.event_id] = events.parse(built.pdu, room.version)
            checked.append((built, parsed, held))
    return checked


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", [FORK_HEAVY, BUSY], ids=lambda shape: shape.name)
def test_allowed_is_what_should_be_allowed(shape: Shape, version: str) -> None:
    room = build_room(shape.replaced(odd=ODD_SOME), 500, seed=7, version=version)
    rejected: set[EventId] = set()
    for built, parsed, held in checked_events(room):
        denied = denial(built, parsed, held)
        assert (denied is not None) == (built.expected == "rejected"), (built, denied)
        if denied is None:
            cited = {
                event_id: held[event_id]
                for event_id in (*built.auth_events, built.state_before.get(CREATE))
                if event_id is not None
            }
            auth.check_auth_events(parsed, cited, rejected)
        else:
            rejected.add(built.event_id)


@pytest.mark.parametrize("version", VERSIONS)
def test_auth_events_are_those_that_the_rules_need(version: str) -> None:
    for built in build_room(BUSY, 300, seed=2, version=version).events:
        parsed = events.parse(built.pdu, version)
        wanted = {*auth.keys_needed(parsed)} - {CREATE}
        assert (
            set(auth_keys(version, built.type, built.sender, built.state_key, built.content))
            - {CREATE}
            == wanted
        )


def test_soft_failed_events_are_denied_by_the_ban_that_came_before() -> None:
    room = build_room(SMALL_CHAT.replaced(odd=Odd(soft_failed=0.1)), 600, seed=4)
    found = 0
    for place, (built, parsed, held) in enumerate(checked := checked_events(room)):
        if built.expected == "soft_failed":
            ban = checked[place - 1][0]
            now = {
                key: held[ban.state_after[key]]
                for key in {*auth.keys_needed(parsed), CREATE}
                if key in ban.state_after
            }
            with pytest.raises(AuthDenied):
                auth.check(parsed, now, room.version)
            found += 1
    assert found > 10


def test_every_kind_of_odd_event_is_what_it_claims() -> None:
    odd = Odd(
        content_hash=0.1, false_depth=0.05, bad_signature=0.1, oversized=0.02, early_redaction=0.05
    )
    room = generate_room(SMALL_CHAT.replaced(odd=odd), 600, seed=3)
    outcomes = Counter(event.expected for event in room)
    assert outcomes["redacted"] > 20
    assert outcomes["invalid"] > 20
    for event in room:
        if event.expected == "redacted":
            assert not events.parse(event.pdu, room.room_version).content_hash_valid
        elif event.expected == "invalid":
            with pytest.raises((InvalidEvent, InvalidSignature)):
                parsed = events.parse(event.pdu, room.room_version)
                for server in events.required_signers(parsed):
                    events.verify(
                        dict(parsed.json), room.room_version, server, room.keys[server, KEY_ID]
                    )
    depths = {
        events.parse(event.pdu, room.room_version).depth for event in room if event.expected is None
    }
    assert 2**53 - 1 in depths


def test_a_redaction_may_come_before_its_target() -> None:
    room = generate_room(SMALL_CHAT.replaced(odd=Odd(early_redaction=0.1)), 300, seed=5)
    places = {event.event_id: place for place, event in enumerate(room)}
    parsed = [events.parse(event.pdu, room.room_version) for event in room]
    assert (
        sum(
            redaction.redacts is not None and places[EventId(redaction.redacts)] > place
            for place, redaction in enumerate(parsed)
        )
        > 5
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_a_shape_has_the_size_asked_for_and_events_of_real_sizes(shape: Shape) -> None:
    stream = stream_room(shape, 1_500, seed=1, sign=False)
    made = list(stream)
    assert len(made) == 1_500
    assert len({event.event_id for event in made}) == 1_500
    assert {event.room_id for event in made} == {stream.room_id}
    assert 650 < sum(len(event.pdu) for event in made) / len(made) < 1_200


def test_small_chat_does_all_that_rooms_do() -> None:
    kinds = Counter(
        (built.type, built.content.get("membership"))
        for built in build_room(BUSY, 2_000, seed=1, sign=False).events
    )
    memberships = {membership for type_, membership in kinds if type_ == "m.room.member"}
    assert memberships == {"join", "leave", "invite", "ban", "knock"}
    assert {type_ for type_, _ in kinds} >= {
        "m.reaction",
        "m.room.redaction",
        "m.room.power_levels",
        "m.room.history_visibility",
    }


def test_forks_have_the_rate_asked_for() -> None:
    def merges(rate: float) -> int:
        shape = SMALL_CHAT.replaced(fork_rate=rate, fork_width=3, servers=6)
        return sum(
            len(built.prev_events) > 1
            for built in build_room(shape, 1_000, seed=1, sign=False).events
        )

    assert merges(0.0) == 0
    assert 0 < merges(0.02) < merges(0.5)


def test_late_events_come_after_what_they_cite() -> None:
    shape = FORK_HEAVY.replaced(odd=Odd(late=0.5))
    on_time = [event.event_id for event in generate_room(FORK_HEAVY, 800, seed=2)]
    late = generate_room(shape, 800, seed=2)
    seen: set[EventId] = set()
    for event in late:
        parsed = events.parse(event.pdu, late.room_version)
        assert seen.issuperset(parsed.prev_event_ids)
        assert seen.issuperset(parsed.auth_event_ids)
        seen.add(event.event_id)
    assert seen == set(on_time)
    assert [event.event_id for event in late] != on_time


def test_trimming_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "NODES_MAX", 200)
    monkeypatch.setattr(generate, "TRIM_EVERY", 100)
    shape = HUGE_ROOM.replaced(members=150, rush=0.9, fork_rate=0.05)
    streamed = [event.event_id for event in stream_room(shape, 4_000, seed=1, sign=False)]
    built = [
        event.event_id for event in build_room(shape, 4_000, seed=1, sign=False, exact=False).events
    ]
    assert streamed == built


def test_a_trimmed_world_holds_no_more_than_its_state_and_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "NODES_MAX", 200)
    present = world.GeneratedWorld(SMALL_CHAT, 1, sign=False)
    for place, _ in zip(range(2_000), generate._endless(present, trim=False), strict=False):
        if place % 100 == 0:
            present.trim()
    graph = present.room.graph
    assert len(graph.nodes) < 500
    assert len(graph._archive) < 500


DIGEST = """
import hashlib
from storage.testing import ODD_SOME, SHAPES, stream_room
digest = hashlib.sha256()
for version in ("1", "6", "12"):
    room = stream_room(SHAPES["fork_heavy"].replaced(odd=ODD_SOME), 400, seed=9, version=version)
    for event in room:
        digest.update(event.pdu)
print(digest.hexdigest())
"""


def test_same_seed_same_bytes_in_another_process() -> None:
    digest = hashlib.sha256()
    for version in ("1", "6", "12"):
        for event in stream_room(FORK_HEAVY.replaced(odd=ODD_SOME), 400, seed=9, version=version):
            digest.update(event.pdu)
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True, env=environment
    )
    assert other.stdout.strip() == digest.hexdigest()


def test_rooms_of_different_seeds_are_different_rooms() -> None:
    """Also in version 12, where a room is named by its create event."""
    ids = {
        generate_room(SHAPES["small_chat"], 10, seed=seed, version=version).room_id
        for seed in range(5)
        for version in ("11", "12")
    }
    assert len(ids) == 10
