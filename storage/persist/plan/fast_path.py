"""Plan an ordinary message on a fast path.

Most events are messages whose prev_events all have the same state after them. If that is also the
state of some forward extremity, the message does not change the set of states that the extremities
have. So the room's current state stays as it is, and no state resolution is needed:

    extremities    A (state 7), B (state 9)
    message M      prev_events = [A]: its state is 7
    extremities    M (state 7), B (state 9)    the current state still resolves 7 and 9

The auth result is cached by all that the auth rules read. Of the event that is its type, sender,
room id and auth events. Of the state it is the create event, the power levels and the sender's
membership. If any of these conditions fails, `plan_message` returns None and
`storage.persist.plan.event` plans the event. A test plans the same events both ways.
"""

import sys
from collections.abc import Sequence
from typing import Final

from storage.auth import CONTENT_MATTERS
from storage.database.names import KEY_CREATE, KEY_POWER_LEVELS, TYPE_MEMBER
from storage.event import Event
from storage.persist.model.change_set import ChangeSet, room_of
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.results import AppendResult, stored
from storage.persist.model.rows import AuthorisedBefore, EventRow, RoomChanges
from storage.persist.plan import audience
from storage.persist.plan.auth_checks import AuthResult, auth_nids, auth_result, auth_rows_of
from storage.state.groups import Group
from storage.visibility.multirange import Ranges

# --------------------------------------------------------------------------------------------------
# Find the events in time order: those that an index of times can leave out.
#
# The live events of a room have two orders, that of the stream and that of `origin_server_ts`,
# which mostly agree. An event is in time order if its time is larger than that of each such event
# before it. The search for a time finds these by their stream positions
# (storage/queries/timestamp_to_event.py). Only the others are in `events_out_of_order_idx`:
#
#     stream position     11   12   13   14   15
#     origin_server_ts    60   70   65   70   90
#     in_order_ts          -    -   70   70    -
#
# An event takes part when it takes its stream position, so a later change of the room moves none.
# Deletions need no care either. History is never in time order, nor is a refused event: its sender
# may not be in the room. Neither is an event from the future (`FUTURE_MS_MAX`).


def note_time(change_set: ChangeSet, room: RoomChanges, row: EventRow) -> None:
    """Record whether an event that takes the next stream position is in time order."""
    if (
        room.in_order_ts < row.origin_server_ts <= change_set.in_order_ts_max
        and row.accepted
        and not row.backfilled
    ):
        room.in_order_ts = row.origin_server_ts
    else:
        change_set.events.out_of_order[row.event_nid] = room.in_order_ts


UNKNOWN: Final = object()
ALLOWED: Final = AuthResult()


def plan_message(change_set: ChangeSet, event: Event) -> AppendResult | None:
    """Plan a live event and add it to the change set if it is an ordinary message.

    Return None otherwise; then nothing was added.
    """
    if event.state_key is not None or not _is_new(change_set, event.event_id):
        return None
    room = room_of(change_set, event)
    parents = _parents(change_set, room, event)
    if (
        parents is None
        or room.current is None
        or room.row.room_version != event.room_version.identifier
    ):
        return None
    before, current = (
        change_set.states.group(parents[0].after),
        change_set.states.group(room.current),
    )
    allowed = _allowed(change_set, room, event, before, current)
    if allowed is None:
        return None
    number = room.audience if before is current else before.audience
    order = max([parent.order for parent in parents]) + 1
    out_of_range = _out_of_range(change_set, room, number, order)
    row = EventRow(  # positional on purpose: keyword arguments are measurably slower here
        change_set.events.nid_for(event.event_id),
        event.event_id,
        room.row.room_nid,
        None,
        order,
        event.depth,
        event.origin_server_ts,
        before.state_group,
        None,
        number,
        None,
        allowed.sender_nid,
        allowed.type_nid,
        None,
        None,
        False,
        False,
        False,
        not event.content_hash_valid,
        None,
        tuple([parent.event_nid for parent in parents]),
        allowed.auth_events,
        False,
        None,
        None,
    )
    change_set.events.add_event(row, event)
    note_time(change_set, room, row)
    for parent in parents:
        room.extremities.pop(parent.event_nid, None)
    room.extremities[row.event_nid] = None
    room.max_order = max(room.max_order, order)
    room.out_of_range = out_of_range
    room.changed = True
    return stored(event)


