"""What one process remembers of committed rows."""

from collections.abc import Iterable, Mapping

from immutables import Map

from storage.database.names import InternedNames
from storage.event import Event
from storage.graph.chains import Chain, ChainPosition, Closure
from storage.observability.counters import Distribution
from storage.persist.model.bounded import BoundedCache
from storage.persist.model.resolution_records import RECORDED_EVENTS_MAX, ResolutionRecord
from storage.persist.model.rows import (
    AudienceRow,
    AuthorisedBefore,
    Counts,
    EventRow,
    MissingRow,
    RoomRow,
    VisibilityRow,
)
from storage.state.groups import DeltaRow as Row
from storage.state.groups import Group
from storage.streams.caches import Removed


class StateGroupCache(BoundedCache[int, Group]):
    """State groups, bounded by the entries in memory, too: rows of paths that several of them share count once."""

    def __init__(self, limit: int, entries_max: int) -> None:
        super().__init__(limit)
        self.entries_max = entries_max
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self.entries = 0
        self._rows: dict[int, Row] = {}  # by identity

    def keep(self, groups: Mapping[int, Group]) -> None:
        """Remember these groups."""
        for state_group, group in groups.items():
            self[state_group] = group
            for row in group.steps:
                if id(row) not in self._rows:
                    self._rows[id(row)] = row
                    self.entries += len(row.delta)

    def drop(self, state_groups: Iterable[int]) -> None:
        """Forget these groups."""
        gone = self.keys() & set(state_groups)
        if gone:
            kept = {
                state_group: group for state_group, group in self.items() if state_group not in gone
            }
            self.clear()
            self.keep(kept)

    def trim(self) -> None:
        """Forget the older ones, down to half of what is allowed, but not the last."""
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
    """Records of resolutions by room, bounded by their events."""

    def trim(self) -> None:
        """Forget those of the rooms that resolved least recently."""
        left = sum(len(record.full) for records in self.values() for record in records)
        for room_nid in list(self):
            if left <= self.limit:
                return
            left -= sum(len(record.full) for record in self.pop(room_nid))


class WriterCaches:
    """What one process remembers of committed rows.

    Every value may be forgotten at any time between batches.
    """

    def __init__(
        self, *, events: int, groups: int, state_entries: int, rooms: int, names: int
    ) -> None:
        self.names = InternedNames(names)
        self.rooms: BoundedCache[str, RoomRow] = BoundedCache(rooms)
        self.rows: BoundedCache[str, EventRow] = BoundedCache(events)
        self.row_ids: BoundedCache[int, str] = BoundedCache(events)
        self.missing: BoundedCache[str, MissingRow] = BoundedCache(events)
        self.events: BoundedCache[int, Event] = BoundedCache(events)
        self.groups = StateGroupCache(groups, state_entries)
        self.visibility: BoundedCache[tuple[int, int], VisibilityRow] = BoundedCache(events)
        self.audiences: BoundedCache[tuple[int, int], AudienceRow] = BoundedCache(events)
        self.merged: BoundedCache[frozenset[int], int] = BoundedCache(groups)
        self.counts: BoundedCache[int, Map[int, Counts]] = BoundedCache(groups)
        """By state group and principal, the users of the latter, as far as they are known."""
        self.places: BoundedCache[int, ChainPosition] = BoundedCache(events)
        self.chains: BoundedCache[int, Chain] = BoundedCache(events)
        self.closures: BoundedCache[int, Closure] = BoundedCache(events)
        self.allowed: BoundedCache[tuple[object, ...], AuthorisedBefore] = BoundedCache(events)
        self.records = ResolutionRecordCache(RECORDED_EVENTS_MAX)
        self.has_past = False
        """`past_visibility` is in use. Once it is, it is for good."""
        self.resolutions = Distribution()
        """Seconds of processor time that state resolutions took, without the loading."""
        self._bounded = [cache for cache in vars(self).values() if isinstance(cache, BoundedCache)]

    def sizes(self) -> dict[str, int]:
        """How many entries each cache has."""
        return {
            name: len(cache)
            for name, cache in vars(self).items()
            if isinstance(cache, BoundedCache)
        }

    def add_row(self, row: EventRow) -> None:
        """Remember an event's row under its id and its nid."""
        self.rows[row.event_id] = row
        self.row_ids[row.event_nid] = row.event_id

    def trim(self) -> None:
        """Keep within the limits.

        What is cached of a room is guarded by the version in its row: a row that were forgotten
        alone would be read again with the version of today, and guard the stale rest.
        """
        if len(self.rooms) > self.rooms.limit:
            self._clear()
        for cache in self._bounded:
            if len(cache) > cache.limit:
                cache.trim()
        self.groups.trim()

    def remove(self, removed: Removed) -> None:
        """Forget what was thrown away.

        A room's row is good for what comes next if this is all that it does not know of.
        """
        self.records.clear()
        if removed.kind == "state_groups":
            self._remove_groups(set(map(int, removed.ids)))
        for event_id in removed.event_ids:
            self._remove_event(event_id)
        for event_nid in removed.event_nids:  # what is left reaches none of them: its closures stay
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
        row = self.rows.pop(event_id, None)
        if row is not None:
            self.row_ids.pop(row.event_nid, None)
            self.events.pop(row.event_nid, None)
            self.places.pop(row.event_nid, None)

    def forget(self) -> None:
        """Forget everything: after a refused plan, whose reason may lie in any of the rows."""
        self._clear()
        self.names.forget()

    def _clear(self) -> None:
        for cache in self._bounded:
            cache.clear()
