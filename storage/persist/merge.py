"""The state where several states meet: resolved if they disagree, stored as the smallest difference to any of them.

Only the keys in which the states differ are looked at, and only the auth events that can matter are loaded; nothing here
costs work proportional to the size of the room's state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Final

from storage.auth import needed_events, resolve_conflicts
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.ids import EventId, StateKey
from storage.persist.chains import auth_difference
from storage.persist.context import Needs
from storage.persist.draft import Draft
from storage.persist.step import Step
from storage.state.groups import REMOVED, Group, changed_keys, derive

UNKNOWN: Final = object()
Derive = Callable[[Group, Mapping[int, int]], Group]


def merge(step: Step, groups: Sequence[Group], new: Derive) -> Group:
    """The group of the resolution of these states. ``new`` makes a group from a base and a change; it may not be called at all."""
    distinct = {group.state_group: group for group in groups}
    if len(distinct) == 1:
        return groups[0]
    question = frozenset(distinct)
    known = step.merged_before(question)
    if known is not None:
        return known
    states = sorted(distinct.values(), key=lambda group: group.state_group)
    resolved = resolution(step, states)
    result = _smallest(step, states, resolved, new)
    step.merged[question] = result.state_group
    return result


def resolution(step: Step, states: Sequence[Group]) -> dict[int, int]:
    """The value of each key in which these states differ, no two of which are equal; `REMOVED` where resolution took it away."""
    draft, room = step.draft, step.room
    if len(states) == 1:
        return {}
    began = perf_counter()
    keys = set[int]().union(*(changed_keys(states[0], other) for other in states[1:]))
    values = {key: {group.entries[key] for group in states if key in group.entries} for key in keys}
    chains = auth_difference(draft, states, keys)
    draft.ensure_rows(set[int]().union(*chains, *values.values()))
    difference, subgraph = ({_event_id(draft, nid) for nid in nids} for nids in chains)
    conflicted = {_text_key(draft, key): {_event_id(draft, nid) for nid in nids} for key, nids in values.items()}
    events = Loaded(draft)
    unconflicted = Unconflicted(draft, states[0], keys)
    arguments = (room.row.room_version, unconflicted, conflicted, difference)
    while wanted := needed_events(*arguments, events, rejected=events.rejected, absent=events.absent, conflicted_subgraph=subgraph):
        events.add(wanted)  # in rounds: what is found tells what to look for next
    result = resolve_conflicts(*arguments, events, rejected=events.rejected, conflicted_subgraph=subgraph)
    resolved = {key: _nid(draft, result.get(_text_key(draft, key))) for key in keys}
    draft.caches.resolutions.add(perf_counter() - began)  # the last time over: what was lacking is here
    return resolved


class Loaded(Mapping[EventId, Event]):
    """The events that a resolution has at hand, by id: all that are in memory. Which of them are rejected, and which ids are not held."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._events: dict[EventId, Event | None] = {}
        self.rejected: set[EventId] = set()
        self.absent: set[EventId] = set()

    def add(self, ids: Iterable[EventId]) -> None:
        """Have these in memory; those not held are remembered as `absent`."""
        lacking = []
        for event_id in ids:
            if self._draft.rows.get(event_id, UNKNOWN) is None:
                self.absent.add(event_id)
            else:
                lacking.append(event_id)
        if lacking:
            raise Needs("cited", lacking)

    def get(self, event_id: EventId, default: Any = None) -> Any:
        """The event, or ``default`` if it is not at hand."""
        event = self._events.get(event_id)
        return event or self._look(event_id) or default

    def _look(self, event_id: EventId) -> Event | None:
        found = self._draft.at_hand(event_id)
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


class Unconflicted(Mapping[StateKey, EventId]):
    """A state without the keys in conflict, looked up by key."""

    def __init__(self, draft: Draft, group: Group, conflicted: set[int]) -> None:
        self._draft = draft
        self._group = group
        self._conflicted = conflicted

    def __getitem__(self, key: StateKey) -> EventId:
        type_nid = self._draft.find_type(key[0])
        key_nid = None if type_nid is None else self._draft.find_state_key(type_nid, key[1])
        if key_nid is None or key_nid in self._conflicted or key_nid not in self._group.entries:
            raise KeyError(key)
        return _event_id(self._draft, self._group.entries[key_nid])

    def __iter__(self) -> Iterator[StateKey]:
        return (_text_key(self._draft, key) for key in self._group.entries if key not in self._conflicted)

    def __len__(self) -> int:
        return sum(key not in self._conflicted for key in self._group.entries)


def _smallest(step: Step, states: Sequence[Group], resolved: Mapping[int, int], new: Derive) -> Group:
    """A group that has the resolved state already, else one derived from the state that it differs least from.

    The room's current state is a candidate besides the states themselves: while a fork grows, each event of a branch changes it by one key.
    """
    changes = [(group, _change(group, resolved)) for group in states]
    main = step.main_group()
    if main is not None and all(main.state_group != group.state_group for group in states):
        keys = changed_keys(main, states[0]) | resolved.keys()
        changes.append((main, _change(main, {key: resolved.get(key, states[0].entries.get(key, REMOVED)) for key in keys})))
    base, change = min(changes, key=lambda pair: len(pair[1]))
    if not change:
        return base
    return same_state(step, derive(base, change, 0, 0)) or new(base, change)


def _change(base: Group, target: Mapping[int, int]) -> dict[int, int]:
    return {key: value for key, value in target.items() if base.entries.get(key, REMOVED) != value}


def same_state(step: Step, wanted: Group) -> Group | None:
    """A group of the room that holds just this state, or None. ``wanted`` need not be a group that is going to be written."""
    digest = wanted.digest
    candidates = [*step.room.group_digests.get(digest, ()), *(group.state_group for group in step.groups.values())]
    candidates += step.draft.answer(("digest", step.room_nid, digest))
    for number in candidates:
        group = step.group(number)
        if group.digest == digest and not changed_keys(group, wanted):
            return group
    return None


def _text_key(draft: Draft, key_nid: int) -> StateKey:
    type_nid, state_key = draft.state_key_name(key_nid)
    return draft.type_name(type_nid), state_key


def _event_id(draft: Draft, nid: int) -> EventId:
    return EventId(draft.row_of(nid).event_id)


def _nid(draft: Draft, event_id: EventId | None) -> int:
    if event_id is None:
        return REMOVED
    row = draft.row(event_id)
    if row is None:
        raise StorageCorrupt("state resolution chose an event that is not held", event_id=event_id)
    return row.event_nid
