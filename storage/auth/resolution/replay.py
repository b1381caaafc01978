"""Replay a resolution: the events in the order of their checks, each with its result.

The steps are observed in `resolve_conflicts` itself, so that a replay cannot differ from it. A step
also has the numbers by which its phase orders events, so that the order can be explained.

Example: Alice raises Bob's level (P) on one branch, and bans him (B) on the other. Both are power
events. P is checked first: the levels are equal, and it is older. Then B is checked, and takes the
key of Bob's membership.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, NamedTuple

from storage.auth.level_lookup import Level
from storage.auth.resolution import graph
from storage.auth.resolution.conflicts import StateMap
from storage.auth.resolution.graph import Events
from storage.auth.resolution.mainline import Mainline, Position
from storage.auth.resolution.power_order import sender_level
from storage.auth.resolution.resolve import resolve_conflicts
from storage.auth.resolution.v2 import ConflictedEvents, conflict_of, power_phase_events
from storage.auth.state_keys import POWER_LEVELS
from storage.errors import AuthDenied
from storage.event import Event, RoomVersion
from storage.event.versions import version_of
from storage.ids import EventId, StateKey

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
            graph.conflicted_subgraph(values, events)
            if version.state_resolution == "v2.1"
            else None
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
