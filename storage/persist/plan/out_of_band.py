"""Check out-of-band memberships: of a local user in a room that this server is not in.

Such an event is one of these:
- An invite over federation, also as the answer to a knock, or the user's own knock.
- The user's own leave that ends one of them.
- A retraction, a denial or a ban by the other side.

This server stores neither the room's state nor the auth events, so it cannot apply the auth rules.
This module checks as much as it can; the signature proves the sender. The event is stored as an
outlier without auth events, which `EventRow.is_out_of_band` recognises. If it arrives again with
its auth events, it is authorised. The current state overrules memberships that came out of band
when the server joins the room (`overruled`). It overrules one of them when its event enters the
timeline and does not become part of the state (`overruled_by_timeline`).

Source: server-server API, "Inviting to a room" and "Knocking upon a room".
"""

from collections.abc import Iterator
from typing import NamedTuple

from storage.database.names import INVITE, JOIN, MEMBERSHIPS, membership_code
from storage.event import Event
from storage.event.parsing import MAX_ID_BYTES
from storage.ids import server_name_of
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow, MembershipChange, RoomChanges
from storage.state.groups import Group

MEMBER = "m.room.member"
KNOCK = MEMBERSHIPS["knock"]
OUT = (MEMBERSHIPS["leave"], MEMBERSHIPS["ban"])


class StoredMembership(NamedTuple):
    """A local user's membership in a room, and the nid of its event; 0 for none."""

    membership: int
    event_nid: int


def refusal(change_set: ChangeSet, room: RoomChanges, event: Event) -> str | None:
    """Return why an event cannot be stored out of band, or None."""
    if event.type != MEMBER or event.state_key is None:
        return "only m.room.member events can be stored out of band"
    if server_name_of(event.state_key) != change_set.server_name or not event.state_key.startswith(
        "@"
    ):
        return f"{event.state_key} is not a user of {change_set.server_name}"
    if len(event.state_key.encode()) > MAX_ID_BYTES:
        return f"state_key is longer than {MAX_ID_BYTES} bytes"
    if is_resident(change_set, room):
        return f"{change_set.server_name} is in the room: the room's state authorises the event"
    return _refused_membership(change_set, room, event)


