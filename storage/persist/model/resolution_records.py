"""Records of the last resolutions of a room, from which the next ones continue."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from storage.auth import Resolution
from storage.ids import StateKey
from storage.state.groups import Group

LEAST: Final = 8  # a smaller conflict is resolved from scratch as fast
RECORDED_EVENTS_MAX: Final = 50_000
"""Limit of recorded events over all conflicts, at about 2 kB each."""
OF_A_ROOM: Final = 2


@dataclass(slots=True, eq=False)
class ResolutionRecord:
    """The conflict between some states.

    It is changed in place, so its user takes it out of the cache first.
    """

    states: dict[int, Group]
    keys: set[int]
    """Keys whose values differ between the states."""
    values: dict[int, set[int]]
    """The values of each of these keys."""
    differing: set[int] = field(default_factory=set)
    """Nids of events in the auth chains of some of the states, but not of all."""
    full: set[int] = field(default_factory=set)
    """The full conflicted set."""
    walk: set[int] = field(default_factory=set)
    """The full conflicted set, and all events on auth paths between its members."""
    lowest: dict[int, int] = field(default_factory=dict)
    """The lowest sequence number of a conflicted event, by chain."""
    farthest: dict[int, int] = field(default_factory=dict)
    """An upper bound of the sequence numbers that conflicted events reach, by chain."""
    resolution: Resolution = field(default_factory=Resolution)
    decided: dict[StateKey, tuple[int, int]] = field(default_factory=dict)
    """The resolved values, as nids of keys and events. `Ledger.changed` keeps them current."""
    conflicted: set[int] = field(init=False)
    """Nids of all values of the conflicted keys."""

    def __post_init__(self) -> None:
        self.conflicted = set().union(*self.values.values())

    def change_key(self, key: int, values: set[int]) -> None:
        """Set the values of a conflicted key. Without values, the key is no longer in conflict.

        No event is a value of two keys.
        """
        self.conflicted -= self.values.pop(key, set())
        self.keys.discard(key)
        if values:
            self.keys.add(key)
            self.values[key] = values
            self.conflicted |= values

    def odd(self, states: Mapping[int, Group]) -> tuple[Group, Group] | None:
        """Return the one state that was replaced, and its replacement.

        None: the states differ in more than one.
        """
        old, new = self.states.keys() - states.keys(), states.keys() - self.states.keys()
        if len(old) != 1 or len(new) != 1:
            return None
        return self.states[next(iter(old))], states[next(iter(new))]


def newest(records: Collection[ResolutionRecord]) -> list[ResolutionRecord]:
    """Return the records of a room that are worth keeping, the newest last."""
    return [record for record in records if LEAST <= len(record.full) <= RECORDED_EVENTS_MAX][
        -OF_A_ROOM:
    ]