def _is_new(change_set: ChangeSet, event_id: str) -> bool:
    """Return whether an event is known to be new, no gap, and no target of waiting redactions.

    It looks at what is in memory only. If nothing was loaded, the answer is False.
    """
    return (
        change_set.events.rows.get(event_id, UNKNOWN) is None
        and change_set.events.missing.get(event_id, UNKNOWN) is None
        and change_set.events.waiting.get(event_id) == ()
        and not change_set.events.new_waiting
    )


def _parents(change_set: ChangeSet, room: RoomChanges, event: Event) -> list[EventRow] | None:
    """Return the parents if the event does not change the set of states of the extremities.

    Return None otherwise, or if a parent is not in memory, in another room, or not live and
    accepted. The event must keep the number of extremities within the limit.
    """
    rows = []
    for parent_id in event.prev_event_ids:
        row = change_set.events.rows.get(parent_id) or change_set.caches.rows.row(parent_id)
        if (
            row is None
            or row.room_nid != room.row.room_nid
            or row.outlier
            or row.backfilled
            or not row.accepted
        ):
            return None
        rows.append(row)
    if not rows or (len(rows) > 1 and not _share_a_state(rows)):
        return None
    limit = change_set.extremities_max or sys.maxsize
    count = len(room.extremities)
    # the event takes the place of an extremity with the same state, so the number does not grow
    if not room.extremities.keys().isdisjoint([row.event_nid for row in rows]):
        return rows if count <= limit else None
    return (
        rows
        if count < limit
        and any(change_set.events.row_of(nid).after == rows[0].after for nid in room.extremities)
        else None
    )


def _share_a_state(rows: Sequence[EventRow]) -> bool:
    """Return whether these are different events with the same state after them."""
    return len({row.after for row in rows}) == 1 and len({row.event_nid for row in rows}) == len(
        rows
    )


def _out_of_range(change_set: ChangeSet, room: RoomChanges, number: int, order: int) -> Ranges:
    """Return the room's out-of-range ranges with this event added."""
    # an event at the top of the order with the current audience is always where reads look
    if number == room.audience and order > room.max_order:
        return room.out_of_range
    changes = EventChanges(change_set, room)
    audience.note_out_of_range(changes, number, order)
    return changes.out_of_range


def _allowed(
    change_set: ChangeSet, room: RoomChanges, event: Event, before: Group, current: Group
) -> AuthorisedBefore | None:
    """Return the cached or new auth result if both states allow the event.

    The states are the state before the event and the room's current state. Return None if one of
    them denies the event, or if the auth rules read the content of this type.
    """
    # all that the auth rules read of the event
    like = (event.sender, event.type, event.auth_event_ids, event.room_id)
    cached = change_set.caches.allowed.get(like) or change_set.auth_graph.allowed.get(like)
    if (
        cached is not None
        and _is_like(cached, before)
        and (before is current or _is_like(cached, current))
    ):
        return cached
    checked = (
        None
        if event.type in CONTENT_MATTERS
        else _checked(change_set, room, event, before, current)
    )
    if checked is not None:
        change_set.auth_graph.allowed[like] = checked
    return checked


def _is_like(authorised: AuthorisedBefore, group: Group) -> bool:
    """Return whether a state has the values with which the event was allowed."""
    return _state(group, authorised.member_key) == authorised.state


def _state(group: Group, member_key: int) -> tuple[int | None, int | None, int | None]:
    """Return the nids of a state's events that the auth rules read."""
    get = group.entries.get
    return get(member_key), get(KEY_POWER_LEVELS), get(KEY_CREATE)


def _checked(
    change_set: ChangeSet, room: RoomChanges, event: Event, *states: Group
) -> AuthorisedBefore | None:
    """Run the auth checks; return the result if the event is accepted, else None."""
    before, current = states
    rows, missing = auth_rows_of(change_set, event)
    if (
        missing
        or auth_result(change_set, room, event, rows, before=before, current=current) != ALLOWED
    ):
        return None
    member_key = change_set.names.find_state_key(TYPE_MEMBER, event.sender)
    if member_key is None:
        return None
    nids = change_set.names.principal_nid(event.sender), change_set.names.type_nid(event.type)
    return AuthorisedBefore(*nids, auth_nids(event, rows), member_key, _state(before, member_key))
