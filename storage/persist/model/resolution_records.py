"""What the last resolutions of a room decided, so that the next ones go on from there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from storage.auth import Resolution
from storage.ids import StateKey
from storage.state.groups import Group

LEAST: Final = 8  # a smaller conflict is resolved anew as fast
RECORDED_EVENTS_MAX: Final = 50_000
"""Events of all conflicts together that are remembered, about 2 kB each."""
OF_A_ROOM: Final = 2


@dataclass(slots=True, eq=False)
class ResolutionRecord:
    """The conflict of some states.

    It is changed in place, so whoever goes on from it takes it away first.
    """

    states: dict[int, Group]
    keys: set[int]
    """Those in which the states differ."""
    values: dict[int, set[int]]
    """Under each of these keys."""
    differing: set[int] = field(default_factory=set)
    """Nids of the events in the auth chains of some of the states, but not of all."""
    full: set[int] = field(default_factory=set)
    """The full conflicted set."""
    walk: set[int] = field(default_factory=set)
    """That, and what is on auth paths between members."""
    lowest: dict[int, int] = field(default_factory=dict)
    """By chain, the lowest number of a conflicted event."""
    farthest: dict[int, int] = field(default_factory=dict)
    """By chain, at least the highest number that a conflicted event reaches."""
    resolution: Resolution = field(default_factory=Resolution)
    decided: dict[StateKey, tuple[int, int]] = field(default_factory=dict)
    """What the events of the conflict come to, as nids of keys and events.

    Brought up to date by `Ledger.changed`.
    """
    conflicted: set[int] = field(init=False)
    """The nids under the keys in conflict."""

    def __post_init__(self) -> None:
        self.conflicted = set().union(*self.values.values())

    def change_key(self, key: int, values: set[int]) -> None:
        """Have a key in conflict with these values; without any, not in conflict.

        No event is under two keys.
        """
        self.conflicted -= self.values.pop(key, set())
        self.keys.discard(key)
        if values:
            self.keys.add(key)
            self.values[key] = values
            self.conflicted |= values

    def odd(self, states: Mapping[int, Group]) -> tuple[Group, Group] | None:
        """The state of the record that another took the place of, and that one; None if more is different."""
        old, new = self.states.keys() - states.keys(), states.keys() - self.states.keys()
        if len(old) != 1 or len(new) != 1:
            return None
        return self.states[next(iter(old))], states[next(iter(new))]


def newest(records: Collection[ResolutionRecord]) -> list[ResolutionRecord]:
    """Those of a room that are remembered; newer ones are last."""
    return [record for record in records if LEAST <= len(record.full) <= RECORDED_EVENTS_MAX][
        -OF_A_ROOM:
    ]
