"""Resolve states in time slices, continuing from the room's previous resolution.

A resolution is a generator that the change set keeps until it is done. If data has to be loaded or
the time slice is over, planning stops with `MissingData` or `TimeSliceOver`. Then the event is
planned again, but the generator continues where it stopped. So neither a long auth chain nor many
auth checks block the event loop, and nothing is walked twice.

The conflict is kept as a `ResolutionRecord`. The room's next resolution usually differs from it in
one state that has advanced by an event:

    last      states 7 and 9 are resolved
    now       states 8 and 9 are resolved; 8 is 7 and one event more

The auth difference then changes only by events that the auth chain of 8 has and that of 7 lacks, or
the reverse. Only those are walked, and `storage.auth.Resolution` resolves the change. If more than
one state differs, or the chain cover lacks an event, everything is resolved from the start. Version
1 of the algorithm reads only the states and keeps no record.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from storage.auth import Change, needed_events, resolve_conflicts
from storage.errors import StorageCorrupt
from storage.event import Event, RoomVersion
from storage.event.versions import version_of
from storage.ids import EventId, StateKey
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.missing_data import MissingData, TimeSliceOver
from storage.persist.model.resolution_records import ResolutionRecord
from storage.persist.model.rows import RoomRow
from storage.persist.plan.auth_difference import (
    ChainReach,
    NotInChainCover,
    Steps,
    asking,
    between,
    differing,
    farthest_of,
    lowest_of,
    reached_anew,
    walked,
)
from storage.state.groups import REMOVED, Group, changed_keys, derive

# --------------------------------------------------------------------------------------------------
# Give a state resolution its input from a change set.
#
# The input is events by id, and the unconflicted state. `storage.auth` knows events by id and
# states by (type, state_key); the change set knows both by nid.

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
        return event or self._read_in_memory(event_id) or default

    def _read_in_memory(self, event_id: EventId) -> Event | None:
        cached = self._change_set.events.at_hand(event_id)
        if cached is None:
            return None
        row, event = cached
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


NEAR: Final = 64  # keys in which a state may differ from the recorded one that it replaces


class StateResolution:
    """One resolution of several states, with the time spent on it so far."""

    def __init__(self, change_set: ChangeSet, room: RoomRow, states: Sequence[Group]) -> None:
        self._steps = _resolved(change_set, room, states)
        self._room_id = room.room_id
        self.seconds: float = 0.0
        self._result: dict[int, int] | None = None

    def run(self, change_set: ChangeSet) -> dict[int, int]:
        """Continue to the end and return the value of each conflicted key, `REMOVED` for none.

        Raise `MissingData` if something has to be loaded, and `TimeSliceOver` if the time slice is
        over. A later call continues from there.
        """
        # CPU time of the thread, so that a busy machine does not make a room count as heavy
        began, worked = (time.perf_counter(), time.thread_time())
        try:
            while self._result is None:
                self._step(change_set, began)
        finally:
            seconds = time.thread_time() - worked
            self.seconds += seconds
            change_set.states.resolving_seconds[self._room_id] = (
                change_set.states.resolving_seconds.get(self._room_id, 0) + seconds
            )
            if self._result is not None:
                change_set.caches.resolutions.add(self.seconds)
        return self._result

    def _step(self, change_set: ChangeSet, began: float) -> None:
        """Run one step of the generator."""
        try:
            needs = next(self._steps)
        except StopIteration as done:
            self._result = done.value
            return
        if needs is not None:
            raise needs
        # all planning before this call is repeated, so each call gets a time slice of its own
        if change_set.time_slice.is_used_up and change_set.time_slice.is_long(
            time.perf_counter() - began
        ):
            raise TimeSliceOver


def _resolved(
    change_set: ChangeSet, room: RoomRow, states: Sequence[Group]
) -> Steps[dict[int, int]]:
    """Resolve the states from the nearest record, or from the start; keep the new record."""
    version = version_of(room.room_version)
    if version.state_resolution == "v1":
        return (yield from _version_1(change_set, version, states))
    conflict = StateGroupConflict(
        change_set, version, {group.state_group: group for group in states}
    )
    records = change_set.states.records_of(room.room_nid)
    record = _nearest(records, conflict.states)
    try:
        if record is None:
            record = yield from conflict.begun()
        else:
            records.remove(record)  # changed in place, so no other resolution may continue from it
            yield from conflict.continued(record)
        is_whole = True
    except NotInChainCover:
        record = yield from conflict.walked()
        is_whole = False
    # a missing event may be stored later, and a walk without the cover lacks parts of the record
    if is_whole and not conflict.loaded.absent:
        records.append(record)
    return (yield from asking(conflict.values, record))


def _nearest(
    records: Sequence[ResolutionRecord], states: Mapping[int, Group]
) -> ResolutionRecord | None:
    """Return the newest record that differs in one state, in at most `NEAR` keys of it."""
    for record in reversed(records):
        odd = record.odd(states)
        if odd is not None and len(changed_keys(*odd)) <= NEAR:
            return record
    return None


class StateGroupConflict:
    """The states to resolve, of a room with version 2 or 2.1 of the algorithm.

    Its methods fill a `ResolutionRecord` in one of three ways: `begun` from the start, `continued`
    from an earlier record, and `walked` without the chain cover. `values` reads the result.
    """

    def __init__(
        self, change_set: ChangeSet, version: RoomVersion, states: dict[int, Group]
    ) -> None:
        self.states = states
        self.loaded: ResolutionEvents = ResolutionEvents(change_set)
        self._change_set = change_set
        self._is_newer = version.state_resolution == "v2.1"
        self._groups = list(states.values())

    def begun(self) -> Steps[ResolutionRecord]:
        """Resolve the whole conflict; raise `NotInChainCover` if the cover lacks an event."""
        record = self._record()
        values = record.conflicted
        record.differing = yield from differing(self._change_set, self._groups, record.keys)
        record.lowest = lowest_of(self._change_set, values)
        record.farthest = yield from asking(farthest_of, self._change_set, values)
        passed = yield from between(self._change_set, values, record.lowest)
        yield from self._resolve(record, passed, record.keys)
        return record

    def walked(self) -> Steps[ResolutionRecord]:
        """Resolve the whole conflict without the chain cover."""
        record = self._record()
        record.differing, passed = yield from asking(
            walked, self._change_set, self._groups, record.keys
        )
        yield from self._resolve(record, passed, record.keys)
        return record

    def _record(self) -> ResolutionRecord:
        """Return a record with the conflicted keys and their values, and nothing resolved."""
        keys = set[int]().union(
            *(changed_keys(self._groups[0], other) for other in self._groups[1:])
        )
        return ResolutionRecord(self.states, keys, {key: self._under(key) for key in keys})

    def _under(self, key: int) -> set[int]:
        return {group.entries[key] for group in self._groups if key in group.entries}

    def continued(self, record: ResolutionRecord) -> Steps[None]:
        """Update the record to these states, of which one replaces a recorded one.

        Raise `NotInChainCover` if the chain cover lacks an event.
        """
        odd = record.odd(self.states)
        if odd is None:
            raise ValueError("more than one state is different")
        old, new = odd
        changed = changed_keys(old, new)
        before = _under_keys(record, changed)
        keys_before = set(record.keys)
        for key in changed:
            self._update_key(record, key)
        gained = yield from reached_anew(
            self._change_set,
            _entries(new, changed),
            ChainReach(self._change_set, old, keys_before, changed),
        )
        lost = yield from reached_anew(
            self._change_set,
            _entries(old, changed),
            ChainReach(self._change_set, new, record.keys, changed),
        )
        others = [
            ChainReach(self._change_set, group, record.keys, changed)
            for group in self._groups
            if group is not new
        ]
        yield from self._update_difference(record, gained, lost, others)
        record.states = self.states
        passed = yield from self._passed(record, _under_keys(record, changed) - before)
        yield from self._resolve(record, passed, changed)

    def _update_key(self, record: ResolutionRecord, key: int) -> None:
        is_conflict = len({group.entries.get(key) for group in self._groups}) > 1
        record.change_key(key, self._under(key) if is_conflict else set())

    def _update_difference(
        self,
        record: ResolutionRecord,
        gained: set[int],
        lost: set[int],
        others: Sequence[ChainReach],
    ) -> Steps[None]:
        """Update the auth difference by what the replaced state's auth chain gained and lost.

        Events enter the difference if they were outside it: no state had what was gained, or all
        states had what was lost. An event inside it leaves in two cases: the state gained it and
        all others have it, or the state lost it and no other has it.
        """
        enter = (gained | lost) - record.differing
        leave = set()
        for nid in (gained | lost) & record.differing:
            # with one other state no search is needed: exactly one state had the event, so the
            # other has it if it was gained, and lacks it if it was lost
            reached = [nid in gained]
            if len(others) > 1:
                reached = yield from asking(_reached, others, nid)
            if all(reached) if nid in gained else not any(reached):
                leave.add(nid)
            yield None
        record.differing |= enter
        record.differing -= leave

    def _passed(self, record: ResolutionRecord, new: set[int]) -> Steps[set[int]]:
        """Return the events on auth paths between conflicted events.

        Version 2.1 needs all of them in the full conflicted set. Version 2 needs at least those
        that are not in the record's walk. Their paths begin or end at an event in ``new``, the
        newly conflicted events.
        """
        values = record.conflicted
        if self._is_newer:
            record.lowest = lowest_of(self._change_set, values)
            return (yield from between(self._change_set, values, record.lowest))
        # an event that leaves the full conflicted set may still be on a path, so walk all again
        if not record.full <= values | record.differing:
            record.lowest = lowest_of(self._change_set, values)
            record.farthest = yield from asking(farthest_of, self._change_set, values)
            return (yield from between(self._change_set, values, record.lowest))
        lowest = lowest_of(self._change_set, new)
        for chain_nid, number in lowest.items():
            record.lowest[chain_nid] = min(number, record.lowest.get(chain_nid, number))
        passed = yield from between(self._change_set, new, record.lowest, record.walk)
        if any(record.farthest.get(chain_nid, 0) >= number for chain_nid, number in lowest.items()):
            passed |= yield from between(self._change_set, values, lowest)
        farthest = yield from asking(farthest_of, self._change_set, new)
        for chain_nid, number in farthest.items():
            record.farthest[chain_nid] = max(number, record.farthest.get(chain_nid, 0))
        return passed

    def _resolve(
        self, record: ResolutionRecord, passed: set[int], changed: Collection[int]
    ) -> Steps[None]:
        """Resolve the change of the full conflicted set and the walk since the record."""
        change_set, before = self._change_set, record.full
        record.full = record.conflicted | record.differing
        if self._is_newer:
            record.full |= passed
        removed = before - record.full
        record.walk -= removed
        fresh = passed - record.walk - record.full
        record.walk |= record.full | passed
        change = yield from asking(
            lambda: Change(
                self._ids(record.full - before),
                self._ids(removed),
                self._ids(fresh),
                [text_key(change_set, key) for key in changed],
            )
        )
        base = {} if self._is_newer else UnconflictedState(change_set, self._groups[0], record.keys)
        source = ResolutionState(change_set, self.loaded, base)
        for lacking in record.resolution.change(change, source):
            yield source.needs() if lacking else None

    def _ids(self, nids: Collection[int]) -> list[EventId]:
        self._change_set.events.ensure_rows(nids)
        return [event_id_of(self._change_set, nid) for nid in nids]

    def values(self, record: ResolutionRecord) -> dict[int, int]:
        """Return the value of each conflicted key, `REMOVED` for none.

        Keys that no state has, but events of the auth difference do, are included.
        """
        changed = record.resolution.ledger.changed
        while changed:
            key = next(iter(changed))
            self._note_decided(record, key)
            changed.discard(key)
        values, entries = dict.fromkeys(record.keys, REMOVED), self._groups[0].entries
        for state_key_nid, nid in record.decided.values():
            if state_key_nid in values or state_key_nid not in entries:
                values[state_key_nid] = nid
        return values

    def _note_decided(self, record: ResolutionRecord, key: StateKey) -> None:
        """Copy the decided value of a key to the record, as nids."""
        event_id = record.resolution.ledger.value(key)
        if event_id is None:
            record.decided.pop(key, None)
            return
        row = self._change_set.events.row(event_id)
        if row is None or row.state_key_nid is None:
            raise StorageCorrupt(
                "state resolution chose an event that is not stored", event_id=event_id
            )
        record.decided[key] = row.state_key_nid, row.event_nid


def _under_keys(record: ResolutionRecord, keys: Iterable[int]) -> set[int]:
    return set().union(*(record.values.get(key, ()) for key in keys))


def _reached(states: Iterable[ChainReach], nid: int) -> list[bool]:
    return [state.has(nid) for state in states]


def _entries(group: Group, keys: Iterable[int]) -> list[int]:
    return [nid for key in keys if (nid := group.entries.get(key)) is not None]


def _version_1(
    change_set: ChangeSet, version: RoomVersion, states: Sequence[Group]
) -> Steps[dict[int, int]]:
    """Resolve the states by version 1; return the value of each conflicted key."""
    keys = set[int]().union(*(changed_keys(states[0], other) for other in states[1:]))
    values = {key: {group.entries[key] for group in states if key in group.entries} for key in keys}
    yield from asking(lambda: change_set.events.ensure_rows(set().union(*values.values())))
    names = yield from asking(lambda: {key: text_key(change_set, key) for key in keys})
    conflicted = {
        names[key]: {event_id_of(change_set, nid) for nid in nids} for key, nids in values.items()
    }
    events = ResolutionEvents(change_set)
    arguments = (
        version,
        UnconflictedState(change_set, states[0], keys),
        conflicted,
        frozenset[EventId](),
    )
    while needed := (
        yield from asking(
            lambda: needed_events(
                *arguments, events, rejected=events.rejected, absent=events.absent
            )
        )
    ):
        # in rounds: the loaded events determine which events are needed next
        yield from asking(events.add, needed)
        yield None
    result = yield from asking(
        lambda: resolve_conflicts(*arguments, events, rejected=events.rejected)
    )
    return (
        yield from asking(
            lambda: {key: nid_of(change_set, result.get(name)) for key, name in names.items()}
        )
    )


# --------------------------------------------------------------------------------------------------
# Merge several states: resolve their conflicts and store the smallest difference.
#
# The merged state is stored as a difference to the state that it differs least from. Only keys in
# which the states differ are compared, and only auth events that can matter are loaded. So no work
# here is proportional to the size of the room's state.

Derive = Callable[[Group, Mapping[int, int]], Group]


def merged_state(changes: EventChanges, groups: Sequence[Group], new: Derive) -> Group:
    """Return the group of the resolution of these states.

    ``new`` makes a group from a base and a change. It is called only if no group has that state.
    """
    distinct = {group.state_group: group for group in groups}
    if len(distinct) == 1:
        return groups[0]
    question = frozenset(distinct)
    existing = changes.merged_before(question)
    if existing is not None:
        return existing
    states = sorted(distinct.values(), key=lambda group: group.state_group)
    resolved = resolution(changes, states)
    result = _smallest(changes, states, resolved, new)
    changes.merged[question] = result.state_group
    return result


def resolution(changes: EventChanges, states: Sequence[Group]) -> dict[int, int]:
    """Return the resolved event nid of each key in which these states differ.

    It is `REMOVED` if the resolved state lacks the key. No two of the states are equal. The work is
    kept in the change set, so that it continues after `MissingData` (`StateResolution`).
    """
    if len(states) == 1:
        return {}
    change_set, question = changes.change_set, frozenset(group.state_group for group in states)
    work = change_set.states.resolving.get(question)
    if work is None:
        work = change_set.states.resolving[question] = StateResolution(
            change_set, changes.room.row, states
        )
    return work.run(change_set)


def _smallest(
    changes: EventChanges, states: Sequence[Group], resolved: Mapping[int, int], new: Derive
) -> Group:
    base, change = min(_changes(changes, states, resolved), key=lambda pair: len(pair[1]))
    if not change:
        return base
    return same_state(changes, derive(base, change, 0, 0)) or new(base, change)


def _changes(
    changes: EventChanges, states: Sequence[Group], resolved: Mapping[int, int]
) -> Iterator[tuple[Group, dict[int, int]]]:
    """Yield groups to derive the resolved state from, each with the change that leads to it.

    The change with the fewest keys is always among them. The room's current state comes first:
    while a fork grows, each event of a branch changes it by one key. After a change of at most one
    key, only states that need no change are yielded: `_has` finds the difference of the others in
    their first keys.
    """
    main = changes.main_group()
    if main is not None:
        keys = changed_keys(main, states[0]) - resolved.keys()
        change = _change(
            main, {**resolved, **{key: states[0].entries.get(key, REMOVED) for key in keys}}
        )
        yield main, change
        if len(change) <= 1:
            yield from ((group, {}) for group in states if _has(group, resolved))
            return
    for group in states:
        yield group, _change(group, resolved)


def _has(group: Group, target: Mapping[int, int]) -> bool:
    return all(group.entries.get(key, REMOVED) == value for key, value in target.items())


def _change(base: Group, target: Mapping[int, int]) -> dict[int, int]:
    """Return the part of ``target`` in which it differs from ``base``."""
    return {key: value for key, value in target.items() if base.entries.get(key, REMOVED) != value}


def same_state(changes: EventChanges, target: Group) -> Group | None:
    """Return a group of the room that has exactly this state, or None.

    ``target`` carries the state and its digest; it need not be a group that will be stored. The
    digest finds candidates, which are then compared key by key. States after one event have no
    digest in the table, mostly (`storage.state.groups.keeps_digest`), and are not found: the
    caller compares with those nearby. A state may so have two groups, which are read alike.
    """
    digest = target.digest
    candidates = [
        *changes.room.group_digests.get(digest, ()),
        *(group.state_group for group in changes.groups.values()),
    ]
    candidates += changes.change_set.answers.answer(("digest", changes.room_nid, digest))
    for number in candidates:
        group = changes.group(number)
        if group.digest == digest and not changed_keys(group, target):
            return group
    return None
