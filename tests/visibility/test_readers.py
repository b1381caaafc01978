"""Whole pages of readers whose ranges have every form, with little slack, also after a rebuild.

The result is that of the rule. Random rooms seldom reach some of these forms; here each is made on
purpose. At the end everything that `tests.oracle.test_visibility` looks at is compared: pages in
both directions, context, the nearest by time, events sent to servers, withheld events.
"""

from collections.abc import Callable
from typing import Any

import pytest

from storage.rebuild import rebuild
from storage.testing import BuiltEvent, RoomBuilder
from tests.long_run import long_run
from tests.oracle.facts import Audience, differences
from tests.oracle.oracle import Oracle
from tests.oracle.test_visibility import SERVER, SLACKS, SightSubject, sights, with_slack
from tests.oracle.worlds import SERVERS, USERS

READER, HOST, ELSEWHERE, OTHER = (
    USERS[0],
    USERS[1],
    USERS[2],
    USERS[3],
)  # READER and OTHER are local; READER and ELSEWHERE are erased
READERS = Audience((READER, OTHER, f"@stranger:{SERVER}"), SERVERS)
Delivery = tuple[str, list[BuiltEvent]]


def speak(room: RoomBuilder, count: int = 3) -> None:
    for number in range(count):
        room.message((HOST, ELSEWHERE)[number % 2])


def begin(visibility: str, seed: int) -> RoomBuilder:
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(HOST, history_visibility=visibility)
    room.join(ELSEWHERE)
    speak(room)
    return room


def left_while_the_world_could_read(room: RoomBuilder) -> list[Delivery]:
    """The reader's own range continues in that of the world, so they see one range without an end.

    They also see history that was shared before it.
    """
    room.history_visibility(HOST, "joined")
    speak(room)
    room.history_visibility(HOST, "shared")
    speak(room)
    room.join(READER)
    room.history_visibility(HOST, "world_readable")
    room.leave(READER)
    speak(room)
    return [("live", room.events)]


def peeked_now_and_then(room: RoomBuilder) -> list[Delivery]:
    """Several ranges of the world, for a stranger without a row as for one who was there once."""
    for value in ("world_readable", "joined", "world_readable", "shared"):
        room.history_visibility(HOST, value)
        speak(room)
        room.join(READER)
        speak(room)
        room.leave(READER)
        speak(room)
    return [("live", room.events)]


def came_and_went(room: RoomBuilder, *, stays: bool = False) -> list[Delivery]:
    for _ in range(3):
        room.invite(HOST, READER)
        speak(room)
        room.join(READER)
        speak(room)
        room.leave(READER)
        speak(room)
    if stays:
        room.join(READER)
        speak(room)
    return [("live", room.events)]


def came_and_went_and_stays(room: RoomBuilder) -> list[Delivery]:
    return came_and_went(room, stays=True)


def invited_and_then_joined(room: RoomBuilder) -> list[Delivery]:
    """Under "invited" there is one range without an end, which begins with an invitation.

    Events of the erased sender up to the join are withheld.
    """
    for user in (READER, OTHER):
        room.invite(HOST, user)
    speak(room)
    room.join(READER)
    speak(room)
    return [("live", room.events)]


def joined_twice_on_a_fork(room: RoomBuilder) -> list[Delivery]:
    """Two joins beside each other, and a leave on one side, which comes first."""
    begun = room.events
    one, other = room.fork(2)
    one.join(READER)
    speak(one)
    late = room.events[len(begun) :]
    other.join(OTHER)
    speak(other, 6)
    other.join(READER)
    speak(other)
    other.leave(READER)
    speak(other, 6)
    early = room.events[len(begun) + len(late) :]
    delivered = len(room.events)
    room.merge(one, other)
    speak(room)
    return [("live", begun), ("live", early), ("live", late), ("live", room.events[delivered:])]


