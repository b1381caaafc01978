"""State groups, what resolutions left to remember, and changes of current states.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Hashable, Iterable, Mapping

from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData
from storage.persist.model.nid_blocks import NidBlocks
from storage.persist.model.resolution_records import ResolutionRecord
from storage.persist.model.row_changes import PendingResolution, RoomChanges, StateDelta
from storage.persist.model.rows import (
    Counts,
)
from storage.persistent_map import Map
from storage.state.groups import Group


class StateView:
    """State groups, what resolutions left to remember, and changes of current states."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.groups: dict[int, Group] = {}
        self.counts: dict[int, Map[int, Counts]] = {}
        self.records: dict[int, list[ResolutionRecord]] = {}
        self.new_groups: dict[int, Group] = {}
        self.reserved_groups: dict[Hashable, int] = {}  # of the event being planned
        self.resolving: dict[frozenset[int], PendingResolution] = {}  # of the event being planned
        self.resolving_seconds: dict[str, float] = {}
        """Seconds of processor time that state resolutions took, by room."""
        self.current_changes: dict[tuple[int, int], tuple[int, int | None]] = {}
        self.deltas: list[StateDelta] = []

    def group(self, state_group: int) -> Group:
        """Return a state group with its full state."""
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
        """Add new state groups."""
        for group in groups:
            self.groups[group.state_group] = self.new_groups[group.state_group] = group
            room.group_digests.setdefault(group.digest, []).append(group.state_group)

    def group_nid_for(self, base: Group, change: Mapping[int, int]) -> int:
        """Return the nid reserved for the state that results from this change of ``base``.

        Repeated calls for one event return the same nid.
        """
        key = base.state_group, frozenset(change.items())
        nid = self.reserved_groups.get(key)
        if nid is None:
            nid = self.reserved_groups[key] = self.blocks.take("state_group_nids")
        return nid
