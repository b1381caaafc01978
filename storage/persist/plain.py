"""The decision about an ordinary message, in a sixth of the time that the whole plan takes for it.

Nearly all that arrives is no state event, stands on the room's only extremity, and is allowed by the room's current state. Then there is
nothing more to find out: its place is one further on, the state before and after it is the current one, and it becomes the extremity.
What the auth rules say is remembered for all that they look at: of the event its type, sender and auth events, of the state the create
event, the power levels and the sender's membership. Where any of this does not hold `plan` answers None, and
`storage.persist.plan` decides. A test has both decide about the same events.
"""

from typing import Final

from storage.auth import CONTENT_MATTERS
from storage.database.names import KEY_CREATE, KEY_POWER_LEVELS, TYPE_MEMBER
from storage.event import Event
from storage.persist.draft import Draft, RoomDraft, room_of
from storage.persist.receive import Verdict, auth_nids, auth_rows_of, verdict
from storage.persist.results import AppendResult, stored
from storage.persist.rows import Allowed, EventRow
from storage.state.groups import Group

UNKNOWN: Final = object()
ALLOWED: Final = Verdict()


def plan(draft: Draft, event: Event) -> AppendResult | None:
    """Decide about a live event and add it to the draft, if it is an ordinary message; else None, and nothing is changed."""
    if event.state_key is not None or not _is_new(draft, event.event_id):
        return None
    room = room_of(draft, event)
    parent = _end(draft, room, event)
    if parent is None or room.current is None:
        return None
    group = draft.groups.get(room.current) or draft.caches.groups.get(room.current)
    allowed = None if group is None else _allowed(draft, room, group, event)
    if allowed is None:
        return None
    row = _row(draft, room, event, parent, allowed)
    draft.add_event(row, event)
    room.extremities = {row.event_nid: None}
    room.max_order = order = parent.order + 1
    room.changed = True
    return stored(event, order)


def _is_new(draft: Draft, event_id: str) -> bool:
    """Whether nothing is known of the event, and nothing waits for it."""
    return (
        draft.rows.get(event_id, UNKNOWN) is None
        and draft.missing.get(event_id, UNKNOWN) is None
        and draft.waiting.get(event_id) == ()
        and not draft.new_waiting
    )


def _end(draft: Draft, room: RoomDraft, event: Event) -> EventRow | None:
    """The event's parent, if it is the only one, the room's only extremity, in its current state and the furthest in its order."""
    if len(event.prev_event_ids) != 1 or len(room.extremities) != 1:
        return None
    parent_id = event.prev_event_ids[0]
    parent = draft.rows.get(parent_id) or draft.caches.rows.get(parent_id)
    if parent is None or parent.event_nid not in room.extremities:
        return None
    group = parent.state_group_after or parent.state_group_before
    return parent if group == room.current and parent.topological_ordering == room.max_order else None


def _allowed(draft: Draft, room: RoomDraft, group: Group, event: Event) -> Allowed | None:
    """What is known of an event that the room's current state allows; None if it does not, or if it depends on the content."""
    like = event.sender, event.type, event.auth_event_ids, event.room_id  # all that the rules look at
    known = draft.caches.allowed.get(like) or draft.allowed.get(like)
    if known is not None:
        get = group.entries.get
        if (get(known.member_key), get(KEY_POWER_LEVELS), get(KEY_CREATE)) == known.state:
            return known
    if event.type in CONTENT_MATTERS:
        return None
    return _judged(draft, room, group, event, like)


def _judged(draft: Draft, room: RoomDraft, group: Group, event: Event, like: tuple[object, ...]) -> Allowed | None:
    rows, missing = auth_rows_of(draft, event)
    if missing or verdict(draft, room, event, rows, before=group, current=group) != ALLOWED:
        return None
    member = draft.find_state_key(TYPE_MEMBER, event.sender)
    if member is None:
        return None
    get = group.entries.get
    state = get(member), get(KEY_POWER_LEVELS), get(KEY_CREATE)
    nids = draft.principal_nid(event.sender), draft.type_nid(event.type)
    found = draft.allowed[like] = Allowed(*nids, auth_nids(event, rows), member, state)
    return found


def _row(draft: Draft, room: RoomDraft, event: Event, parent: EventRow, allowed: Allowed) -> EventRow:
    return EventRow(
        draft.nid_for(event.event_id),
        event.event_id,
        room.row.room_nid,
        None,
        parent.order + 1,
        event.depth,
        event.origin_server_ts,
        room.current,
        None,
        room.audience,
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
        (parent.event_nid,),
        allowed.auth_events,
        False,
    )
