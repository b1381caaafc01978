"""A state group as a row of its table.

The row is narrow, because there is one for every state change. Nearly every row has one entry, on
the low level of its path, and takes 84 bytes:

* its path in bytes (`storage.state.paths`);
* its entry as a key and an event, where arrays of one element take 54 bytes;
* no digest: it follows from that of the last row before the low level. Only a state that a later
  merge may look for has one (`keeps_digest`).

Other rows have arrays.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from storage.state import delta_levels
from storage.state.groups import Group, keeps_digest
from storage.state.paths import path_columns, path_of


class GroupRow(NamedTuple):
    """A row of `state_groups`."""

    state_group: int
    digest: int | None
    audience: int
    room_nid: int
    entry_count: int
    runs: int
    back: list[int] | None
    key_nids: list[int] | None
    event_nids: list[int] | None
    member_key_nids: list[int] | None
    member_event_nids: list[int] | None
    key_nid: int | None = None
    member_key_nid: int | None = None
    event_nid: int | None = None
    path: bytes | None = None

    def path_in(self, rows: "Mapping[int, GroupRow]") -> list[int]:
        """Return the groups to fold: root first, this group last (`storage.state.paths`)."""
        return path_of(self.state_group, self, rows)


GROUP_COLUMNS: Final = GroupRow._fields


def row_of(group: Group, is_member: Callable[[int], bool]) -> GroupRow:
    """Build the row of a group.

    ``is_member`` returns for a state key nid whether its type is m.room.member.
    """
    path = [step.state_group for step in group.steps]
    columns = path_columns(path, group.runs[-1])
    row = GroupRow(
        group.state_group,
        group.digest if columns.path is None or keeps_digest(group) else None,
        group.audience,
        group.room_nid,
        len(group.entries),
        delta_levels.pack(group.runs),
        columns.back,
        None,
        None,
        None,
        None,
        path=columns.path,
    )
    delta = group.steps[-1].delta
    if len(delta) == 1:
        [(key, event)] = delta.items()
        if is_member(key):
            return row._replace(member_key_nid=key, event_nid=event)
        return row._replace(key_nid=key, event_nid=event)
    # sorted, which makes reading thousands of rows faster
    entries = sorted(delta.items())
    members = {key: event for key, event in entries if is_member(key)}
    others = {key: event for key, event in entries if key not in members}
    return row._replace(
        key_nids=list(others) or None,
        event_nids=list(others.values()) or None,
        member_key_nids=list(members) or None,
        member_event_nids=list(members.values()) or None,
    )


def entries_of(row: GroupRow) -> dict[int, int]:
    if row.event_nid is not None:
        return {row.key_nid or row.member_key_nid or 0: row.event_nid}
    entries = dict(zip(row.key_nids or (), row.event_nids or (), strict=True))
    entries.update(zip(row.member_key_nids or (), row.member_event_nids or (), strict=True))
    return entries
