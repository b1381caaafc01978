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
- The checks are repeated only where a change affects them (the second half of this file).

The work is done in small steps: `change` yields after each, True if something has to be loaded
before the next.

Source: room version 2, room version 12, "State resolution".
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple, Protocol

from storage.auth.auth_events import keys_needed
from storage.auth.power_levels import Level
from storage.auth.resolution import v2
from storage.auth.resolution.lookup import StateMap, power_parent
from storage.auth.resolution.resolve import resolve_conflicts
from storage.auth.resolution.v2 import (
    ConflictedEvents,
    Events,
    Mainline,
    Position,
    PowerKey,
    Steps,
    allowed,
    auth_state_for,
    conflict_of,
    in_power_order,
    is_power_event,
    power_key,
    power_phase_events,
    sender_level,
)
from storage.auth.state_keys import POWER_LEVELS
from storage.errors import AuthDenied
from storage.event import Event, RoomVersion
from storage.event.versions import version_of
from storage.ids import EventId, StateKey

# --------------------------------------------------------------------------------------------------
# Iterative auth checks with memory: a change repeats only the checks that it affects.
#
# The events are in an order. Each sets its key if the state before it allows it. So the value of a
# key before an event is the last allowed event under that key, or the base's value. A check depends
# on the values under `keys_needed` alone. If an event gives another value to a key, later events
# that need the key are checked again, up to the next one that sets it. Checks follow the order, so
# each uses final values, and the outcome is that of checking all of them.
#
# Positions are pairs of a phase and a number between those of the neighbours. Source: room version
# 2, "Iterative auth checks".

