"""Give a state resolution its input from a change set.

The input is events by id, and the unconflicted state. `storage.auth` knows events by id and states
by (type, state_key); the change set knows both by nid.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from storage.errors import StorageCorrupt
from storage.event import Event
from storage.ids import EventId, StateKey
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.missing_data import MissingData
from storage.state.groups import REMOVED, Group

UNKNOWN: Final = object()


class ResolutionEvents(Mapping[EventId, Event]):
    """The events in memory, by id.

    ``rejected`` are the ids of the events read so far that are rejected. ``absent`` are requested
    ids that are not stored.
    """

    def __init__(self, change_set: ChangeSet) -> None:
        self._change_set = change_set
        self._events: dict[EventId, Event | None] = {}
        self.rejected: set[EventId] = set()
        self.absent: set[EventId] = set()

    def add(self, ids: Iterable[EventId]) -> None:
        """Raise `MissingData` unless these are in memory; record those not stored as ``absent``."""
        lacking = []
        for event_id in ids:
            if self._change_set.events.rows.get(event_id, UNKNOWN) is None:
                self.absent.add(event_id)
            elif self.get(event_id) is None:
                lacking.append(event_id)
        if lacking:
            raise MissingData("cited", lacking)

    def get(self, event_id: EventId, default: Any = None) -> Any:
        event = self._events.get(event_id)
        return event or self._look(event_id) or default

    def _look(self, event_id: EventId) -> Event | None:
        found = self._change_set.events.at_hand(event_id)
        if found is None:
            return None
        row, event = found
        self._events[event_id] = event
        if row.rejected is not None:
            self.rejected.add(event_id)
        return event

    def __getitem__(self, event_id: EventId) -> Event:
        event: Event | None = self.get(event_id)
        if event is None:
            raise KeyError(event_id)
        return event

    def __iter__(self) -> Iterator[EventId]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)


class UnconflictedState(Mapping[StateKey, EventId]):
    """A state without the conflicted keys, looked up by (type, state_key)."""

    def __init__(self, change_set: ChangeSet, group: Group, conflicted: set[int]) -> None:
        self._change_set = change_set
        self._group = group
        self._conflicted = conflicted

    def __getitem__(self, key: StateKey) -> EventId:
        type_nid = self._change_set.names.find_type(key[0])
        key_nid = (
            None if type_nid is None else self._change_set.names.find_state_key(type_nid, key[1])
        )
        if key_nid is None or key_nid in self._conflicted or key_nid not in self._group.entries:
            raise KeyError(key)
        return event_id_of(self._change_set, self._group.entries[key_nid])

    def __iter__(self) -> Iterator[StateKey]:
        return (
            text_key(self._change_set, key)
            for key in self._group.entries
            if key not in self._conflicted
        )

    def __len__(self) -> int:
        return sum(key not in self._conflicted for key in self._group.entries)


class ResolutionState:
    """The `EventSource` of a `storage.auth.Resolution`.

    It notes data that is not in memory instead of raising `MissingData`. The driver checks
    `lacking`, loads what `needs` returns, and continues the resolution.
    """

    def __init__(
        self, change_set: ChangeSet, loaded: ResolutionEvents, base: Mapping[StateKey, EventId]
    ) -> None:
        self._change_set = change_set
        self._loaded = loaded
        self._base = base
        self._cited: set[EventId] = set()
        self._needs: MissingData | None = None

    @property
    def rejected(self) -> set[EventId]:
        """Return the ids of the events read so far that are rejected."""
        return self._loaded.rejected

    @property
    def lacking(self) -> bool:
        """Return whether something that was requested is not in memory."""
        return self._needs is not None or bool(self._cited)

    def event(self, event_id: EventId, /) -> Event | None:
        """Return an event; None if it is not stored, or not in memory."""
        event: Event | None = self._loaded.get(event_id)
        if event is None and event_id not in self._loaded.absent:
            if self._change_set.events.rows.get(event_id, UNKNOWN) is None:
                self._loaded.absent.add(event_id)
            else:
                self._cited.add(event_id)
        return event

    def base(self, key: StateKey, /) -> EventId | None:
        """Return the value of an unconflicted key; None if it has none, or it is not in memory."""
        try:
            return self._base.get(key)
        except MissingData as needs:
            self._needs = needs
            return None

    def needs(self) -> MissingData:
        """Return what has to be loaded, and forget it."""
        needs, self._needs = self._needs, None
        if needs is None:
            needs, self._cited = MissingData("cited", self._cited), set()
        return needs


def text_key(change_set: ChangeSet, key_nid: int) -> StateKey:
    type_nid, state_key = change_set.names.state_key_name(key_nid)
    return change_set.names.type_name(type_nid), state_key


def event_id_of(change_set: ChangeSet, nid: int) -> EventId:
    return EventId(change_set.events.row_of(nid).event_id)


def nid_of(change_set: ChangeSet, event_id: EventId | None) -> int:
    """Return the nid of the event that a resolution chose; `REMOVED` if it chose none."""
    if event_id is None:
        return REMOVED
    row = change_set.events.row(event_id)
    if row is None:
        raise StorageCorrupt(
            "state resolution chose an event that is not stored", event_id=event_id
        )
    return row.event_nid