def is_resident(change_set: ChangeSet, room: RoomChanges) -> bool:
    """Return whether a local user is joined to the room, by its current state."""
    return (
        room.current is not None
        and change_set.visibility.visible(
            room.row.room_nid, change_set.names.principal_nid(change_set.server_name)
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
    return (
        f"membership {event.content.get('membership')!r}: "
        "a join needs the state before it (state_before)"
    )


def _refused_end(
    change_set: ChangeSet, room: RoomChanges, event: Event, *, is_own: bool
) -> str | None:
    """Return why a leave or ban cannot be stored, or None.

    It must end an invite or a knock. A user other than the member must have sent that event or name
    it as auth event: only servers in the room know its id.
    """
    membership = stored_membership(change_set, room, event.state_key or "")
    if membership.membership not in (INVITE, KNOCK):
        return f"{event.state_key} is neither invited nor knocking"
    if is_own:
        return None
    row = change_set.events.row_of(membership.event_nid)
    ended = change_set.events.events_of((row.event_nid,))[row.event_nid]
    if event.sender == ended.sender or ended.event_id in event.auth_event_ids:
        return None
    return (
        f"{event.sender} did not send {ended.event_id} and does not name it among the auth events"
    )


def stored_membership(change_set: ChangeSet, room: RoomChanges, user: str) -> StoredMembership:
    """Return a local user's membership in the room, with the changes of this batch."""
    principal = change_set.names.find_principal(user)
    new = (
        None
        if principal is None
        else change_set.members.memberships.get((principal, room.row.room_nid))
    )
    if new is not None:
        return StoredMembership(new.membership, new.event_nid)
    if principal is None or principal in change_set.names.newcomers or not room.row.write_version:
        return StoredMembership(0, 0)
    row = change_set.answers.answer(("membership", room.row.room_nid, principal))
    return StoredMembership(0, 0) if row is None else StoredMembership(*row)


def brings_back(change_set: ChangeSet, room: RoomChanges, event: Event) -> bool:
    """Return whether an event is a local user's join while no local user is in the room.

    If the server was in the room before, it has received no events since, so its current state is
    outdated.
    """
    if event.type != MEMBER or membership_code(event.content.get("membership")) != JOIN:
        return False
    return server_name_of(event.state_key or "") == change_set.server_name and not is_resident(
        change_set, room
    )


def membership_of(change_set: ChangeSet, row: EventRow, user: str) -> MembershipChange:
    """Return the membership that an event out of band gives a local user."""
    return MembershipChange(
        change_set.names.principal_nid(user), row.room_nid, row.membership or 0, row.event_nid, None
    )


class OverruledMembership(NamedTuple):
    """A local user's membership by the current state, which replaces the out-of-band one."""

    membership: MembershipChange
    state_key_nid: int
    user: str


def overruled(
    changes: EventChanges, current: Group | None, cause_nid: int
) -> list[OverruledMembership]:
    """Return the memberships by the new current state that replace out-of-band ones.

    Return none unless this event makes the server join the room.
    """
    names, change_set = changes.change_set.caches.names, changes.change_set
    server = names.principals.get(change_set.server_name) or change_set.names.principals.get(
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
    return [_by_state(changes, current, change, cause_nid) for change in _out_of_band(changes)]


def _out_of_band(changes: EventChanges) -> Iterator[MembershipChange]:
    """Yield the room's out-of-band memberships: stored ones and those of this batch."""
    change_set, room_nid = changes.change_set, changes.room_nid
    new = {
        key: change
        for key, change in change_set.members.memberships.items()
        if change.room_nid == room_nid
    }
    if changes.room.row.write_version:
        for principal, membership, event_nid in change_set.answers.answer(
            ("out_of_band", room_nid)
        ):
            if (principal, room_nid) not in new:
                yield MembershipChange(principal, room_nid, membership, event_nid, None)
    yield from (change for change in new.values() if change.cause_nid is None)


def _by_state(
    changes: EventChanges, current: Group, change: MembershipChange, cause_nid: int
) -> OverruledMembership:
    # without a membership event in the current state, membership and event nid become 0
    key = changes.change_set.events.row_of(change.event_nid).state_key_nid or 0
    nid = current.entries.get(key, 0)
    membership = changes.change_set.events.row_of(nid).membership if nid else None
    now = change._replace(membership=membership or 0, event_nid=nid, cause_nid=cause_nid)
    return OverruledMembership(now, key, changes.change_set.names.state_key_name(key)[1])


def overruled_by_timeline(
    changes: EventChanges, row: EventRow, event: Event, current: Group | None
) -> list[OverruledMembership]:
    """Return the membership that replaces a user's out-of-band one, whose event is now placed.

    ``current``: the current state after the event, if it changes. Return none if the state has the
    event, or if it is accepted history: then this server still has nothing better.
    """
    change_set, user = changes.change_set, event.state_key or ""
    if row.membership is None or not user.endswith(":" + change_set.server_name):
        return []
    if row.backfilled and row.accepted:
        return []
    if stored_membership(change_set, changes.room, user).event_nid != row.event_nid:
        return []
    state = current or changes.main_group()
    nid = 0 if state is None else state.entries.get(row.state_key_nid or 0, 0)
    if nid == row.event_nid:
        return []
    membership = change_set.events.row_of(nid).membership if nid else None
    principal = change_set.names.principal_nid(user)
    now = MembershipChange(principal, row.room_nid, membership or 0, nid, row.event_nid)
    return [OverruledMembership(now, row.state_key_nid or 0, user)]


def usable(row: EventRow | None) -> EventRow | None:
    """Return the row of an event if it can be an auth event or part of a state, else None.

    An event that came out of band cannot: it is not authorised yet.
    """
    # ``outlier`` is tested first because the property is slower and most events are no outliers
    return None if row is None or (row.outlier and row.is_out_of_band) else row