LedgerPosition = tuple[int, int]
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
        self.positions: dict[EventId, LedgerPosition] = {}
        self.checks: int = 0
        """Auth checks made."""
        self.changed: set[StateKey] = set()
        """At least the keys whose final value has changed; a reader of the values may clear it."""
        self._at: dict[LedgerPosition, EventId] = {}
        self._order: list[LedgerPosition] = []
        self._setting: dict[
            StateKey, list[LedgerPosition]
        ] = {}  # of the allowed events, by what they set
        self._needing: dict[StateKey, list[LedgerPosition]] = {}
        self._keys: dict[EventId, Keys] = {}
        # each once: in a long chain all events have the same
        self._shared_keys: dict[Keys, Keys] = {}
        self._allowed: set[EventId] = set()
        self._unchecked: list[LedgerPosition] = []  # a heap; may hold former positions of events
        self._due: set[LedgerPosition] = set()  # as `_unchecked`

    def order(self, phase: int) -> list[EventId]:
        return [
            self._at[position]
            for position in self._order[self._first(phase) : self._first(phase + 1)]
        ]

    def after(self, phase: int, position: LedgerPosition | None) -> list[EventId]:
        """Return the events of a phase after a position; all of them if it is None."""
        start = self._first(phase) if position is None else bisect_right(self._order, position)
        return [self._at[later] for later in self._order[start : self._first(phase + 1)]]

    def value(self, key: StateKey) -> EventId | None:
        """Return the final value that the events give to a key; None if none of them sets it."""
        setting = self._setting.get(key)
        return self._at[setting[-1]] if setting else None

    def values(self) -> dict[StateKey, EventId]:
        return {key: self._at[setting[-1]] for key, setting in self._setting.items() if setting}

    def get(self, key: StateKey, before: LedgerPosition) -> EventId | None:
        setting = self._setting.get(key, ())
        index = bisect_left(setting, before)
        return self._at[setting[index - 1]] if index else None

    def insert(self, event: Event, phase: int, before: EventId | None) -> None:
        """Insert an event before another one, or at the end of its phase."""
        position = self._between(phase, before)
        self.positions[event.event_id] = position
        self._at[position] = event.event_id
        insort(self._order, position)
        # An event without a state key is never allowed: what it would set does not matter.
        keys = (event.type, event.state_key or ""), frozenset(keys_needed(event))
        self._keys[event.event_id] = self._shared_keys.setdefault(keys, keys)
        for key in keys[1]:
            insort(self._needing.setdefault(key, []), position)
        self._push(position)

    def remove(self, event_id: EventId) -> None:
        self._set(event_id, allowed_now=False)
        position = self.positions.pop(event_id)
        del self._at[position]
        del self._order[bisect_left(self._order, position)]
        for key in self._keys.pop(event_id)[1]:
            del self._needing[key][bisect_left(self._needing[key], position)]

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
        before = _Before(self, self.positions[event_id])
        state = auth_state_for(event, before, _Base(source), source.event, source.rejected)
        if source.lacking:
            return None
        self.checks += 1
        return state is not None and allowed(event, state)

    def _set(self, event_id: EventId, *, allowed_now: bool) -> None:
        if allowed_now == (event_id in self._allowed):
            return
        key, position = self._keys[event_id][0], self.positions[event_id]
        self.changed.add(key)
        setting = self._setting.setdefault(key, [])
        if allowed_now:
            self._allowed.add(event_id)
            insort(setting, position)
        else:
            self._allowed.discard(event_id)
            del setting[bisect_left(setting, position)]
        self._value_changed(key, position)

    def _value_changed(self, key: StateKey, position: LedgerPosition) -> None:
        """Check the events that need a key again, from a position to the next one that sets it."""
        needing, setting = self._needing.get(key, ()), self._setting.get(key, ())
        following = bisect_right(setting, position)
        end = (
            bisect_right(needing, setting[following]) if following < len(setting) else len(needing)
        )
        for due in needing[bisect_right(needing, position) : end]:
            self._push(due)

    def _push(self, position: LedgerPosition) -> None:
        if position not in self._due:
            self._due.add(position)
            heappush(self._unchecked, position)

    def _first(self, phase: int) -> int:
        return bisect_left(self._order, (phase, 0))

    def _between(self, phase: int, before: EventId | None) -> LedgerPosition:
        index = (
            self._first(phase + 1)
            if before is None
            else bisect_left(self._order, self.positions[before])
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

        def spread(position: LedgerPosition) -> LedgerPosition:
            return position[0], position[1] << SPREAD

        self.positions = {
            event_id: spread(position) for event_id, position in self.positions.items()
        }
        self._at = {spread(position): event_id for position, event_id in self._at.items()}
        self._order = [spread(position) for position in self._order]
        self._unchecked = [spread(position) for position in self._unchecked]
        self._due = set(self._unchecked)
        for lists in (self._setting, self._needing):
            for key, positions in lists.items():
                lists[key] = [spread(position) for position in positions]


class _Before:
    """The state after the events before a position, by key."""

    def __init__(self, ledger: Ledger, position: LedgerPosition) -> None:
        self._ledger = ledger
        self._position = position

    def get(self, key: StateKey) -> EventId | None:
        return self._ledger.get(key, self._position)


class _Base:
    """The state that the checks start from, by key."""

    def __init__(self, source: EventSource) -> None:
        self._source = source

    def get(self, key: StateKey) -> EventId | None:
        return self._source.base(key)


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
            event_id
            for event_id in dict.fromkeys((*change.added, *change.passed))
            if event_id not in self._walk
        ]
        yield from self._read(new, source)
        self.full.update(change.added)
        self._walk.update(new)
        self._cited.update(
            cited
            for event_id in new
            if event_id in self._events
            for cited in self._events[event_id].auth_event_ids
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
        if event_id in self.ledger.positions:
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
        if any(event_id in self._walk and event_id not in self.full for event_id in change.added):
            return False
        return not any(
            event_id in self._cited and event_id not in self._walk
            for event_id in (*change.added, *change.passed)
        )

    def _placed(self, new: Collection[EventId], source: EventSource) -> Steps[bool]:
        """Insert new events into the power order.

        Return False if that is impossible and the events must be ordered again.
        """
        reached = self._newly_reached(new)
        pending = {
            event_id for event_id in reached if event_id in self.full and event_id in self._events
        }
        for event_id in reached:
            if event_id not in pending:
                continue
            event = self._events[event_id]
            if not pending.isdisjoint(event.auth_event_ids):
                return False  # they cite each other in a circle
            yield from self._power_key(event, source)
            if event_id in self.ledger.positions:  # it was among the rest
                self.ledger.remove(event_id)
            self._insert_by_power(event)
            pending.discard(event_id)
        return True

    def _insert_by_power(self, event: Event) -> None:
        positions = self.ledger.positions
        own, cited = (
            self._power_keys[event.event_id],
            [positions[cited_id] for cited_id in event.auth_event_ids if cited_id in positions],
        )
        later = self.ledger.after(
            POWER, max((position for position in cited if position[0] == POWER), default=None)
        )
        for later_id in later:
            if own < self._power_keys[later_id]:
                self.ledger.insert(event, POWER, later_id)
                return
        self.ledger.insert(event, POWER, None)

    def _newly_reached(self, new: Iterable[EventId]) -> list[EventId]:
        """Return the new power events and their reach, each after the events that it reaches."""
        reached: list[EventId] = []
        waiting = [
            (event_id, False)
            for event_id in new
            if event_id in self.full
            and event_id in self._events
            and is_power_event(self._events[event_id])
        ]
        while waiting:
            event_id, is_done = waiting.pop()
            if is_done:
                reached.append(event_id)
            elif event_id not in self._reached:
                self._reached.add(event_id)
                waiting.append((event_id, True))
                event = self._events.get(event_id)
                waiting += [
                    (cited_id, False)
                    for cited_id in (event.auth_event_ids if event is not None else ())
                    if cited_id in self._walk
                ]
        return reached

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
            for event_id in self._walk
            if event_id in self._events
            for cited in self._events[event_id].auth_event_ids
        }
        yield False
        self._reached = set()
        self._newly_reached(self._walk)
        yield False
        ordered = [
            event_id
            for event_id in self._reached
            if event_id in self.full and event_id in self._events
        ]
        for event_id in ordered:
            yield from self._power_key(self._events[event_id], source)
        order: list[EventId] = []
        self._is_circular = yield from in_power_order(
            {event_id: self._power_keys[event_id] for event_id in ordered}, self._events, order
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
        in_order = set(kept)
        if kept != [event_id for event_id in order if event_id in in_order]:
            for event_id in kept:
                self.ledger.remove(event_id)
                yield False
            in_order = set()
        following = iter([*(event_id for event_id in order if event_id in in_order), None])
        before = next(following)
        for event_id in order:
            if event_id == before:
                before = next(following)
                continue
            if event_id in self.ledger.positions:  # in the other phase
                self.ledger.remove(event_id)
            self.ledger.insert(self._events[event_id], phase, before)
            yield False

    def _order_the_rest(self, source: EventSource) -> Steps[None]:
        rest = [event_id for event_id in self.full - self._reached if event_id in self._events]
        order: list[EventId] = []
        if rest:
            newest = self.ledger.value(POWER_LEVELS) or (yield from self._base_power_levels(source))
            order = yield from self._mainline_order(rest, newest, source)
        yield from self._reorder(MAINLINE, order)

    def _base_power_levels(self, source: EventSource) -> Steps[EventId | None]:
        event_id = source.base(POWER_LEVELS)
        while source.lacking:
            yield True
            event_id = source.base(POWER_LEVELS)
        return event_id

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
            parent_id = power_parent(event, source.event)
            if not source.lacking:
                self._parents[event.event_id] = parent_id
            return parent_id

        return Mainline(newest, source.event, parent)


# --------------------------------------------------------------------------------------------------
# Replay a resolution: the events in the order of their checks, each with its result.
#
# The steps are observed in `resolve_conflicts` itself, so that a replay cannot differ from it. A
# step also has the numbers by which its phase orders events, so that the order can be explained.
#
# Example: Alice raises Bob's level (P) on one branch, and bans him (B) on the other. Both are power
# events. P is checked first: the levels are equal, and it is older. Then B is checked, and takes
# the key of Bob's membership.

Phase = Literal["power", "mainline", "depth"]
"""Power events, then all others along the mainline. Version 1 orders by depth alone."""

_NOTHING: frozenset[EventId] = frozenset()


class ReplayStep(NamedTuple):
    """One check.

    ``replaced`` is the value that an earlier check gave the key, None for none. ``level`` is the
    sender's, by the event's own auth events. ``mainline`` is 0 under the newest power levels, and
    grows with their age; None outside of that phase.
    """

    event: Event
    phase: Phase
    refused: AuthDenied | None
    replaced: EventId | None
    level: Level
    mainline: Position | None

    def cites(self, event_id: EventId) -> bool:
        """Return whether the event has another one among its auth events."""
        return event_id in self.event.auth_event_ids


@dataclass(frozen=True, slots=True)
class Replay:
    """A resolution: its input, the checks in their order, and the decided values by key.

    ``full`` is the full conflicted set: in version 1 the conflicted values alone. There the first
    event of a chain is taken without a check.
    """

    conflicted: Mapping[StateKey, AbstractSet[EventId]]
    difference: AbstractSet[EventId]
    full: AbstractSet[EventId]
    steps: tuple[ReplayStep, ...]
    decided: Mapping[StateKey, EventId]


def replay_conflicts(
    room_version: str | RoomVersion,
    unconflicted: StateMap,
    conflicted: Mapping[StateKey, AbstractSet[EventId]],
    auth_difference: AbstractSet[EventId],
    events: Events,
    *,
    rejected: AbstractSet[EventId] = _NOTHING,
) -> Replay:
    """Return the steps of `resolve_conflicts` with the same arguments.

    `events` holds all that `needed_events` names.
    """
    version = version_of(room_version)
    values = set[EventId]().union(*conflicted.values())
    conflict = None
    if version.state_resolution != "v1":
        subgraph = (
            v2.conflicted_subgraph(values, events) if version.state_resolution == "v2.1" else None
        )
        conflict = conflict_of(version, unconflicted, conflicted, auth_difference, subgraph)
    recorder = Recorder(conflict, events)
    decided = resolve_conflicts(
        version,
        unconflicted,
        conflicted,
        auth_difference,
        events,
        rejected=rejected,
        observe=recorder,
    )
    full = values if conflict is None else conflict.full
    return Replay(conflicted, auth_difference, full, tuple(recorder.steps), decided)


class Recorder:
    """Records the checks of one resolution; ``conflict`` is None for version 1."""

    def __init__(self, conflict: ConflictedEvents | None, events: Events) -> None:
        self.steps: list[ReplayStep] = []
        self._conflict = conflict
        self._events = events
        self._power = (
            _NOTHING if conflict is None else frozenset(power_phase_events(conflict, events.get))
        )
        self._values: dict[StateKey, EventId] = {}
        self._mainline: Mainline | None = None

    def __call__(self, event: Event, refused: AuthDenied | None) -> None:
        """Record a check."""
        phase = self._phase(event)
        step = ReplayStep(
            event,
            phase,
            refused,
            self._values.get(event.key),
            sender_level(event, self._events.get),
            self._position(event) if phase == "mainline" else None,
        )
        self.steps.append(step)
        if refused is None:
            self._values[event.key] = event.event_id

    def _phase(self, event: Event) -> Phase:
        if self._conflict is None:
            return "depth"
        return "power" if event.event_id in self._power else "mainline"

    def _position(self, event: Event) -> Position:
        """Return the mainline position. The first call fixes it: power events are done."""
        if self._mainline is None:
            base = {} if self._conflict is None else self._conflict.base
            newest = self._values.get(POWER_LEVELS) or base.get(POWER_LEVELS)
            self._mainline = Mainline(newest, self._events.get)
        return self._mainline.position(event)
