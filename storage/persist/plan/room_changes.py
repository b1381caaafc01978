"""Write what an accepted event changes of its room: extremities, current state, memberships."""

from collections.abc import Iterable

from storage.database.names import MEMBERSHIPS, TYPE_MEMBER
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.row_changes import MembershipChange, RoomChanges, StateDelta
from storage.persist.model.rows import EventRow
from storage.persist.plan.out_of_band import OverruledMembership
from storage.persist.plan.topology import ExtremityChange
from storage.state.groups import Group, changed_keys

LEAVE = MEMBERSHIPS["leave"]


def store_membership(change_set: ChangeSet, one: MembershipChange) -> None:
    """Set a local user's membership; stripped state that came out of band goes."""
    key = one.principal_nid, one.room_nid
    change_set.members.stripped.pop(key, None)
    earlier = change_set.members.memberships.get(key)
    entered = one.membership > LEAVE or (earlier is not None and earlier.entered)
    change_set.members.memberships[key] = one._replace(entered=entered)


def store_extremities(change_set: ChangeSet, room: RoomChanges, ends: ExtremityChange) -> None:
    """Set the forward extremities, and mark what is superseded now: gaps and refused events."""
    room.extremities = ends.extremities
    change_set.rooms.dropped.update(dict.fromkeys(ends.dropped, room.row.room_nid))
    for gap in ends.superseded:
        change_set.events.add_missing(gap)
    for row in ends.refused:
        now = change_set.events.row_of(row.event_nid)
        change_set.events.change_event(now._replace(superseded=True))


def store_overruled(
    change_set: ChangeSet, row: EventRow, overruled: Iterable[OverruledMembership]
) -> None:
    """Replace out-of-band memberships by those of the current state. ``row`` is the cause."""
    for one in overruled:
        store_membership(change_set, one.membership)
        change_set.members.overruled.append((row.room_nid, one.state_key_nid, one.user))


def store_current(
    change_set: ChangeSet, room: RoomChanges, cause_nid: int, old: Group | None, new: Group
) -> None:
    """Add the differences of the current state, and with them local users' memberships."""
    room_nid = room.row.room_nid
    for key in sorted(set(new.entries) if old is None else changed_keys(old, new)):
        before = None if old is None else old.entries.get(key)
        nid = new.entries.get(key)
        membership = None if nid is None else change_set.events.row_of(nid).membership
        change_set.states.change_current(
            StateDelta(room_nid, cause_nid, key, nid, before), membership
        )
        type_nid, user = change_set.names.state_key_name(key)
        if type_nid == TYPE_MEMBER and user.endswith(":" + change_set.server_name):
            principal = change_set.names.principal_nid(user)
            store_membership(
                change_set,
                MembershipChange(principal, room_nid, membership or 0, nid or 0, cause_nid),
            )
