"""Memberships that come out of band: of a local user in a room that this server is not in.

An invite over federation, the answer to a knock, the user's own leave after them, and the other
side's: a retraction, a denial or a ban. This server holds neither the room's state nor the auth
events, so the auth rules cannot be asked. What can be checked is checked here; a signature shows
who sent the event. The event is an outlier without auth events, by which `EventRow.is_out_of_band`
knows it, until it comes again with them: then it is authorised. When the server joins the room, its
current state overrules what came out of band (`overruled`).

Source: server-server API, "Inviting to a room" and "Knocking upon a room".
"""

from collections.abc import Iterator
from typing import NamedTuple

from storage.database.names import INVITE, JOIN, MEMBERSHIPS, membership_code
from storage.event import Event
from storage.ids import server_name_of
from storage.persist.model.change_set import ChangeSet, MembershipChange, RoomChanges
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow
from storage.state.groups import Group

MEMBER = "m.room.member"
KNOCK = MEMBERSHIPS["knock"]
OUT = (MEMBERSHIPS["leave"], MEMBERSHIPS["ban"])


class StoredMembership(NamedTuple):
    """A local user's membership in a room, and the number of its event; 0 for none."""

    membership: int
    event_nid: int


def refusal(change_set: ChangeSet, room: RoomChanges, event: Event) -> str | None:
    """Return why an event cannot be stored out of band, or None."""
    if event.type != MEMBER or event.state_key is None:
        return "out of band come memberships only"
    if server_name_of(event.state_key) != change_set.server_name or not event.state_key.startswith(
        "@"
    ):
        return f"{event.state_key} is not a user of {change_set.server_name}"
    if is_resident(change_set, room):
        return f"{change_set.server_name} is in the room: the event is checked by the room's state"
    return _refused_membership(change_set, room, event)


def is_resident(change_set: ChangeSet, room: RoomChanges) -> bool:
    """Return whether a local user is joined to the room, by its current state."""
    return (
        room.current is not None
        and change_set.visible(
            room.row.room_nid, change_set.principal_nid(change_set.server_name)
        ).joined_count
        > 0
    )


def _refused_membership(change_set: ChangeSet, room: RoomChanges, event: Event) -> str | None:
    membership, is_own = (
        membership_code(event.content.get("membership")),
        event.sender == event.state_key,
    )
    if membership == KNOCK:
        allowed = is_own and event.room_version.knock
        return (
            None
            if allowed
            else f"no knock of {event.state_key} in version {event.room_version.identifier}"
        )
    if membership == INVITE:
        return f"{event.sender} invites themselves" if is_own else None
    if membership in OUT:
        return _refused_end(change_set, room, event, is_own=is_own)
    return f"membership {event.content.get('membership')!r}: a join needs the state before it (state_before)"


def _refused_end(
    change_set: ChangeSet, room: RoomChanges, event: Event, *, is_own: bool
) -> str | None:
    """A leave or ban ends an invite or a knock.

    Of others, it is the inviter's, or names what it ends: only servers in the room know that.
    """
    held = held_by(change_set, room, event.state_key or "")
    if held.membership not in (INVITE, KNOCK):
        return f"{event.state_key} is neither invited nor knocking"
    if is_own:
        return None
    row = change_set.row_of(held.event_nid)
    ended = change_set.events_of((row.event_nid,))[row.event_nid]
    if event.sender == ended.sender or ended.event_id in event.auth_event_ids:
        return None
    return (
        f"{event.sender} did not send {ended.event_id} and does not name it among the auth events"
    )


def held_by(change_set: ChangeSet, room: RoomChanges, user: str) -> StoredMembership:
    """Return a local user's membership in the room."""
    principal = change_set.find_principal(user)
    new = None if principal is None else change_set.memberships.get((principal, room.row.room_nid))
    if new is not None:
        return StoredMembership(new.membership, new.event_nid)
    if principal is None or principal in change_set.newcomers or not room.row.write_version:
        return StoredMembership(0, 0)
    found = change_set.answer(("membership", room.row.room_nid, principal))
    return StoredMembership(0, 0) if found is None else StoredMembership(*found)


def brings_back(change_set: ChangeSet, room: RoomChanges, event: Event) -> bool:
    """Return whether an event is the join of a local user where this server is not in the room any more: it has not followed the state since."""
    if event.type != MEMBER or membership_code(event.content.get("membership")) != JOIN:
        return False
    return server_name_of(event.state_key or "") == change_set.server_name and not is_resident(
        change_set, room
    )


def membership_of(change_set: ChangeSet, row: EventRow, user: str) -> MembershipChange:
    """Return the membership that an event out of band gives a local user."""
    return MembershipChange(
        change_set.principal_nid(user), row.room_nid, row.membership or 0, row.event_nid, None
    )


class OverruledMembership(NamedTuple):
    """What a local user is by the current state, in place of what came out of band."""

    membership: MembershipChange
    state_key_nid: int
    user: str


def overruled(
    changes: EventChanges, current: Group | None, cause_nid: int
) -> list[OverruledMembership]:
    """Return what local users are by the new current state, where this server joins the room.

    None if it does not.
    """
    names, change_set = changes.change_set.caches.names, changes.change_set
    server = names.principals.get(change_set.server_name) or change_set.principals.get(
        change_set.server_name
    )
    changed = None if server is None else changes.visibility.get(server)
    if (
        current is None
        or changed is None
        or not changed.joined_count
        or is_resident(change_set, changes.room)
    ):
        return []
    return [_by_state(changes, current, one, cause_nid) for one in _out_of_band(changes)]


def _out_of_band(changes: EventChanges) -> Iterator[MembershipChange]:
    change_set, room_nid = changes.change_set, changes.room_nid
    new = {key: one for key, one in change_set.memberships.items() if one.room_nid == room_nid}
    if changes.room.row.write_version:
        for principal, membership, event_nid in change_set.answer(("out_of_band", room_nid)):
            if (principal, room_nid) not in new:
                yield MembershipChange(principal, room_nid, membership, event_nid, None)
    yield from (one for one in new.values() if one.cause_nid is None)


def _by_state(
    changes: EventChanges, current: Group, one: MembershipChange, cause_nid: int
) -> OverruledMembership:
    key = changes.change_set.row_of(one.event_nid).state_key_nid or 0
    nid = current.entries.get(key, 0)
    membership = changes.change_set.row_of(nid).membership if nid else None
    now = one._replace(membership=membership or 0, event_nid=nid, cause_nid=cause_nid)
    return OverruledMembership(now, key, changes.change_set.state_key_name(key)[1])


def usable(row: EventRow | None) -> EventRow | None:
    """Return the row of an event if it can be an auth event or part of a state: what came out of band is not authorised yet."""
    return (
        None if row is None or (row.outlier and row.is_out_of_band) else row
    )  # most are no outliers: no call
