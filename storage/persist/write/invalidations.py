"""Cache entries that other processes must drop after a write.

The facts of the stream "events" imply most of them. These are the others.
"""

from typing import NamedTuple

from storage.database.names import TYPE_MEMBER
from storage.persist.model.change_set import ChangeSet
from storage.streams.caches import CURRENT_STATE


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
    told = {(delta.room_nid, delta.state_key_nid) for delta in change_set.states.deltas}
    room_ids = {
        room.row.room_nid: room.row.room_id for room in change_set.rooms.room_changes.values()
    }
    return [
        Invalidation(CURRENT_STATE, (room_ids[nid], user))
        for nid, key, user in change_set.members.overruled
        if (nid, key) not in told
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