def a_server_was_cut_off(room: RoomBuilder, *, leaves: bool = False) -> list[Delivery]:
    """A long branch from before others joined, sent after that: out-of-range events."""
    room.join(READER)
    begun = room.events
    main, side = room.fork(2)
    speak(side, 12)
    side.message(READER)
    late = room.events[len(begun) :]
    if leaves:
        main.leave(READER)
    main.join(OTHER)
    speak(main, 20)
    early = room.events[len(begun) + len(late) :]
    delivered = len(room.events)
    room.merge(main, side)
    speak(room)
    return [("live", begun), ("live", early), ("live", late), ("live", room.events[delivered:])]


def a_server_was_cut_off_after_a_leave(room: RoomBuilder) -> list[Delivery]:
    return a_server_was_cut_off(room, leaves=True)


def all_of_ours_left(room: RoomBuilder) -> list[Delivery]:
    for user in (READER, OTHER):
        room.join(user)
    speak(room)
    for user in (OTHER, READER):
        room.leave(user)
    speak(room, 6)
    room.history_visibility(HOST, "shared")
    speak(room)
    return [("live", room.events)]


def history_came_later(room: RoomBuilder) -> list[Delivery]:
    """The last events first, with the state before them given; then what lies before, by backfill.

    The reader came, left, and came back.
    """
    room.join(READER)
    speak(room, 6)
    room.leave(READER)
    speak(room, 6)
    state = list(room.state.values())
    held = [
        event for event in room.events if event.event_id in {*state, *room.graph.auth_chain(state)}
    ]
    back = room.join(READER)
    first = len(room.events)
    speak(room)
    return [
        ("outlier", held),
        ("given", [back]),
        ("live", room.events[first:]),
        ("backfill", room.events),
    ]


FORMS: tuple[Callable[[RoomBuilder], list[Delivery]], ...] = (
    left_while_the_world_could_read,
    peeked_now_and_then,
    came_and_went,
    came_and_went_and_stays,
    invited_and_then_joined,
    joined_twice_on_a_fork,
    a_server_was_cut_off,
    a_server_was_cut_off_after_a_leave,
    all_of_ours_left,
    history_came_later,
)


def deliver(subject: SightSubject, oracle: Oracle, origin: str, events: list[BuiltEvent]) -> None:
    """To both; "given" is an event after a gap, with the state before it."""
    given = (
        {event.event_id: list(event.state_before.values()) for event in events}
        if origin == "given"
        else None
    )
    how: dict[str, Any] = {
        "room_version": "11",
        "origin": "live" if given else origin,
        "state_before": given,
    }
    pdus = [event.pdu for event in events]
    assert subject.append(pdus, **how) == oracle.append(pdus, **how)


# one slack for each form; `make soak` takes the others, too
PAGES = [
    pytest.param(form, slack, marks=() if at % len(SLACKS) == number else (long_run,))
    for at, form in enumerate(FORMS)
    for number, slack in enumerate(SLACKS)
]


@pytest.mark.parametrize(
    "form,slack", PAGES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_whole_pages(
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    form: Callable[[RoomBuilder], list[Delivery]],
    slack: int,
) -> None:
    with_slack(dsn, monkeypatch, slack)
    subject = SightSubject(dsn, server_name=SERVER)
    try:
        for seed, visibility in enumerate(("world_readable", "shared", "invited", "joined")):
            oracle, room = Oracle(), begin(visibility, seed)
            for origin, events in form(room):
                deliver(subject, oracle, origin, events)
            oracle.positions = subject.positions(room.room_id)
            expected = sights(oracle, room.room_id, READERS)
            lines = differences(expected, subject.facts(room.room_id, READERS), visibility)
            subject.run(rebuild(subject.store.database, room.room_id, server_name=SERVER))
            lines += differences(
                expected, subject.facts(room.room_id, READERS), f"{visibility}, rebuilt"
            )
            assert not lines, "\n".join(lines)
    finally:
        subject.close()
