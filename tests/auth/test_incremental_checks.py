"""The kept auth checks against checks of everything, with a simple rule.

No more is checked than has to be.
"""

from collections.abc import Iterator, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from storage.auth.resolution import incremental as module
from storage.auth.resolution.incremental import Ledger
from storage.event import Event
from storage.ids import EventId, StateKey

KEYS: list[StateKey] = [("t", str(number)) for number in range(4)]
FIRST, SECOND = 0, 1


def event(name: str, key: StateKey | None, needed: tuple[StateKey, ...] = ()) -> Event:
    kind, state_key = ("t", None) if key is None else key
    return cast(
        "Event",
        SimpleNamespace(
            event_id=EventId(name), type=kind, key=key, state_key=state_key, needed=needed
        ),
    )


class LazySource:
    """A source whose events and keys have to be loaded first if it is `lazy`."""

    def __init__(self, events: Mapping[EventId, Event], *, lazy: bool = False) -> None:
        self.events = events
        self.state: dict[StateKey, EventId] = {}
        self.rejected: frozenset[EventId] = frozenset()
        self.loaded = set() if lazy else set(events)
        self.wanted: set[EventId] = set()
        self.keys = set() if lazy else set(KEYS)
        self.wanted_keys: set[StateKey] = set()

    @property
    def lacking(self) -> bool:
        return bool(self.wanted or self.wanted_keys)

    def event(self, event_id: EventId, /) -> Event | None:
        if event_id in self.events and event_id not in self.loaded:
            self.wanted.add(event_id)
            return None
        return self.events.get(event_id)

    def base(self, key: StateKey, /) -> EventId | None:
        if key not in self.keys:
            self.wanted_keys.add(key)
            return None
        return self.state.get(key)

    def load(self) -> None:
        self.loaded |= self.wanted
        self.keys |= self.wanted_keys
        self.wanted.clear()
        self.wanted_keys.clear()


def values_before(one: Any, before: Any, base: Any, *_: object) -> tuple[str, ...]:
    return tuple(before.get(key) or base.get(key) or "" for key in one.needed)


def is_allowed(one: Any, state: tuple[str, ...]) -> bool:
    return (
        not one.event_id.startswith("$never")
        and sum(map(ord, "".join(state) + one.event_id)) % 3 > 0
    )


