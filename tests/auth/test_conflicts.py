"""Results of conflicts, by hand: ties of version 1, the power events, missing events.

Also the conflicted set of each version.
"""

import pytest

from storage.auth import resolve, resolve_conflicts
from storage.auth.resolution.v2 import ConflictedEvents, conflict_of, is_power_event, iterate
from storage.event import ROOM_VERSIONS, Event
from storage.ids import EventId, StateKey
from tests.auth.events import CREATOR, make_create, make_event, member

TOPIC: StateKey = ("m.room.topic", "")
CREATE: StateKey = ("m.room.create", "")
JOINED: StateKey = ("m.room.member", CREATOR)


def topic(event_id: str, depth: int, sender: str = CREATOR) -> Event:
    return make_event("1", event_id, *TOPIC[:1], sender, "", {}, depth=depth)


def won(*topics: Event, also: tuple[Event, ...] = ()) -> EventId:
    """Return which of these topics a room of version 1 comes to.

    It is resolved from states, and from the conflict itself.
    """
    begun = [make_create("1"), member("1", CREATOR, "join"), *also]
    events = {event.event_id: event for event in (*begun, *topics)}
    shared = {event.key: event.event_id for event in begun}
    decided = resolve_conflicts(
        "1", shared, {TOPIC: {one.event_id for one in topics}}, set(), events
    )
    assert (
        resolve("1", [shared | {TOPIC: one.event_id} for one in topics], events) == shared | decided
    )
    return decided[TOPIC]


def test_version_1_takes_the_lowest_hash_of_the_deepest() -> None:
    """The SHA-1 of $t2 begins with 29, of $t4 with 2b, of $t1 with 94, of $t3 with e4."""
    assert won(topic("$t1", 3), topic("$t2", 3), topic("$t3", 3), topic("$t4", 3)) == "$t2"
    assert won(topic("$t1", 3), topic("$t3", 4), topic("$t2", 3)) == "$t3"


def test_version_1_takes_the_highest_hash_of_the_lowest_where_nothing_is_allowed() -> None:
    stranger = "@stranger:a"
    assert (
        won(topic("$t1", 3, stranger), topic("$t2", 3, stranger), topic("$t3", 4, stranger))
        == "$t1"
    )


def test_version_1_allows_nothing_where_the_state_is_not_held() -> None:
    topics = [topic("$t1", 3), topic("$t2", 4)]
    events = {event.event_id: event for event in (make_create("1"), *topics)}
    unconflicted = {CREATE: EventId("$create:a"), JOINED: EventId("$gone")}
    assert resolve_conflicts(
        "1", unconflicted, {TOPIC: {EventId("$t1"), EventId("$t2")}}, set(), events
    ) == {TOPIC: "$t1"}


POWER_EVENTS = [
    ("m.room.power_levels", "", {}, True),
    ("m.room.join_rules", "", {}, True),
    ("m.room.power_levels", None, {}, False),
    ("m.room.topic", "", {}, False),
    ("m.room.topic", "", {"membership": "ban"}, False),
    ("m.room.member", "@x:a", {"membership": "ban"}, True),
    ("m.room.member", "@x:a", {"membership": "leave"}, True),
    ("m.room.member", "@x:a", {"membership": "invite"}, False),
    ("m.room.member", "@x:a", {"membership": "join"}, False),
    ("m.room.member", CREATOR, {"membership": "leave"}, False),
    ("m.room.member", None, {"membership": "leave"}, False),
]


@pytest.mark.parametrize("kind,state_key,content,power", POWER_EVENTS)
def test_power_events_put_others_out_or_change_who_may(
    kind: str, state_key: str | None, content: dict[str, object], *, power: bool
) -> None:
    assert is_power_event(make_event("11", "$e", kind, CREATOR, state_key, content)) is power


def test_the_full_conflicted_set_of_each_version() -> None:
    one, two, between, cited = (EventId(f"${name}") for name in ("one", "two", "between", "cited"))
    base = {CREATE: EventId("$create:a")}
    conflicted, full = {TOPIC: {one, two}}, {one, two, cited}
    for version in ("2", "11"):
        assert conflict_of(
            ROOM_VERSIONS[version], base, conflicted, {cited}, None
        ) == ConflictedEvents(full, None, base)
        assert conflict_of(
            ROOM_VERSIONS[version], base, conflicted, {cited}, {between}
        ) == ConflictedEvents(full, full | {between}, base)
    assert conflict_of(ROOM_VERSIONS["12"], base, conflicted, {cited}, None) == ConflictedEvents(
        full, None, {}
    )
    assert conflict_of(
        ROOM_VERSIONS["12"], base, conflicted, {cited}, {between}
    ) == ConflictedEvents(full | {between}, full | {between}, {})


def test_an_event_that_is_not_held_or_not_allowed_is_passed_over() -> None:
    create, joined = make_create("11"), member("11", CREATOR, "join")
    made = {
        event_id: make_event("11", event_id, "m.room.topic", sender, state_key, {})
        for event_id, sender, state_key in (
            ("$1", CREATOR, ""),
            ("$2", CREATOR, None),
            ("$3", "@x:a", ""),
            ("$5", CREATOR, "key"),
        )
    }
    events = {EventId(name): event for name, event in made.items()} | {
        create.event_id: create,
        joined.event_id: joined,
    }
    base, decided = {CREATE: create.event_id, JOINED: joined.event_id}, dict[StateKey, EventId]()
    iterate(
        [EventId(f"${number}") for number in (2, 1, 4, 3, 5)],
        decided,
        base,
        events.get,
        frozenset(),
    )
    assert decided == {TOPIC: "$1", ("m.room.topic", "key"): "$5"}


def between(version: str) -> tuple[dict[EventId, Event], dict[StateKey, set[EventId]]]:
    """Return a room in which power levels lie between two conflicted ones, and that conflict."""
    create = make_create(version)

    def levels(event_id: str, number: int, *auth: str) -> Event:
        content = {"events_default": number, "users": {} if version == "12" else {CREATOR: 100}}
        return make_event(
            *(version, event_id, "m.room.power_levels", CREATOR, "", content),
            room_id=create.room_id,
            auth=["$create:a", "$joined", *auth],
        )

    joined = make_event(
        *(version, "$joined", "m.room.member", CREATOR, CREATOR, {"membership": "join"}),
        room_id=create.room_id,
        auth=["$create:a"],
    )
    made = [
        create,
        joined,
        levels("$low", 1),
        levels("$middle", 2, "$low"),
        levels("$high", 3, "$middle"),
    ]
    return {event.event_id: event for event in made}, {
        ("m.room.power_levels", ""): {EventId("$low"), EventId("$high")}
    }


@pytest.mark.parametrize("version", ["11", "12"])
def test_a_subgraph_that_is_given_or_found_comes_to_the_same(version: str) -> None:
    events, conflicted = between(version)
    base = {CREATE: EventId("$create:a"), JOINED: EventId("$joined")}
    subgraph = frozenset(EventId(f"${name}") for name in ("low", "middle", "high"))
    difference = (
        {EventId("$middle")} if version == "11" else set()
    )  # version 12 has it from the subgraph
    for given in (None, subgraph):
        decided = resolve_conflicts(
            version, base, conflicted, difference, events, conflicted_subgraph=given
        )
        assert decided["m.room.power_levels", ""] == "$high"
