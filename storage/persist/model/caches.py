"""Caches of committed rows, one set per process."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Generic, TypeVar

from storage.codec import Dictionary
from storage.database.names import InternedNames
from storage.event import Event
from storage.graph.chains import ChainPosition, Closure
from storage.ids import UserId
from storage.observability.counters import Distribution
from storage.persist.model.missing_data import MissingData
from storage.persist.model.resolution_records import RECORDED_EVENTS_MAX, ResolutionRecord
from storage.persist.model.results import KnownTransaction, TransactionKey
from storage.persist.model.rows import (
    AudienceRow,
    AuthorisedBefore,
    CheckedLike,
    Counts,
    EventRow,
    MissingRow,
    RoomRow,
    VisibilityRow,
)
from storage.persistent_map import Map
from storage.state.groups import DeltaRow as Row
from storage.state.groups import Group
from storage.streams.caches import Removed

# --------------------------------------------------------------------------------------------------
# Dictionaries with a size limit, for caches that are trimmed between batches.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R", bound=tuple[Any, ...])


class BoundedCache(dict[K, V]):
    """A dict that drops its older half when it exceeds its limit.

    It is trimmed between batches, never while planning.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def trim(self) -> None:
        """Drop the older half if there are more entries than the limit."""
        if len(self) > self.limit:
            for key in list(self)[: len(self) - self.limit // 2]:
                del self[key]


class RowCache(BoundedCache[K, tuple[Any, ...]], Generic[K, R]):
    """A cache of named tuples of one kind, which it keeps as plain tuples.

    The garbage collector stops visiting a plain tuple of numbers and text, but never an instance of
    a subclass. So a full collection takes less than half of the time.
    """

    def __init__(self, limit: int, kind: type[R]) -> None:
        super().__init__(limit)
        self._as_row: Callable[[tuple[Any, ...]], R] = partial(tuple.__new__, kind)

    def row(self, key: K) -> R | None:
        values = self.get(key)
        return None if values is None else self._as_row(values)

    def keep(self, key: K, row: R) -> None:
        self[key] = tuple(row)

    def keep_all(self, rows: Mapping[K, R]) -> None:
        self.update(zip(rows, map(tuple, rows.values()), strict=True))

    def take(self, key: K) -> R | None:
        """Remove the row and return it; return None if it is not cached."""
        values = self.pop(key, None)
        return None if values is None else self._as_row(values)


class StateGroupCache(BoundedCache[int, Group]):
    """State groups, also bounded by the delta entries in memory.

    A delta row that several groups share counts once.
    """

    def __init__(self, limit: int, entries_max: int) -> None:
        super().__init__(limit)
        self.entries_max = entries_max
        self.clear()

    def clear(self) -> None:
        super().clear()
        self.entries: int = 0
        self._rows: dict[int, Row] = {}  # by identity

    def keep(self, groups: Mapping[int, Group]) -> None:
        for state_group, group in groups.items():
            self[state_group] = group
            for row in group.steps:
                if id(row) not in self._rows:
                    self._rows[id(row)] = row
                    self.entries += len(row.delta)

    def drop(self, state_groups: Iterable[int]) -> None:
        dropped = self.keys() & set(state_groups)
        if dropped:
            kept = {
                state_group: group
                for state_group, group in self.items()
                if state_group not in dropped
            }
            self.clear()
            self.keep(kept)

    def trim(self) -> None:
        """Drop older groups, down to half of each limit. The newest group always stays."""
        if len(self) <= self.limit and self.entries <= self.entries_max:
            return
        newest = list(reversed(self.items()))
        self.clear()
        kept: dict[int, Group] = {}
        for state_group, group in newest[: max(1, self.limit // 2)]:
            self.keep({state_group: group})
            if kept and self.entries > self.entries_max // 2:
                break
            kept[state_group] = group
        self.clear()
        self.keep(dict(reversed(kept.items())))


class ResolutionRecordCache(BoundedCache[int, list[ResolutionRecord]]):
    """Records of resolutions by room, bounded by their number of events."""

    def trim(self) -> None:
        """Drop the records of the rooms that resolved least recently."""
        left = sum(len(record.full) for records in self.values() for record in records)
        for room_nid in list(self):
            if left <= self.limit:
                return
            left -= sum(len(record.full) for record in self.pop(room_nid))


class WriterCaches:
    """Caches of committed rows of one process.

    Every value may be dropped at any time between batches.
    """

    def __init__(
        self, *, events: int, groups: int, state_entries: int, rooms: int, names: int
    ) -> None:
        self.names: InternedNames = InternedNames(names)
        self.rooms: BoundedCache[str, RoomRow] = BoundedCache(rooms)
        self.rows: RowCache[str, EventRow] = RowCache(events, EventRow)
        self.row_ids: BoundedCache[int, str] = BoundedCache(events)
        self.missing: BoundedCache[str, MissingRow] = BoundedCache(events)
        self.events: BoundedCache[int, Event] = BoundedCache(events)
        self.groups: StateGroupCache = StateGroupCache(groups, state_entries)
        self.visibility: RowCache[tuple[int, int], VisibilityRow] = RowCache(events, VisibilityRow)
        self.audiences: RowCache[tuple[int, int], AudienceRow] = RowCache(events, AudienceRow)
        self.merged: BoundedCache[frozenset[int], int] = BoundedCache(groups)
        self.counts: BoundedCache[int, Map[int, Counts]] = BoundedCache(groups)
        """Known counts of users, by state group and principal."""
        self.places: RowCache[int, ChainPosition] = RowCache(events, ChainPosition)
        self.chains: BoundedCache[int, tuple[int, ...]] = BoundedCache(events)
        """Chains of the auth graph, as `Chain.numbers` returns them."""
        self.closures: BoundedCache[int, Closure] = BoundedCache(events)
        self.allowed: BoundedCache[CheckedLike, AuthorisedBefore] = BoundedCache(events)
        self.transactions: BoundedCache[TransactionKey, KnownTransaction] = BoundedCache(events)
        """Events of this process, by the request of a client that made them."""
        self.devices: BoundedCache[tuple[UserId, str], None] = BoundedCache(events)
        """Users and their devices that have sent such requests to this process."""
        self.records: ResolutionRecordCache = ResolutionRecordCache(RECORDED_EVENTS_MAX)
        self.knows_dictionary = False
        """Whether the next one is known. It is looked up again after each new dictionary."""
        self.dictionary: Dictionary | None = None
        """The dictionary of new events. None: they are stored as the bytes themselves."""
        self.resolutions: Distribution = Distribution()
        """Seconds of processor time per state resolution, without loading."""
        self._bounded = [cache for cache in vars(self).values() if isinstance(cache, BoundedCache)]

    def sizes(self) -> dict[str, int]:
        """Return the number of entries of each cache."""
        return {
            name: len(cache)
            for name, cache in vars(self).items()
            if isinstance(cache, BoundedCache)
        }

    def add_row(self, row: EventRow) -> None:
        """Cache the row of an event by id and by nid."""
        self.rows.keep(row.event_id, row)
        self.row_ids[row.event_nid] = row.event_id

    def trim(self) -> None:
        """Trim each cache to its limit.

        All cached rows of a room are guarded by the version in its `RoomRow`. If only that row were
        dropped, it would be read again with the current version. Older rows of that room would then
        pass the version check, so all caches are cleared instead.
        """
        if len(self.rooms) > self.rooms.limit:
            self._clear()
        for cache in self._bounded:
            if len(cache) > cache.limit:
                cache.trim()
        self.groups.trim()

    def remove(self, removed: Removed) -> None:
        """Drop the cached rows that a deletion made invalid.

        A cached room row stays valid if this is the only deletion that it has missed.
        """
        self.records.clear()
        if removed.kind == "state_groups":
            self._remove_groups(set(map(int, removed.ids)))
        for event_id in removed.event_ids:
            self._remove_event(event_id)
        for (
            event_nid
        ) in removed.event_nids:  # remaining events do not reach these: their closures stay
            self.places.pop(event_nid, None)
            self.closures.pop(event_nid, None)
        if removed.kind == "held":
            self.allowed.clear()
        room = self.rooms.get(removed.room_id)
        if room is not None and room.removals + 1 == removed.number:
            self.rooms[removed.room_id] = room._replace(removals=removed.number)

    def _remove_groups(self, state_groups: set[int]) -> None:
        self.groups.drop(state_groups)
        for states in [
            states
            for states, state_group in self.merged.items()
            if state_group in state_groups or not state_groups.isdisjoint(states)
        ]:
            del self.merged[states]

    def _remove_event(self, event_id: str) -> None:
        self.missing.pop(event_id, None)
        row = self.rows.take(event_id)
        if row is not None:
            self.row_ids.pop(row.event_nid, None)
            self.events.pop(row.event_nid, None)
            self.places.pop(row.event_nid, None)

    def forget(self) -> None:
        """Drop everything, after a refused plan: any cached row may be the reason."""
        self._clear()
        self.names.forget()

    def _clear(self) -> None:
        for cache in self._bounded:
            cache.clear()


# --------------------------------------------------------------------------------------------------
# Numbers from the sequences of the schema, taken a block at a time.

BLOCK_LENGTHS: Final = {  # the increments of the sequences in the schema
    "event_nids": 1000,
    "state_group_nids": 1000,
    "state_key_nids": 100,
    "type_nids": 10,
    "principal_nids": 100,
    "room_nids": 10,
}


class NidBlocks:
    """Numbers reserved from the sequences, one block at a time.

    Unused numbers of a process are lost, which is harmless.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, deque[int]] = {name: deque() for name in BLOCK_LENGTHS}

    def put(self, sequence: str, first: int) -> None:
        self._numbers[sequence].extend(range(first, first + BLOCK_LENGTHS[sequence]))

    def left(self, sequence: str) -> int:
        """Return how many numbers are reserved."""
        return len(self._numbers[sequence])

    def take(self, sequence: str) -> int:
        """Return the next number. Raise `MissingData` if none is reserved."""
        try:
            return self._numbers[sequence].popleft()
        except IndexError:
            raise MissingData("nids", (sequence,)) from None
