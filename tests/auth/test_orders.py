"""The two orders of state resolution by hand: reverse topological power ordering, and mainline."""

from math import inf

import pytest

from storage.auth.resolution.v2 import (
    Mainline,
    PowerKey,
    in_power_order,
    mainline_order,
    power_key,
    reverse_topological_power_order,
)
from storage.event import Event
from storage.ids import EventId
from tests.auth.events import CREATOR, make_create, make_event

POWER = "m.room.power_levels"


def events_of(**citing: str) -> dict[EventId, Event]:
    """Return events by id: each cites the ids named, and its timestamp is its index among them."""
    made = [
        make_event(
            "10",
            f"${name}",
            POWER,
            CREATOR,
            "",
            {},
            auth=[f"${one}" for one in cited.split()],
            ts=place,
        )
        for place, (name, cited) in enumerate(citing.items())
    ]
    return {event.event_id: event for event in made}


def in_order(
    events: dict[EventId, Event], keys: dict[str, int]
) -> tuple[list[str], bool, list[bool]]:
    """Return the order of the events with keys, whether there is a circle, the yielded steps."""
    order: list[EventId] = []
    given: dict[EventId, PowerKey] = {
        EventId(f"${name}"): (0, key, EventId(f"${name}")) for name, key in keys.items()
    }
    steps, yielded = in_power_order(given, events, order), list[bool]()
    while True:
        try:
            yielded.append(next(steps))
        except StopIteration as end:
            return [one[1:] for one in order], end.value, yielded


def test_without_citations_the_smaller_key_goes_first() -> None:
    assert in_order(events_of(a="", b="", c=""), {"a": 3, "b": 1, "c": 2}) == (
        ["b", "c", "a"],
        False,
        [False] * 6,
    )


def test_an_event_goes_after_those_that_it_cites() -> None:
    events = events_of(a="", b="a", c="a b", d="")
    assert in_order(events, {"a": 9, "b": 2, "c": 1, "d": 5}) == (
        ["d", "a", "b", "c"],
        False,
        [False] * 8,
    )


def test_citations_of_other_events_do_not_count() -> None:
    assert in_order(events_of(a="x", b="a x"), {"a": 2, "b": 1}) == (["a", "b"], False, [False] * 4)


def test_in_a_circle_the_smallest_that_is_left_goes_next() -> None:
    events = events_of(a="b", b="a", c="b", d="")
    assert in_order(events, {"a": 2, "b": 3, "c": 1, "d": 4}) == (
        ["d", "c", "a", "b"],
        True,
        [False] * 8,
    )
    assert in_order(events_of(a="b", b="a", c="a", d="c"), {"a": 1, "b": 2, "c": 3, "d": 4})[
        :2
    ] == (["a", "b", "c", "d"], True)


def test_in_a_circle_those_that_went_before_are_passed_over() -> None:
    assert in_order(events_of(a="", b="c", c="b", d="b"), {"a": 1, "b": 2, "c": 3, "d": 4})[:2] == (
        ["a", "b", "c", "d"],
        True,
    )


def test_the_key_of_an_event_is_its_senders_level_its_time_and_its_id() -> None:
    create = make_create("10")
    power = make_event(
        "10", "$p", POWER, CREATOR, "", {"users": {CREATOR: 100, "@mod:a": 50}}, auth=["$create:a"]
    )
    cited = {"auth": ["$create:a", "$p"]}
    high = make_event("10", "$high", "m.room.topic", CREATOR, "", {}, ts=7, **cited)  # type: ignore[arg-type]
    low = make_event("10", "$low", "m.room.topic", "@mod:a", "", {}, ts=3, **cited)  # type: ignore[arg-type]
    held = {event.event_id: event for event in (create, power, high, low)}
    assert power_key(high, held.get) == (-100, 7, "$high")
    assert power_key(low, held.get) == (-50, 3, "$low")
    assert reverse_topological_power_order(
        [low.event_id, EventId("$unknown"), high.event_id], held.get
    ) == ["$high", "$low"]


# p5 is the newest of the mainline; s2 and s1 leave it after p2.
LINE = events_of(p1="", p2="p1", p3="p2", p4="p3", p5="p4", s1="p2", s2="s1", x1="", x2="x1")


def citing(name: str) -> Event:
    return make_event(
        "10", f"$by-{name}", "m.room.topic", CREATOR, "", {}, auth=[f"${name}"] if name else []
    )


POSITIONS = {
    "p5": 0,
    "p4": 1,
    "p3": 2,
    "p2": 3,
    "p1": 4,
    "s1": 3,
    "s2": 3,
    "x2": inf,
    "x1": inf,
    "": inf,
    "unknown": inf,
}


@pytest.mark.parametrize("first", POSITIONS)
def test_the_mainline_position_is_that_of_the_closest_ancestor(first: str) -> None:
    """The result does not depend on earlier lookups."""
    mainline = Mainline(EventId("$p5"), LINE.get)
    for name in (first, *POSITIONS, *reversed(POSITIONS)):
        assert mainline.position(citing(name)) == POSITIONS[name], name


def test_without_a_mainline_every_position_is_infinite() -> None:
    assert Mainline(None, LINE.get).position(citing("p5")) == inf


def test_power_levels_that_cite_each_other_in_a_circle_end() -> None:
    circles = events_of(a="b", b="a", c="d", d="c", e="c")
    mainline = Mainline(EventId("$a"), circles.get)
    assert [mainline.position(citing(name)) for name in "cdeab"] == [inf, inf, inf, 0, 1]


def test_the_chain_is_walked_as_far_as_an_event_asks() -> None:
    read: list[EventId] = []

    def lookup(event_id: EventId) -> Event | None:
        read.append(event_id)
        return LINE.get(event_id)

    assert Mainline(EventId("$p5"), lookup).position(citing("p5")) == 0
    assert "$p3" not in read


def test_the_order_is_by_position_time_and_id() -> None:
    late = make_event("10", "$a", "m.room.topic", CREATOR, "", {}, auth=["$p4"], ts=5)
    early = make_event("10", "$z", "m.room.topic", CREATOR, "", {}, auth=["$p4"], ts=4)
    same = make_event("10", "$b", "m.room.topic", CREATOR, "", {}, auth=["$p4"], ts=5)
    old = make_event("10", "$old", "m.room.topic", CREATOR, "", {}, auth=["$p1"], ts=9)
    assert mainline_order([same, late, early, old], EventId("$p5"), LINE.get) == [
        "$old",
        "$z",
        "$a",
        "$b",
    ]
