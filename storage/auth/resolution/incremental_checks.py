"""Iterative auth checks with memory: a change repeats only the checks that it affects.

The events are in an order. Each sets its key if the state before it allows it. So the value of a
key before an event is the last allowed event under that key, or the base's value. A check depends
on the values under `keys_needed` alone. If an event gives another value to a key, later events that
need the key are checked again, up to the next one that sets it. Checks follow the order, so each
uses final values, and the outcome is that of checking all of them.

Positions are pairs of a phase and a number between those of the neighbours. Source: room version 2,
"Iterative auth checks".
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from typing import Final, Protocol

from storage.auth.auth_event_selection import keys_needed
from storage.auth.resolution.iterate import allowed, auth_state_for
from storage.event import Event
from storage.ids import EventId, StateKey

Place = tuple[int, int]
"""Phase, and a number within it."""

Keys = tuple[StateKey, frozenset[StateKey]]
"""The key that an event sets, and the keys that it needs."""

GAP: Final = 1 << 40
SPREAD: Final = 64  # bits by which all numbers grow where two neighbours have no room between them


class EventSource(Protocol):
    """The events that resolution reads, which need not be in memory.

    A read of an event that is not in memory returns None, and `lacking` is true until it was
    loaded.
    """

    @property
    def rejected(self) -> AbstractSet[EventId]:
        """Return the rejected events, at least those among the events that were read."""

    def event(self, event_id: EventId, /) -> Event | None:
        """Return an event; None if it is missing."""

    def base(self, key: StateKey, /) -> EventId | None:
        """Return the value of a key in the state that the checks start from."""

    @property
    def lacking(self) -> bool:
        """Return whether a read event has to be loaded first."""


class Ledger:
    """Events in the order of their checks, with the outcomes."""

    def __init__(self) -> None:
        self.places: dict[EventId, Place] = {}
        self.checks: int = 0
        """Auth checks made."""
        self.changed: set[StateKey] = set()
        """At least the keys whose final value has changed; a reader of the values may clear it."""
        self._at: dict[Place, EventId] = {}
        self._order: list[Place] = []
        self._setting: dict[StateKey, list[Place]] = {}  # of the allowed events, by what they set
        self._needing: dict[StateKey, list[Place]] = {}
        self._keys: dict[EventId, Keys] = {}
        # each once: in a long chain all events have the same
        self._known_keys: dict[Keys, Keys] = {}
        self._allowed: set[EventId] = set()
        self._unchecked: list[Place] = []  # a heap; may hold former positions of events
        self._due: set[Place] = set()  # as `_unchecked`

    def order(self, phase: int) -> list[EventId]:
        return [
            self._at[place] for place in self._order[self._first(phase) : self._first(phase + 1)]
        ]

    def after(self, phase: int, place: Place | None) -> list[EventId]:
        """Return the events of a phase after a position; all of them if it is None."""
        start = self._first(phase) if place is None else bisect_right(self._order, place)
        return [self._at[one] for one in self._order[start : self._first(phase + 1)]]

    def value(self, key: StateKey) -> EventId | None:
        """Return the final value that the events give to a key; None if none of them sets it."""
        setting = self._setting.get(key)
        return self._at[setting[-1]] if setting else None

    def values(self) -> dict[StateKey, EventId]:
        """Return the final values that the events set."""
        return {key: self._at[setting[-1]] for key, setting in self._setting.items() if setting}

    def get(self, key: StateKey, before: Place) -> EventId | None:
        """Return the value of a key that the events before a position set."""
        setting = self._setting.get(key, ())
        index = bisect_left(setting, before)
        return self._at[setting[index - 1]] if index else None

    def insert(self, event: Event, phase: int, before: EventId | None) -> None:
        """Insert an event before another one, or at the end of its phase."""
        place = self._between(phase, before)
        self.places[event.event_id] = place
        self._at[place] = event.event_id
        insort(self._order, place)
        # An event without a state key is never allowed: what it would set does not matter.
        keys = (event.type, event.state_key or ""), frozenset(keys_needed(event))
        self._keys[event.event_id] = self._known_keys.setdefault(keys, keys)
        for key in keys[1]:
            insort(self._needing.setdefault(key, []), place)
        self._push(place)

    def remove(self, event_id: EventId) -> None:
        self._set(event_id, allowed_now=False)
        place = self.places.pop(event_id)
        del self._at[place]
        del self._order[bisect_left(self._order, place)]
        for key in self._keys.pop(event_id)[1]:
            del self._needing[key][bisect_left(self._needing[key], place)]

    def base_changed(self, keys: Iterable[StateKey]) -> None:
        """Check the events again that read one of these keys from the base."""
        for key in keys:
            self._value_changed(key, (-1, 0))

    def check(self, phase: int, source: EventSource) -> Iterator[bool]:
        """Run the due checks up to a phase.

        Yield after each check: True if something has to be loaded first.
        """
        while self._unchecked and self._unchecked[0][0] <= phase:
            event_id = self._at.get(self._unchecked[0])
            while event_id is not None:
                outcome = self._outcome(event_id, source)
                yield source.lacking
                if outcome is not None:
                    self._set(event_id, allowed_now=outcome)
                    break
            self._due.discard(heappop(self._unchecked))

    def _outcome(self, event_id: EventId, source: EventSource) -> bool | None:
        """Return whether the state before an event allows it.

        None if something has to be loaded first.
        """
        event = source.event(event_id)
        if event is None or event.state_key is None:
            return None if source.lacking else False
        before = _Before(self, self.places[event_id])
        state = auth_state_for(event, before, _Base(source), source.event, source.rejected)
        if source.lacking:
            return None
        self.checks += 1
        return state is not None and allowed(event, state)

    def _set(self, event_id: EventId, *, allowed_now: bool) -> None:
        if allowed_now == (event_id in self._allowed):
            return
        key, place = self._keys[event_id][0], self.places[event_id]
        self.changed.add(key)
        setting = self._setting.setdefault(key, [])
        if allowed_now:
            self._allowed.add(event_id)
            insort(setting, place)
        else:
            self._allowed.discard(event_id)
            del setting[bisect_left(setting, place)]
        self._value_changed(key, place)

    def _value_changed(self, key: StateKey, place: Place) -> None:
        """Check the events that need a key again, from a position to the next one that sets it."""
        needing, setting = self._needing.get(key, ()), self._setting.get(key, ())
        following = bisect_right(setting, place)
        end = (
            bisect_right(needing, setting[following]) if following < len(setting) else len(needing)
        )
        for due in needing[bisect_right(needing, place) : end]:
            self._push(due)

    def _push(self, place: Place) -> None:
        if place not in self._due:
            self._due.add(place)
            heappush(self._unchecked, place)

    def _first(self, phase: int) -> int:
        return bisect_left(self._order, (phase, 0))

    def _between(self, phase: int, before: EventId | None) -> Place:
        index = (
            self._first(phase + 1)
            if before is None
            else bisect_left(self._order, self.places[before])
        )
        low = self._order[index - 1][1] if index and self._order[index - 1][0] == phase else 0
        if before is None:
            return phase, low + GAP
        high = self._order[index][1]
        if high - low < 2:  # no number between them
            self._spread()
            low, high = low << SPREAD, high << SPREAD
        return phase, (low + high) // 2

    def _spread(self) -> None:
        """Multiply all positions to make room between them."""

        def spread(place: Place) -> Place:
            return place[0], place[1] << SPREAD

        self.places = {event_id: spread(place) for event_id, place in self.places.items()}
        self._at = {spread(place): event_id for place, event_id in self._at.items()}
        self._order = [spread(place) for place in self._order]
        self._unchecked = [spread(place) for place in self._unchecked]
        self._due = set(self._unchecked)
        for lists in (self._setting, self._needing):
            for key, places in lists.items():
                lists[key] = [spread(place) for place in places]


class _Before:
    """The state after the events before a position, by key."""

    def __init__(self, ledger: Ledger, place: Place) -> None:
        self._ledger = ledger
        self._place = place

    def get(self, key: StateKey) -> EventId | None:
        return self._ledger.get(key, self._place)


class _Base:
    """The state that the checks start from, by key."""

    def __init__(self, source: EventSource) -> None:
        self._source = source

    def get(self, key: StateKey) -> EventId | None:
        return self._source.base(key)