@pytest.fixture(autouse=True)
def rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is allowed by the ids of the values that it needs."""
    monkeypatch.setattr(module, "auth_state_for", values_before)
    monkeypatch.setattr(module, "allowed", is_allowed)
    monkeypatch.setattr(module, "keys_needed", lambda one: one.needed)


def naive(order: list[Event], base: dict[StateKey, EventId]) -> dict[StateKey, EventId]:
    values: dict[StateKey, EventId] = {}
    for one in order:
        if one.state_key is not None and is_allowed(one, values_before(one, values, base)):
            values[one.key] = one.event_id
    return values


def checked(ledger: Ledger, source: LazySource, *phases: int) -> list[bool]:
    seen = []
    for phase in phases or (FIRST, SECOND):
        for lacking in ledger.check(phase, source):
            assert lacking == source.lacking
            seen.append(lacking)
            if lacking:
                source.load()
    return seen


def changes(random: Random, names: Iterator[int]) -> tuple[str, Event]:
    needed = tuple(random.sample(KEYS, random.randrange(3)))
    return random.choice(("insert", "insert", "insert", "remove", "base")), event(
        f"${next(names)}", random.choice([*KEYS, None]), needed
    )


@pytest.mark.parametrize("gap", [2, 1 << 40])
@pytest.mark.parametrize("seed", range(6))
def test_comes_to_what_checks_of_everything_come_to(
    monkeypatch: pytest.MonkeyPatch, seed: int, gap: int
) -> None:
    """Also where two positions have no number left between them.

    A check is due while positions move.
    """
    monkeypatch.setattr(module, "GAP", gap)
    random, names, ledger = Random(seed), iter(range(1000)), Ledger()
    order: dict[int, list[Event]] = {FIRST: [], SECOND: []}
    events: dict[EventId, Event] = {}
    source = LazySource(events, lazy=True)
    for turn in range(150):
        kind, new = changes(random, names)
        phase = random.choice((FIRST, SECOND))
        if kind == "base":
            key = random.choice(KEYS)
            source.state[key] = new.event_id
            ledger.base_changed([key])
        elif kind == "remove" and order[phase]:
            gone = order[phase].pop(random.randrange(len(order[phase])))
            ledger.remove(gone.event_id)
        else:
            at = random.randrange(len(order[phase]) + 1)
            ledger.insert(new, phase, order[phase][at].event_id if at < len(order[phase]) else None)
            order[phase].insert(at, new)
            events[new.event_id] = new
        if turn % 3 == 0:
            continue  # several changes before a check
        before = ledger.values()
        ledger.changed.clear()
        checked(ledger, source)
        assert ledger.values() == naive([*order[FIRST], *order[SECOND]], source.state)
        assert ledger.changed >= {key for key in KEYS if before.get(key) != ledger.value(key)}
        for phase, members in order.items():
            ids = [one.event_id for one in members]
            assert ledger.order(phase) == ids
            assert ledger.after(phase, None) == ids
            for number, one in enumerate(ids):
                assert ledger.after(phase, ledger.positions[one]) == ids[number + 1 :]
        assert ledger.positions.keys() == {
            one.event_id for members in order.values() for one in members
        }
        assert checked(ledger, source) == []


def filled(*events: Event) -> tuple[Ledger, LazySource]:
    ledger, source = Ledger(), LazySource({one.event_id: one for one in events})
    for one in events:
        ledger.insert(one, FIRST, None)
    checked(ledger, source)
    return ledger, source


def test_a_value_changes_only_the_checks_up_to_the_next_one() -> None:
    """Of three events that need a key, one comes after the next event that sets it: no check there.

    The setter itself is checked if it needs the key.
    """
    key, other = KEYS[0], KEYS[1]
    near, setter = event("$b", other, (key,)), event("$d", key, (key,))
    assert is_allowed(setter, ("$s",))
    assert is_allowed(setter, ("",))
    ledger, source = filled(near, setter, event("$far", other, (key,)))
    assert ledger.checks == 3
    first = event("$s", key)
    source.events = {**source.events, "$s": first}  # type: ignore[dict-item]  # ids are texts
    source.loaded.add(EventId("$s"))
    assert is_allowed(first, ())
    ledger.insert(first, FIRST, near.event_id)
    checked(ledger, source)
    assert ledger.checks == 3 + 3  # itself, the near one and the setter
    assert ledger.get(key, ledger.positions[near.event_id]) == "$s"
    assert ledger.get(key, ledger.positions[first.event_id]) is None


def test_a_phase_is_checked_alone() -> None:
    one, two = event("$a", KEYS[0]), event("$b", KEYS[1])
    assert is_allowed(one, ())
    assert is_allowed(two, ())
    ledger, source = Ledger(), LazySource({one.event_id: one, two.event_id: two})
    ledger.insert(two, SECOND, None)
    ledger.insert(one, FIRST, None)
    assert checked(ledger, source, FIRST) == [False]
    assert ledger.values() == {KEYS[0]: "$a"}
    assert checked(ledger, source, SECOND) == [False]
    assert (ledger.value(KEYS[1]), ledger.checks) == ("$b", 2)


def test_what_is_lacking_is_asked_for_before_the_check_counts() -> None:
    one = event("$a", KEYS[0])
    ledger, source = Ledger(), LazySource({one.event_id: one}, lazy=True)
    ledger.insert(one, FIRST, None)
    assert checked(ledger, source) == [True, False]
    assert ledger.checks == 1


def test_an_event_that_is_not_held_or_no_state_event_is_not_allowed() -> None:
    lost, message = event("$a", KEYS[0]), event("$b", None)
    ledger, source = Ledger(), LazySource({message.event_id: message})
    for one in (lost, message):
        ledger.insert(one, FIRST, None)
    assert checked(ledger, source) == [False, False]
    assert (ledger.values(), ledger.checks) == ({}, 0)


def test_an_event_that_left_is_not_checked() -> None:
    one = event("$a", KEYS[0], (KEYS[1],))
    ledger, source = Ledger(), LazySource({one.event_id: one})
    ledger.insert(one, FIRST, None)
    ledger.remove(one.event_id)
    ledger.base_changed([KEYS[1]])
    assert checked(ledger, source) == []
    ledger.insert(one, FIRST, None)
    assert checked(ledger, source) == [False]
    ledger.base_changed([KEYS[1]])
    assert checked(ledger, source) == [False]


def test_events_of_the_same_keys_share_them() -> None:
    """A long chain of power levels adds no set per event for the garbage collector to scan."""
    ledger, _ = filled(*(event(f"${number}", KEYS[0], (KEYS[0], KEYS[1])) for number in range(5)))
    assert len({id(keys) for keys in ledger._keys.values()}) == 1
