"""Caches of committed rows, one set per process."""

from collections.abc import Iterable, Mapping

from storage.codec import Dictionary
from storage.database.names import InternedNames
from storage.event import Event
from storage.graph.chains import ChainPosition, Closure
from storage.ids import UserId
from storage.observability.counters import Distribution
from storage.persist.model.bounded_cache import BoundedCache, RowCache
from storage.persist.model.resolution_records import RECORDED_EVENTS_MAX, ResolutionRecord
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
from storage.persist.model.transaction import KnownTransaction, TransactionKey
from storage.persistent_map import Map
from storage.state.groups import DeltaRow as Row
from storage.state.groups import Group
from storage.streams.caches import Removed


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
        gone = self.keys() & set(state_groups)
        if gone:
            kept = {
                state_group: group for state_group, group in self.items() if state_group not in gone
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

    def _remove_groups(self, gone: set[int]) -> None:
        self.groups.drop(gone)
        for states in [
            states
            for states, state_group in self.merged.items()
            if state_group in gone or not gone.isdisjoint(states)
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
