"""Resolve states again, from the events' auth arrays, without chain cover and earlier merges."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from storage.auth import needed_events, resolve_conflicts
from storage.database.connection import Connection
from storage.event import Event
from storage.ids import EventId, StateKey
from storage.maintenance.verify.auth_graph import AuthGraph
from storage.maintenance.verify.event_loader import EventLoader, StoredContent
from storage.state.groups import Group, State, changed_keys


class StateConflict(NamedTuple):
    """The conflict of several states: keys, values by key, and the auth difference, as ids."""

    keys: set[int]
    conflicted: dict[StateKey, set[EventId]]
    difference: set[EventId]


class LoadedEvents(NamedTuple):
    """The loaded events, and the ids that are not stored."""

    held: dict[EventId, StoredContent]
    absent: set[EventId]


class LoadedLookup(NamedTuple):
    """The events that count as rejected for an event whose stream position is ``before``.

    ``late``: also those that were rejected only after that.
    """

    before: int | None
    late: bool

    def see_rejected(self, held: StoredContent) -> bool:
        """Return whether an event counts as rejected."""
        if held.rejected is None:
            return False
        return (
            self.late
            or self.before is None
            or held.stream_ordering is None
            or held.stream_ordering < self.before
        )


class UnconflictedIds(Mapping[StateKey, EventId]):
    """The unconflicted state map, with ids instead of nids.

    `keys_wanted` and `nids_wanted` collect keys and nids that are not loaded yet.
    """

    def __init__(
        self, state: State, keys: set[int], contents: EventLoader, ids: dict[int, EventId]
    ) -> None:
        self._state = state
        self._keys = keys
        self._contents = contents
        self._ids = ids
        self.keys_wanted: set[StateKey] = set()
        self.nids_wanted: set[int] = set()

    def __getitem__(self, key: StateKey) -> EventId:
        if key not in self._contents.key_nids:
            self.keys_wanted.add(key)
            raise KeyError(key)
        number = self._contents.key_nids[key]
        if number is None or number in self._keys or number not in self._state:
            raise KeyError(key)
        nid = self._state[number]
        if nid not in self._ids:
            self.nids_wanted.add(nid)
            raise KeyError(key)
        return self._ids[nid]

    def __iter__(self) -> Iterator[StateKey]:
        raise TypeError("a whole state is never iterated here")

    def __len__(self) -> int:
        return len(self._state) - len(self._keys)


class Resolver:
    """Resolve states of one room."""

    def __init__(self, room_version: str, graph: AuthGraph, contents: EventLoader) -> None:
        self._room_version = room_version
        self._graph = graph
        self._contents = contents

    async def resolve(
        self, conn: Connection, groups: Sequence[Group], before: int | None
    ) -> list[dict[int, int]]:
        """Return the resolved values of the keys in which the states differ; 0 for a removed key.

        There is mostly one answer, sometimes two. The set of rejected events may have changed since
        the first resolution. An outlier may have been accepted then, and rejected by its state when
        it entered the timeline after position ``before``. Both answers are correct then.
        """
        keys = set[int]().union(*(changed_keys(groups[0], other) for other in groups[1:]))
        conflict = await self._conflict(conn, groups, keys)
        loaded = LoadedEvents({}, set())
        answers: list[dict[int, int]] = []
        for late in (True, False):
            eyes = LoadedLookup(before, late)
            answer = await self._resolve(conn, groups[0], conflict, loaded, eyes)
            if answer not in answers:
                answers.append(answer)
        return answers

    async def _conflict(
        self, conn: Connection, groups: Sequence[Group], keys: set[int]
    ) -> StateConflict:
        values = [{group.entries[key] for key in keys if key in group.entries} for group in groups]
        chains = [self._graph.chain(nids) for nids in values]
        difference = set[int]().union(*chains) - chains[0].intersection(*chains[1:])
        common = (
            {nid for key, nid in groups[0].entries.items() if key not in keys}
            if difference
            else set()
        )
        difference = {nid for nid in difference if not self._graph.reached_by(nid, common)}
        held = await self._contents.load(conn, difference.union(*values))
        await self._contents.load_keys(conn, keys)
        ids = {nid: one.event.event_id for nid, one in held.items()}
        conflicted = {
            self._contents.keys[key]: {
                ids[group.entries[key]] for group in groups if group.entries.get(key) in ids
            }
            for key in keys
        }
        return StateConflict(keys, conflicted, {ids[nid] for nid in difference if nid in ids})

    async def _resolve(
        self,
        conn: Connection,
        base: Group,
        conflict: StateConflict,
        loaded: LoadedEvents,
        eyes: LoadedLookup,
    ) -> dict[int, int]:
        held, absent = loaded
        known: dict[int, EventId] = {}
        while True:
            unconflicted = UnconflictedIds(base.entries, conflict.keys, self._contents, known)
            events: dict[EventId, Event] = {event_id: one.event for event_id, one in held.items()}
            rejected = {event_id for event_id, one in held.items() if eyes.see_rejected(one)}
            arguments = (
                self._room_version,
                unconflicted,
                conflict.conflicted,
                conflict.difference,
                events,
            )
            wanted = needed_events(*arguments, rejected=rejected, absent=absent)
            result = None if wanted else resolve_conflicts(*arguments, rejected=rejected)
            if result is not None and not unconflicted.keys_wanted and not unconflicted.nids_wanted:
                return {
                    key: self._nid(held, result.get(self._contents.keys[key]))
                    for key in conflict.keys
                }
            found = await self._contents.load_ids(conn, wanted)
            absent |= wanted - found.keys()
            held.update(found)
            await self._contents.load_key_nids(conn, unconflicted.keys_wanted)
            state = await self._contents.load(conn, unconflicted.nids_wanted)
            known |= {nid: one.event.event_id for nid, one in state.items()}
            known |= {nid: EventId(f"nid {nid}") for nid in unconflicted.nids_wanted - known.keys()}

    @staticmethod
    def _nid(held: Mapping[EventId, StoredContent], event_id: EventId | None) -> int:
        return 0 if event_id is None else held[event_id].nid
