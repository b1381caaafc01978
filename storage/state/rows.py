"""A state group as a row of its table.

The row is narrow, because there is one for every state change. The path is stored as differences to
the group's own number, which fit four bytes (`storage.state.groups.derive` ensures that). The runs
are one number, and arrays without entries are NULL. 62,088 groups of a room of 5,000 members take
19 MB in this form, and 26 MB with plain arrays.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from storage.state import delta_levels
from storage.state.groups import Group


class GroupRow(NamedTuple):
    """A row of `state_groups`."""

    state_group: int
    digest: int
    audience: int
    room_nid: int
    entry_count: int
    runs: int
    back: list[int]
    key_nids: list[int] | None
    event_nids: list[int] | None
    member_key_nids: list[int] | None
    member_event_nids: list[int] | None

    @property
    def path(self) -> list[int]:
        """Return the groups to fold: root first, this group last."""
        return [self.state_group - step for step in self.back]


GROUP_COLUMNS: Final = GroupRow._fields


def row_of(group: Group, is_member: Callable[[int], bool]) -> GroupRow:
    """Build the row of a group.

    ``is_member`` returns for a state key nid whether its type is m.room.member.
    """
    # sorted, which makes reading thousands of rows faster
    delta = sorted(group.steps[-1].delta.items())
    members = {key: event for key, event in delta if is_member(key)}
    others = {key: event for key, event in delta if key not in members}
    return GroupRow(
        group.state_group,
        group.digest,
        group.audience,
        group.room_nid,
        len(group.entries),
        delta_levels.pack(group.runs),
        [group.state_group - step.state_group for step in group.steps],
        list(others) or None,
        list(others.values()) or None,
        list(members) or None,
        list(members.values()) or None,
    )


def entries_of(row: GroupRow) -> dict[int, int]:
    """Return the entries of one row: members and the others."""
    entries = dict(zip(row.key_nids or (), row.event_nids or (), strict=True))
    entries.update(zip(row.member_key_nids or (), row.member_event_nids or (), strict=True))
    return entries
