"""State resolution versions 2 and 2.1, continued from an earlier result.

A `Resolution` is a full conflicted set with its two orders and the outcomes of the checks.
`Resolution.change` adds and removes events. Its result equals that of `storage.auth.resolution.v2`
on the whole new set:
- An event that no event of the set cites is inserted into the reverse topological power ordering
  and moves no other: Kahn's algorithm picks the same events with it as without it, except for the
  one step at which it is the smallest that is free.
- If the citations between events change, or events leave, the power events are ordered again.
- The other events are ordered again along the mainline. It reads each event once, and repeats no
  check of events that stay in order.
- The checks are those of `storage.auth.resolution.incremental_checks`.

The work is done in small steps: `change` yields after each, True if something has to be loaded
before the next.

Source: room version 2, room version 12, "State resolution".
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from storage.auth.resolution.incremental_checks import EventSource, Ledger
from storage.auth.resolution.lookup import power_parent
from storage.auth.resolution.mainline import Mainline
from storage.auth.resolution.power_order import PowerKey, Steps, in_power_order, power_key
from storage.auth.resolution.v2 import is_power_event
from storage.auth.state_keys import POWER_LEVELS
from storage.event import Event
from storage.ids import EventId, StateKey

POWER: Final = 0
MAINLINE: Final = 1
"""The phases."""

_NONE: Final[frozenset[EventId]] = frozenset()


class Change(NamedTuple):
    """The difference from the last time.

    ``added`` and ``removed`` are members of the full conflicted set. ``passed``: further events on
    auth paths between members, which are walked only. ``base_changed``: keys whose value may have
    changed in the state that the checks start from.
    """

    added: Collection[EventId]
    removed: Collection[EventId] = _NONE
    passed: Collection[EventId] = _NONE
    base_changed: Collection[StateKey] = ()


class Resolution:
    """A conflict and its resolution.

    It is changed in place. If a `change` was not finished, discard the object.
    """

    def __init__(self) -> None:
        self.full: set[EventId] = set()
        self.ledger: Ledger = Ledger()
        self._walk: set[EventId] = set()  # the full conflicted set and the passed events
        self._cited: set[EventId] = set()  # by events of the walk
        self._reached: set[EventId] = set()  # power events, and what they reach within the walk
        self._events: dict[EventId, Event] = {}  # of the walk, without missing events
        self._is_circular = False  # events cite each other in a circle
        self._power_keys: dict[EventId, PowerKey] = {}
        # of power levels, and of the events that are ordered by them
        self._parents: dict[EventId, EventId | None] = {}

    def decided(self) -> dict[StateKey, EventId]:
        """Return the resolved values of the conflicted events, by key.

        Where the states agree on a key, their value counts instead.
        """
        return self.ledger.values()

    def change(self, change: Change, source: EventSource) -> Steps[None]:
        """Resolve the changed conflict.

        Yield after each step: True if something has to be loaded before the next.
        """
        grows = self._only_grows(change)
        for event_id in change.removed:
            self._remove(event_id)
        new = [
            one for one in dict.fromkeys((*change.added, *change.passed)) if one not in self._walk
        ]
        yield from self._read(new, source)
        self.full.update(change.added)
        self._walk.update(new)
        self._cited.update(
            cited
            for one in new
            if one in self._events
            for cited in self._events[one].auth_event_ids
        )
        if not (grows and (yield from self._placed(new, source))):
            yield from self._order_anew(source)
        self.ledger.base_changed(change.base_changed)
        yield from self.ledger.check(POWER, source)
        yield from self._order_the_rest(source)
        yield from self.ledger.check(MAINLINE, source)

    def _remove(self, event_id: EventId) -> None:
        self.full.discard(event_id)
        self._walk.discard(event_id)
        self._events.pop(event_id, None)
        if event_id in self.ledger.places:
            self.ledger.remove(event_id)

    def _read(self, event_ids: Iterable[EventId], source: EventSource) -> Steps[None]:
        """Read these events and the events they cite; missing ones are loaded together."""
        waiting = list(event_ids)
        while waiting:
            lacking = []
            for event_id in waiting:
                event = source.event(event_id)
                if event is not None:
                    self._events[event_id] = event
                    for cited_id in event.auth_event_ids:
                        source.event(cited_id)
                elif source.lacking:
                    lacking.append(event_id)
                if not source.lacking:
                    yield False
            if source.lacking:
                yield True
            waiting = lacking

    def _only_grows(self, change: Change) -> bool:
        """Return whether the change only extends the graph.

        That is: no old event reaches a new one, and no removed event affected the power events.
        """
        if self._is_circular or not self._reached.isdisjoint(change.removed):
            return False
        if any(one in self._walk and one not in self.full for one in change.added):
            return False
        return not any(
            one in self._cited and one not in self._walk for one in (*change.added, *change.passed)
        )

    def _placed(self, new: Collection[EventId], source: EventSource) -> Steps[bool]:
        """Insert new events into the power order.

        Return False if that is impossible and the events must be ordered again.
        """
        found = self._newly_reached(new)
        pending = {
            event_id for event_id in found if event_id in self.full and event_id in self._events
        }
        for event_id in found:
            if event_id not in pending:
                continue
            event = self._events[event_id]
            if not pending.isdisjoint(event.auth_event_ids):
                return False  # they cite each other in a circle
            yield from self._power_key(event, source)
            if event_id in self.ledger.places:  # it was among the rest
                self.ledger.remove(event_id)
            self._place(event)
            pending.discard(event_id)
        return True

    def _place(self, event: Event) -> None:
        places = self.ledger.places
        own, cited = (
            self._power_keys[event.event_id],
            [places[one] for one in event.auth_event_ids if one in places],
        )
        behind = self.ledger.after(
            POWER, max((place for place in cited if place[0] == POWER), default=None)
        )
        for one in behind:
            if own < self._power_keys[one]:
                self.ledger.insert(event, POWER, one)
                return
        self.ledger.insert(event, POWER, None)

    def _newly_reached(self, new: Iterable[EventId]) -> list[EventId]:
        """Return the new power events and their reach, each after the events that it reaches."""
        found: list[EventId] = []
        waiting = [
            (one, False)
            for one in new
            if one in self.full and one in self._events and is_power_event(self._events[one])
        ]
        while waiting:
            event_id, is_done = waiting.pop()
            if is_done:
                found.append(event_id)
            elif event_id not in self._reached:
                self._reached.add(event_id)
                waiting.append((event_id, True))
                event = self._events.get(event_id)
                waiting += [
                    (one, False)
                    for one in (event.auth_event_ids if event is not None else ())
                    if one in self._walk
                ]
        return found

    def _power_key(self, event: Event, source: EventSource) -> Steps[None]:
        """Compute the sort key of an event."""
        while event.event_id not in self._power_keys:
            key = power_key(event, source.event)
            if not source.lacking:
                self._power_keys[event.event_id] = key
            yield source.lacking

    def _order_anew(self, source: EventSource) -> Steps[None]:
        self._cited = {
            cited
            for one in self._walk
            if one in self._events
            for cited in self._events[one].auth_event_ids
        }
        yield False
        self._reached = set()
        self._newly_reached(self._walk)
        yield False
        ordered = [one for one in self._reached if one in self.full and one in self._events]
        for event_id in ordered:
            yield from self._power_key(self._events[event_id], source)
        order: list[EventId] = []
        self._is_circular = yield from in_power_order(
            {one: self._power_keys[one] for one in ordered}, self._events, order
        )
        yield from self._reorder(POWER, order)

    def _reorder(self, phase: int, order: list[EventId]) -> Steps[None]:
        """Put a phase into this order.

        Events that stay in order keep their position, and are not checked again.
        """
        members = set(order)
        for event_id in self.ledger.order(phase):
            if event_id not in members:
                self.ledger.remove(event_id)
        kept = self.ledger.order(phase)
        known = set(kept)
        if kept != [one for one in order if one in known]:
            for event_id in kept:
                self.ledger.remove(event_id)
                yield False
            known = set()
        following = iter([*(one for one in order if one in known), None])
        before = next(following)
        for event_id in order:
            if event_id == before:
                before = next(following)
                continue
            if event_id in self.ledger.places:  # in the other phase
                self.ledger.remove(event_id)
            self.ledger.insert(self._events[event_id], phase, before)
            yield False

    def _order_the_rest(self, source: EventSource) -> Steps[None]:
        rest = [one for one in self.full - self._reached if one in self._events]
        order: list[EventId] = []
        if rest:
            newest = self.ledger.value(POWER_LEVELS) or (yield from self._base_power_levels(source))
            order = yield from self._mainline_order(rest, newest, source)
        yield from self._reorder(MAINLINE, order)

    def _base_power_levels(self, source: EventSource) -> Steps[EventId | None]:
        found = source.base(POWER_LEVELS)
        while source.lacking:
            yield True
            found = source.base(POWER_LEVELS)
        return found

    def _mainline_order(
        self, rest: Collection[EventId], newest: EventId | None, source: EventSource
    ) -> Steps[list[EventId]]:
        mainline = self._mainline(newest, source)
        keys: list[tuple[int | float, int, EventId]] = []
        for event_id in rest:
            event = self._events[event_id]
            position = mainline.position(event)
            while source.lacking:
                yield True
                mainline = self._mainline(newest, source)
                position = mainline.position(event)
            keys.append((-position, event.origin_server_ts, event_id))
            yield False
        return [event_id for _, _, event_id in sorted(keys)]

    def _mainline(self, newest: EventId | None, source: EventSource) -> Mainline:
        def parent(event: Event) -> EventId | None:
            if event.event_id in self._parents:
                return self._parents[event.event_id]
            found = power_parent(event, source.event)
            if not source.lacking:
                self._parents[event.event_id] = found
            return found

        return Mainline(newest, source.event, parent)
