"""The decision about an ordinary message, in a sixth of the time that the whole plan takes for it.

Nearly all that arrives is no state event and stands on extremities of the room that have one state, or beside one that has the same state.
Then the state after it is that state, and the states of the room's extremities are the same with it as without it: so is the current
state, whatever it is. What the auth rules say is remembered for all that they look at: of the event its type, sender and auth events, of
the state the create event, the power levels and the sender's membership. Where any of this does not hold `plan` answers None, and
`storage.persist.plan` decides. A test has both decide about the same events.
"""

import sys
from collections.abc import Sequence
from typing import Final

from storage.auth import CONTENT_MATTERS
from storage.database.names import KEY_CREATE, KEY_POWER_LEVELS, TYPE_MEMBER
from storage.event import Event
from storage.persist import audience
from storage.persist.draft import Draft, RoomDraft, room_of
from storage.persist.receive import Verdict, auth_nids, auth_rows_of, verdict
from storage.persist.results import AppendResult, stored
from storage.persist.rows import Allowed, EventRow
from storage.persist.step import Step
from storage.state.groups import Group
from storage.visibility.ranges import Ranges

UNKNOWN: Final = object()
ALLOWED: Final = Verdict()


def plan(draft: Draft, event: Event) -> AppendResult | None:
    """Decide about a live event and add it to the draft, if it is an ordinary message; else None, and nothing is changed."""
    if event.state_key is not None or not _is_new(draft, event.event_id):
        return None
    room = room_of(draft, event)
    parents = _parents(draft, room, event)
    if parents is None or room.current is None or room.row.room_version != event.room_version.identifier:
        return None
    before, current = draft.group(parents[0].after), draft.group(room.current)
    allowed = _allowed(draft, room, event, before, current)
    if allowed is None:
        return None
    number = room.audience if before is current else before.audience
    order = max([parent.order for parent in parents]) + 1
    strays = _strays(draft, room, number, order)
    row = EventRow(  # by position: names would cost half as much again
        draft.nid_for(event.event_id),
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
    )
    draft.add_event(row, event)
    for parent in parents:
        room.extremities.pop(parent.event_nid, None)
    room.extremities[row.event_nid] = None
    room.max_order = max(room.max_order, order)
    room.strays = strays
    room.changed = True
    return stored(event)


def _is_new(draft: Draft, event_id: str) -> bool:
    """Whether nothing is known of the event, and nothing waits for it."""
    return (
        draft.rows.get(event_id, UNKNOWN) is None
        and draft.missing.get(event_id, UNKNOWN) is None
        and draft.waiting.get(event_id) == ()
        and not draft.new_waiting
    )


def _parents(draft: Draft, room: RoomDraft, event: Event) -> list[EventRow] | None:
    """The parents, if they have one state and the event leaves the states of the extremities as they are; else None."""
    rows = []
    for parent_id in event.prev_event_ids:
        row = draft.rows.get(parent_id) or draft.caches.rows.get(parent_id)
        if row is None or row.room_nid != room.row.room_nid or row.outlier or row.backfilled or not row.accepted:
            return None
        rows.append(row)
    if not rows or (len(rows) > 1 and not _have_one_state(rows)):
        return None
    limit = draft.extremities_max or sys.maxsize
    count = len(room.extremities)
    if not room.extremities.keys().isdisjoint([row.event_nid for row in rows]):
        return rows if count <= limit else None
    return rows if count < limit and any(draft.row_of(nid).after == rows[0].after for nid in room.extremities) else None


def _have_one_state(rows: Sequence[EventRow]) -> bool:
    """Whether they are different events, and have the same state."""
    return len({row.after for row in rows}) == 1 and len({row.event_nid for row in rows}) == len(rows)


def _strays(draft: Draft, room: RoomDraft, number: int, order: int) -> Ranges:
    if number == room.audience and order > room.max_order:
        return room.strays
    step = Step(draft, room)
    audience.note_place(step, number, order)
    return step.strays


def _allowed(draft: Draft, room: RoomDraft, event: Event, before: Group, current: Group) -> Allowed | None:
    """What is known of an event that the state before it and the room's current state allow; None if it depends on the content, too."""
    like = event.sender, event.type, event.auth_event_ids, event.room_id  # all that the rules look at
    known = draft.caches.allowed.get(like) or draft.allowed.get(like)
    if known is not None and _is_like(known, before) and (before is current or _is_like(known, current)):
        return known
    judged = None if event.type in CONTENT_MATTERS else _judged(draft, room, event, before, current)
    if judged is not None:
        draft.allowed[like] = judged
    return judged


def _is_like(known: Allowed, group: Group) -> bool:
    return _state(group, known.member_key) == known.state


def _state(group: Group, member_key: int) -> tuple[int | None, int | None, int | None]:
    """The nids of the events of a state that the rules look at."""
    get = group.entries.get
    return get(member_key), get(KEY_POWER_LEVELS), get(KEY_CREATE)


def _judged(draft: Draft, room: RoomDraft, event: Event, *states: Group) -> Allowed | None:
    before, current = states
    rows, missing = auth_rows_of(draft, event)
    if missing or verdict(draft, room, event, rows, before=before, current=current) != ALLOWED:
        return None
    member_key = draft.find_state_key(TYPE_MEMBER, event.sender)
    if member_key is None:
        return None
    nids = draft.principal_nid(event.sender), draft.type_nid(event.type)
    return Allowed(*nids, auth_nids(event, rows), member_key, _state(before, member_key))
