"""Scratch space of one event: what deciding about it would change. It reaches the draft only when the decision is complete."""

from collections.abc import Iterable, Mapping

from storage.persist.draft import Draft, RoomDraft
from storage.persist.rows import AudienceRow, VisibilityRow
from storage.state.groups import Group


class Step:
    """Reads through to the draft; `commit` moves what it holds into the draft and cannot fail."""

    def __init__(self, draft: Draft, room: RoomDraft) -> None:
        self.draft = draft
        self.room = room
        self.groups: dict[int, Group] = {}
        self.visibility: dict[int, VisibilityRow] = {}
        self.audiences: dict[int, AudienceRow] = {}
        self.merged: dict[frozenset[int], int] = {}
        self.next_audience = room.next_audience
        self.main = room.current
        self.current_audience = room.audience
        self.strays = room.strays
        self.order = 0  # of the event, once it has a place

    @property
    def room_nid(self) -> int:
        """The room."""
        return self.room.row.room_nid

    def group(self, state_group: int) -> Group:
        """A state group, new or held."""
        return self.groups.get(state_group) or self.draft.group(state_group)

    def main_group(self) -> Group | None:
        """The group whose audience has the ranges without an end; None for a room without any state."""
        return None if self.main is None else self.group(self.main)

    def merged_before(self, groups: frozenset[int]) -> Group | None:
        """The resolution of these groups, if it was worked out before."""
        known = self.merged.get(groups) or self.room.merged.get(groups) or self.draft.caches.merged.get(groups)
        return None if known is None else self.group(known)

    def visible(self, principal_nid: int) -> VisibilityRow:
        """A principal's row."""
        return self.visibility.get(principal_nid) or self.draft.visible(self.room_nid, principal_nid)

    def ensure_visible(self, principal_nids: Iterable[int]) -> None:
        """Have the rows of these principals."""
        self.draft.ensure_visible(self.room_nid, (nid for nid in principal_nids if nid not in self.visibility))

    def audience(self, number: int) -> AudienceRow:
        """An audience's row."""
        return self.audiences.get(number) or self.draft.audience(self.room_nid, number)

    def add_group(self, group: Group) -> Group:
        """A new group."""
        self.groups[group.state_group] = group
        return group

    def set_visible(self, rows: Mapping[int, VisibilityRow]) -> None:
        """New rows of principals."""
        self.visibility.update(rows)

    def commit(self) -> None:
        """Into the draft."""
        self.draft.add_groups(self.room, self.groups.values())
        self.room.merged.update(self.merged)
        for principal, visible in self.visibility.items():
            self.draft.set_visibility((self.room_nid, principal), visible)
        for number, row in self.audiences.items():
            self.draft.set_audience((self.room_nid, number), row)
        self.room.next_audience = self.next_audience
        self.room.current = self.main
        self.room.audience = self.current_audience
        self.room.strays = self.strays
