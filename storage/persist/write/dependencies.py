"""The rows that a write depends on, and that a purge may delete in the meantime.

A purge locks a room, and leaves `rooms.write_version` as it is. Most plans in flight depend on
forward extremities, which a purge never deletes, so they need not fail. The purge raises
`rooms.removals` instead. A write that was planned on an older number checks its dependencies
(`dependencies_purged` in schema.sql), and fails if one is gone.

So a purge may delete only what is listed here, or what the version protects. To delete anything
else, lock the room by `storage.persist.room_lock.lock_room`.

    in the timeline    parents; events that the write changes; the targets of redactions, and
                       redactions that waited; the children of missing events
    stored             auth events; the entries of new states; outliers that arrive in the timeline
    state groups       of events, of the room, and on the paths of new ones
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

from storage.database.names import TYPE_MEMBER, TYPE_REDACTION
from storage.database.placeholders import InputRows
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow
from storage.streams.caches import CURRENT_STATE

DEPENDENCIES: Final = InputRows.own(
    "dependencies", timeline_nids="bigint", stored_nids="bigint", state_groups="bigint"
)


class Dependencies(NamedTuple):
    """Nids of events that must be in the timeline, and of stored events; state groups."""

    timeline_nids: list[int]
    stored_nids: list[int]
    state_groups: list[int]


def dependencies_of(change_set: ChangeSet) -> Dependencies:
    """Return the dependencies of a change set, without its own rows and what no purge deletes."""
    rows = [new.row for new in change_set.events.new_events.values()]
    changed = change_set.events.changed_events.values()
    placed = change_set.events.placed.keys() - change_set.events.readmitted.keys()
    own = change_set.events.new_events.keys() | placed
    gaps = [*change_set.events.new_missing.values(), *change_set.events.deleted_missing.values()]
    waited_for = {gap.event_nid for gap in gaps}
    extremities = chain.from_iterable(
        room.row.forward_extremities for room in change_set.rooms.room_changes.values()
    )
    parents = _together(row.prev_events for row in chain(rows, changed)).difference(
        waited_for, extremities
    )
    standing = parents.union(
        change_set.events.changed_events,
        change_set.events.deleted_waiting,
        *(gap.child_nids for gap in gaps),
        _targets(change_set, rows),
    )
    referenced = _together(row.auth_events for row in rows).union(
        _entries(change_set), change_set.events.changed_events, _authorised_by(change_set)
    )
    return Dependencies(
        list(standing - own),
        list(referenced - change_set.events.new_events.keys()),
        list(_groups(change_set, [*rows, *changed])),
    )


def _together(lists: Iterable[tuple[int, ...]]) -> set[int]:
    return set[int]().union(*set(lists))


def _authorised_by(change_set: ChangeSet) -> set[int]:
    return _together(
        change_set.events.row_of(nid).auth_events for nid in change_set.events.authorised
    )


def _targets(change_set: ChangeSet, rows: Sequence[EventRow]) -> set[int]:
    """Return the targets of new redactions.

    A redaction without effect, because an earlier one applies, would wait for its target if that
    went.
    """
    redacted = (
        change_set.events.parsed[row.event_nid].redacts
        for row in rows
        if row.type_nid == TYPE_REDACTION and not row.outlier
    )
    targets = (
        change_set.events.rows.get(event_id) or change_set.caches.rows.row(event_id)
        for event_id in redacted
        if event_id is not None
    )
    return {target.event_nid for target in targets if target is not None and not target.outlier}


def _entries(change_set: ChangeSet) -> set[int]:
    """Return the events that new state groups add to the groups before them."""
    return {
        nid
        for group in change_set.states.new_groups.values()
        for nid in group.steps[-1].delta.values()
        if nid
    }


def _groups(change_set: ChangeSet, rows: Sequence[EventRow]) -> set[int]:
    groups = {row.state_group_before for row in rows} | {row.state_group_after for row in rows}
    groups |= {room.current for room in change_set.rooms.room_changes.values() if room.changed}
    groups |= {
        step.state_group for group in change_set.states.new_groups.values() for step in group.steps
    }
    return {group for group in groups if group is not None} - change_set.states.new_groups.keys()


# --------------------------------------------------------------------------------------------------
# Cache entries that other processes must drop after a write.
#
# The facts of the stream "events" imply most of them. These are the others.


class Invalidation(NamedTuple):
    """A row of the stream "caches": the name of a cache, and a key."""

    cache_name: str
    keys: tuple[str, ...]


def invalidations(change_set: ChangeSet) -> list[Invalidation]:
    """Return the rows of the stream "caches".

    There is one for each room whose current state changed by more than the events themselves say,
    and one for each event whose row changed.
    """
    changed = [
        Invalidation("events", (row.event_id,))
        for nid, row in change_set.events.changed_events.items()
        if nid not in change_set.events.placed
    ]
    return [*_states(change_set), *_overruled(change_set), *changed]


def _overruled(change_set: ChangeSet) -> list[Invalidation]:
    """Return local users whose out-of-band membership ends without a change of the state."""
    published = {(delta.room_nid, delta.state_key_nid) for delta in change_set.states.deltas}
    room_ids = {
        room.row.room_nid: room.row.room_id for room in change_set.rooms.room_changes.values()
    }
    return [
        Invalidation(CURRENT_STATE, (room_ids[nid], user))
        for nid, key, user in change_set.members.overruled
        if (nid, key) not in published
    ]


def _states(change_set: ChangeSet) -> list[Invalidation]:
    users: dict[int, list[str]] = {}
    for delta in change_set.states.deltas:
        cause = change_set.events.row_of(delta.cause_nid)
        if delta.event_nid != delta.cause_nid or cause.state_key_nid != delta.state_key_nid:
            type_nid, state_key = change_set.names.state_key_name(delta.state_key_nid)
            users.setdefault(delta.room_nid, []).extend(
                [state_key] if type_nid == TYPE_MEMBER else []
            )
    room_ids = {
        room.row.room_nid: room.row.room_id for room in change_set.rooms.room_changes.values()
    }
    return [
        Invalidation(CURRENT_STATE, (room_ids[room_nid], *dict.fromkeys(names)))
        for room_nid, names in users.items()
    ]
