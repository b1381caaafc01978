"""Which events a resolution has to load, round by round."""

import pytest

from storage.auth import needed_events
from storage.event import Event
from storage.ids import EventId, StateKey
from tests.auth.events import CREATOR, make_create, make_event

TOPIC: StateKey = ("m.room.topic", "")
OLD, FIRST, SECOND = EventId("$old"), EventId("$first"), EventId("$second")
CONFLICTED = {TOPIC: {FIRST, SECOND}}
STATE: dict[StateKey, EventId] = {
    ("m.room.create", ""): EventId("$create:a"),
    ("m.room.power_levels", ""): EventId("$power"),
    ("m.room.member", CREATOR): EventId("$joined"),
    ("m.room.join_rules", ""): EventId("$rules"),
}


def room(version: str) -> dict[EventId, Event]:
    """Return a room with two topics.

    The first one cites power levels that those of the second one have replaced.
    """
    create = make_create(version)

    def sent(event_id: str, kind: str, state_key: str, *auth: str) -> Event:
        content = {"membership": "join"} if kind == "m.room.member" else {}
        return make_event(
            version,
            event_id,
            kind,
            CREATOR,
            state_key,
            content,
            room_id=create.room_id,
            auth=["$create:a", *auth],
        )

    made = [
        create,
        sent("$old", "m.room.power_levels", ""),
        sent("$middle", "m.room.power_levels", "", "$old"),
        sent("$power", "m.room.power_levels", "", "$middle"),
        sent("$joined", "m.room.member", CREATOR, "$old"),
        sent("$rules", "m.room.join_rules", "", "$power", "$joined"),
        sent("$first", "m.room.topic", "", "$old", "$joined"),
        sent("$second", "m.room.topic", "", "$power", "$joined"),
    ]
    return {event.event_id: event for event in made}


@pytest.mark.parametrize(
    "version,rounds",
    [
        ("1", [{"$first", "$second"}, {"$create:a", "$power", "$joined"}]),
        ("10", [{"$first", "$second", "$old", "$power"}, {"$create:a", "$joined"}, {"$middle"}]),
        ("12", [{"$first", "$second"}, {"$old", "$power", "$joined", "$create:a"}, {"$middle"}]),
    ],
)
def test_the_events_of_each_round(version: str, rounds: list[set[str]]) -> None:
    """Version 1 reads no auth events.

    From version 12 on the conflict's subgraph comes first, and no state judges it.
    """
    events, loaded, found = room(version), dict[EventId, Event](), list[set[EventId]]()
    while wanted := needed_events(version, STATE, CONFLICTED, {OLD}, loaded):
        found.append(wanted)
        loaded |= {event_id: events[event_id] for event_id in wanted}
    assert found == rounds


@pytest.mark.parametrize("version", ["1", "10", "12"])
def test_what_is_absent_is_not_named_again(version: str) -> None:
    absent = {EventId("$first"), EventId("$second"), OLD, EventId("$power")}
    assert needed_events(version, STATE, CONFLICTED, {OLD}, {}, absent=absent) == set()


def test_a_subgraph_that_is_given_is_not_searched() -> None:
    events = room("12")
    given = {"conflicted_subgraph": frozenset({FIRST, SECOND, EventId("$rules")})}
    assert needed_events("12", STATE, CONFLICTED, set(), {}, **given) == {
        FIRST,
        SECOND,
        EventId("$rules"),
    }
    topics = {one: events[one] for one in (FIRST, SECOND)}
    assert needed_events("12", STATE, CONFLICTED, set(), topics, **given) >= {
        EventId("$rules"),
        OLD,
        EventId("$power"),
    }
