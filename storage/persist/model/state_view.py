"""State groups, what resolutions left to remember, and changes of current states.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Hashable, Iterable, Mapping

from storage.ids import EventId
from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData
from storage.persist.model.nid_blocks import NidBlocks
from storage.persist.model.resolution_records import ResolutionRecord
from storage.persist.model.row_changes import PendingResolution, RoomChanges, StateDelta
from storage.persist.model.rows import (
    Counts,
)
from storage.persistent_map import Map
from storage.state.groups import Group, derive, keeps_digest
from storage.visibility.audience_numbering import NOTHING


class StateView:
    """State groups, what resolutions left to remember, and changes of current states."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.groups: dict[int, Group] = {}
        self.counts: dict[int, Map[int, Counts]] = {}
        self.records: dict[int, list[ResolutionRecord]] = {}
        self.new_groups: dict[int, Group] = {}
        # Kept for the event being planned, so that planning it again is cheap. An event may be
        # left without a plan, so the keys have all that the values depend on.
        self.derived: dict[Hashable, Group] = {}
        self.empty_nids: dict[int, int] = {}
        self.complete_states: set[tuple[int, tuple[EventId, ...]]] = set()  # by room
        self.nearest: dict[Hashable, tuple[Group, Mapping[int, int]]] = {}
        self.growths: dict[tuple[int | None, int], Mapping[int, Counts]] = {}
        self.resolving: dict[frozenset[int], PendingResolution] = {}  # of the event being planned
        self.resolving_seconds: dict[str, float] = {}
        """Seconds of processor time that state resolutions took, by room."""
        self.current_changes: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.absent_keys: set[tuple[int, int]] = set()
        """Those of `current_changes` that had no entry before this change set."""
        self.deltas: list[StateDelta] = []

    def group(self, state_group: int) -> Group:
        group = self.groups.get(state_group) or self.caches.groups.get(state_group)
        if group is None:
            raise MissingData("groups", (state_group,))
        return group

    def counts_of(self, state_group: int) -> "Map[int, Counts]":
        """Return the known counts of users in a state, by principal."""
        return self.counts.get(state_group) or self.caches.counts.get(state_group) or Map()

    def records_of(self, room_nid: int) -> list[ResolutionRecord]:
        """Return the recorded resolutions of a room, and move them from the caches to this view."""
        known = self.records.get(room_nid)
        if known is None:
            known = self.records[room_nid] = self.caches.records.pop(room_nid, [])
        return known

    def add_groups(self, room: RoomChanges, groups: Iterable[Group]) -> None:
        for group in groups:
            self.groups[group.state_group] = self.new_groups[group.state_group] = group
            if keeps_digest(group):
                room.group_digests.setdefault(group.digest, []).append(group.state_group)

    def change_current(self, delta: StateDelta, membership: int | None) -> None:
        """Change one key of a room's current state. ``membership`` is that of the new entry."""
        key = delta.room_nid, delta.state_key_nid
        if delta.prev_event_nid is None and key not in self.current_changes:
            self.absent_keys.add(key)
        self.current_changes[key] = (delta.event_nid or 0, membership)
        self.deltas.append(delta)

    def derive(self, base: Group, change: Mapping[int, int]) -> Group:
        """Return the group of the state that results from this change of ``base``.

        It has a nid and no audience. Repeated calls for one event return the same group.
        """
        key = base.state_group, frozenset(change.items())
        group = self.derived.get(key)
        if group is None:
            nid = self.blocks.take("state_group_nids")
            group = self.derived[key] = derive(base, change, nid, NOTHING)
        return group

    def empty_nid(self, room_nid: int) -> int:
        """Return the nid reserved for the empty state group of a new room."""
        nid = self.empty_nids.get(room_nid)
        if nid is None:
            nid = self.empty_nids[room_nid] = self.blocks.take("state_group_nids")
        return nid

    def forget_event(self) -> None:
        """Forget the intermediate results of the event whose plan is complete now."""
        self.derived.clear()
        self.empty_nids.clear()
        self.complete_states.clear()
        self.nearest.clear()
        self.growths.clear()
        self.resolving.clear()
