"""The changes of one event, collected while it is planned.

They reach the change set only when the decision is complete.
"""

from collections.abc import Iterable, Mapping, Sequence

from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import (
    AudienceRow,
    PastRow,
    PrincipalStanding,
    RoomChanges,
    VisibilityRow,
)
from storage.state.groups import Group
from storage.visibility import multirange
from storage.visibility.multirange import Range, Ranges


class EventChanges:
    """Scratch space over the change set.

    `commit` moves its contents into the change set and cannot fail.
    """

    def __init__(self, change_set: ChangeSet, room: RoomChanges) -> None:
        self.change_set = change_set
        self.room = room
        self.groups: dict[int, Group] = {}
        self.visibility: dict[int, VisibilityRow] = {}
        self.past: dict[tuple[int, int], PastRow] = {}  # by principal and lowest audience
        self.audiences: dict[int, AudienceRow] = {}
        self.merged: dict[frozenset[int], int] = {}
        self.next_audience: int = room.next_audience
        self.main: int | None = room.current
        self.current_audience: int = room.audience
        self.out_of_range: Ranges = room.out_of_range
        self.order = 0  # topological position of the event, once known

    @property
    def room_nid(self) -> int:
        return self.room.row.room_nid

    def group(self, state_group: int) -> Group:
        return self.groups.get(state_group) or self.change_set.states.group(state_group)

    def main_group(self) -> Group | None:
        """Return the group of the current audience, whose ranges have no end.

        None: the room has no state.
        """
        return None if self.main is None else self.group(self.main)

    def merged_before(self, groups: frozenset[int]) -> Group | None:
        """Return the resolution of these groups if it was computed before."""
        state_group = (
            self.merged.get(groups)
            or self.room.merged.get(groups)
            or self.change_set.caches.merged.get(groups)
        )
        return None if state_group is None else self.group(state_group)

    def visible(self, principal_nid: int) -> VisibilityRow:
        return self.visibility.get(principal_nid) or self.change_set.visibility.visible(
            self.room_nid, principal_nid
        )

    def ensure_visible(self, principal_nids: Iterable[int]) -> None:
        """Raise `MissingData` unless the rows of these principals are loaded."""
        self.change_set.visibility.ensure_visible(
            self.room_nid, (nid for nid in principal_nids if nid not in self.visibility)
        )

    def audience(self, number: int) -> AudienceRow:
        return self.audiences.get(number) or self.change_set.visibility.audience(
            self.room_nid, number
        )

    def topological_range(self, low: int, high: int | None) -> Range:
        """Return the topological range of the audiences in ``[low, high)``.

        It equals disjoint_topological_ranges in the schema.
        """
        closed = None if high is None else self.closed(high)
        return self.opened(
            low
        ) - multirange.SLACK, None if closed is None else closed + multirange.SLACK + 1

    def opened(self, number: int) -> int:
        """Return the highest topological position when the block of an audience was opened."""
        for block in range(multirange.main(number), 0, -multirange.UNIT[0]):
            opened = self.audience(block).opened_topological
            if opened is not None:
                return opened
        return 0

    def closed(self, number: int) -> int | None:
        """Return the highest topological position when all audiences below a number had ended.

        None: one of them has not ended.
        """
        for block in range(
            multirange.main(number - 1) + multirange.UNIT[0],
            self.current_audience + 1,
            multirange.UNIT[0],
        ):
            opened = self.audience(block).opened_topological
            if opened is not None:
                return opened
        return None

    def add_group(self, group: Group) -> Group:
        self.groups[group.state_group] = group
        return group

    def standing(self, principal_nid: int, number: int) -> PrincipalStanding:
        """Return how a principal stands to an audience, however old."""
        row = self.visible(principal_nid)
        return (
            row.at(number) if row.tells_of(number) else self._past(principal_nid, number).at(number)
        )

    def set_visible(self, rows: Mapping[int, VisibilityRow]) -> None:
        """Set rows of principals. Excess older ranges move to rows of `past_visibility`."""
        for principal, row in rows.items():
            past_rows, kept = row.cut() if self.change_set.visibility.cuts(row) else ([], row)
            self.visibility[principal] = kept
            self._set_past(principal, past_rows)

    def set_standing(
        self, principal_nid: int, low: int, high: int | None, standing: PrincipalStanding
    ) -> None:
        """Set how a principal stands to the audiences in ``[low, high)``.

        They must be new and of one line, or of one block.
        """
        row = self.visible(principal_nid)
        if row.tells_of(low):
            self.set_visible({principal_nid: row.placed(low, high, standing)})
            return
        self._set_past(
            principal_nid, self._past(principal_nid, low).placed(low, high, standing).cut()
        )

    def _set_past(self, principal_nid: int, rows: Sequence[PastRow]) -> None:
        """Set `past_visibility` rows of a principal, and compute their topological ranges."""
        if not rows:
            return
        blocks = {multirange.main(low) for row in rows for low, _ in row.audiences}
        blocks |= {
            multirange.main(high - 1) + multirange.UNIT[0]
            for row in rows
            for _, high in row.audiences
            if high is not None
        }
        self.change_set.visibility.ensure_audiences(
            self.room_nid,
            (block for block in blocks - self.audiences.keys() if block <= self.current_audience),
        )
        for row in rows:
            topological_ranges = tuple(
                self.topological_range(low, high) for low, high in row.audiences
            )
            placed = row._replace(
                opened_topological=self.opened(row.first_audience),
                topological_ranges=multirange.union(topological_ranges),
            )
            self.past[principal_nid, row.first_audience] = placed

    def _past(self, principal_nid: int, number: int) -> PastRow:
        """Return the `past_visibility` row of a principal that covers an audience."""
        for (principal, _), row in self.past.items():
            if principal == principal_nid and row.tells_of(number):
                return row
        return self.change_set.visibility.past_row(self.room_nid, principal_nid, number)

    def commit(self) -> None:
        """Move all changes into the change set."""
        self.change_set.states.add_groups(self.room, self.groups.values())
        self.room.merged.update(self.merged)
        self.change_set.states.forget_event()
        for principal, visible in self.visibility.items():
            self.change_set.visibility.set_visibility((self.room_nid, principal), visible)
        for (principal, _), past in self.past.items():
            self.change_set.visibility.set_past((self.room_nid, principal), past)
        for number, row in self.audiences.items():
            self.change_set.visibility.set_audience((self.room_nid, number), row)
        self.room.next_audience = self.next_audience
        self.room.current = self.main
        self.room.audience = self.current_audience
        self.room.out_of_range = self.out_of_range
