"""The decision about one event, from its checks to the rows it adds. Pure: reads and fills a `Draft`, no I/O.

An event goes through: is it held already; are its auth events and parents held; its place in the order; the state before
it; the verdict of the auth rules; the state after it; the room's extremities and current state; its audience; redactions.
Everything up to `_store` only reads (it may stop with `Needs` and be asked again); `_store` only writes.
"""

from typing import NamedTuple

from storage.database.names import JOIN, TYPE_MEMBER, membership_code
from storage.errors import InvalidEvent
from storage.event import Event
from storage.graph.chains import Entry
from storage.ids import EventId
from storage.persist import audience, out_of_band, plain, pruning, redactions
from storage.persist.cover import cover
from storage.persist.draft import Delta, Draft, Membership, RoomDraft, room_of
from storage.persist.place import Ends, Parents, Placement, ends_after, has_lost_cover, parents_of, place
from storage.persist.receive import Verdict, auth_nids, auth_rows_of, verdict
from storage.persist.results import AppendResult, Origin, stored
from storage.persist.rows import EventRow
from storage.persist.states import after_event, before_event, current_after
from storage.persist.step import Step
from storage.state.groups import Group, changed_keys

INT8_MAX = (1 << 63) - 1


class Incoming(NamedTuple):
    """A parsed PDU on its way in. ``state_before``: the ids of the state before it, given by the caller.

    ``stripped_state``: JSON, of what came out of band.
    """

    event: Event
    origin: Origin
    state_before: tuple[EventId, ...] | None = None
    stripped_state: str | None = None


class Decision(NamedTuple):
    """What becomes of a timeline event."""

    row: EventRow
    placement: Placement
    before: Group
    after: Group
    current: Group | None
    ends: Ends | None
    entry: Entry | None
    redactions: redactions.Redactions
    held: EventRow | None
    overruled: list[out_of_band.Overruled]


def plan_event(draft: Draft, incoming: Incoming) -> AppendResult:
    """Decide, and add the rows to the draft. `Needs` if something has to be loaded first; then nothing was added."""
    ordinary = plain.plan(draft, incoming.event) if incoming.origin == "live" else None
    return plan_whole(draft, incoming) if ordinary is None else ordinary


def plan_whole(draft: Draft, incoming: Incoming) -> AppendResult:
    """The same for any event, ordinary ones as well."""
    event = incoming.event
    draft.pending = draft.pending_event = None
    row = draft.row(event.event_id)
    if row is not None and not _goes_on(row, incoming.origin):
        return AppendResult(event.event_id, "duplicate", None, row.stream_ordering, row.topological_ordering)
    room = room_of(draft, event)
    unfit = _unfit(room, event, row)
    if unfit is not None:
        return unfit
    if incoming.origin == "out_of_band":
        return _plan_out_of_band(draft, room, incoming)
    if row is not None:
        event = draft.events_of([row.event_nid])[row.event_nid]  # an outlier keeps the bytes that came first
        incoming = incoming._replace(event=event)
    auth_rows, missing = auth_rows_of(draft, event)
    parents = parents_of(draft, room, event)
    if incoming.origin != "outlier":
        missing += _unknown_state(draft, room, incoming, parents)
    if missing:
        return _refused(event, missing)
    if incoming.origin == "outlier":
        return _plan_outlier(draft, room, incoming, auth_rows, held=row)
    return _plan_timeline(draft, room, incoming, parents, auth_rows, held=row)


def _plan_timeline(
    draft: Draft, room: RoomDraft, incoming: Incoming, parents: Parents, auth_rows: list[EventRow], *, held: EventRow | None
) -> AppendResult:
    nid = _nid(draft, incoming.event, held)
    step = Step(draft, room)
    try:
        decision, judged = _decide(step, incoming, nid, parents, auth_rows, held=held)
    except InvalidEvent as error:
        return AppendResult(incoming.event.event_id, "invalid", error.reason)
    _store(step, decision, incoming.event)
    return _result(incoming.event, judged)


def _unfit(room: RoomDraft, event: Event, held: EventRow | None) -> AppendResult | None:
    """Return the answer to an event that its room, or the outlier that is stored under its id, does not fit; else None.

    The room may have become known after the event was read. The room id of a create event of version 12 proves the version; such an id is
    refused with any other version, or the room would have that one for ever.
    """
    version, of_room = event.room_version.identifier, room.row.room_version
    if not event.room_version.may_have_room(event.room_id):
        stored = ", which it is stored under: `room-storage verify --repair`" if room.row.write_version else ""
        return AppendResult(None, "invalid", f"{event.room_id} is not the id of a room of version {version}{stored}")
    if version != of_room and not (event.type == "m.room.create" and event.room_version.create_room_id):
        return AppendResult(None, "invalid", f"read as an event of version {version}, while the room has version {of_room}")
    if held is not None and held.room_nid != room.row.room_nid:  # in versions 1 and 2 senders choose the ids
        return AppendResult(event.event_id, "duplicate")
    return None


def _goes_on(row: EventRow, origin: Origin) -> bool:
    """Whether an event that is held becomes more than it is: an outlier in the timeline, or what came out of band with its auth events."""
    if origin == "out_of_band":
        return False
    return row.outlier and (origin != "outlier" or row.is_out_of_band)


def _plan_out_of_band(draft: Draft, room: RoomDraft, incoming: Incoming) -> AppendResult:
    event = incoming.event
    reason = out_of_band.refusal(draft, room, event) if draft.is_live else None
    if reason is not None:
        return AppendResult(event.event_id, "invalid", reason)
    row = _row(Step(draft, room), incoming, [], Verdict(), nid=_nid(draft, event, None))
    own = out_of_band.membership_of(draft, row, event.state_key or "")
    draft.add_event(row, event)
    _store_membership(draft, own)
    if incoming.stripped_state is not None:
        draft.stripped[own.principal_nid, own.room_nid] = incoming.stripped_state
    room.changed = True
    return stored(event)


def _store_membership(draft: Draft, one: Membership) -> None:
    draft.stripped.pop((one.principal_nid, one.room_nid), None)
    draft.memberships[one.principal_nid, one.room_nid] = one


def _unknown_state(draft: Draft, room: RoomDraft, incoming: Incoming, parents: Parents) -> list[EventId]:
    """The ids that are lacking to know the state before an event; none if it is known."""
    if not parents.missing:
        return []
    if incoming.state_before is None:
        return [EventId(one) for one in parents.missing]
    draft.ensure_ids(incoming.state_before)
    rows = [(one, out_of_band.usable(draft.row(one))) for one in incoming.state_before]
    return [one for one, row in rows if row is None or row.state_key_nid is None or row.room_nid != room.row.room_nid]


def _plan_outlier(draft: Draft, room: RoomDraft, incoming: Incoming, auth_rows: list[EventRow], *, held: EventRow | None) -> AppendResult:
    """``held``: it came out of band before. Then its membership is known already, and may have changed since."""
    event = incoming.event
    judged = verdict(draft, room, event, auth_rows, before=None, current=None)
    step = Step(draft, room)
    row = _row(step, incoming, auth_rows, judged, nid=_nid(draft, event, held))
    membership = _own_membership(step, row, event) if held is None else None
    entry = cover(draft, row)
    if entry is not None:
        draft.add_place(row.event_nid, entry)
    if held is None:
        draft.add_event(row, event)
    else:
        draft.authorise(row, event)
    if membership is not None:
        _store_membership(draft, membership)
    room.changed = True
    return _result(event, judged)


def _nid(draft: Draft, event: Event, row: EventRow | None) -> int:
    """The nid of an event: that of the outlier, of the gap that waits for it, or a new one."""
    if row is not None:
        return row.event_nid
    gap = draft.missing_row(event.event_id)
    return draft.nid_for(event.event_id) if gap is None else gap.event_nid


def _own_membership(step: Step, row: EventRow, event: Event) -> Membership | None:
    """What an outlier says of a local user where this server is not in the room: an invite or knock over federation, or its end."""
    draft = step.draft
    if row.membership is None or row.rejected is not None or event.state_key is None:
        return None
    if not event.state_key.endswith(":" + draft.server_name) or row.membership == JOIN:
        return None
    if step.room.current is not None and step.visible(draft.principal_nid(draft.server_name)).joined_count:
        return None
    return Membership(draft.principal_nid(event.state_key), row.room_nid, row.membership, row.event_nid, None)


def _decide(
    step: Step, incoming: Incoming, nid: int, parents: Parents, auth_rows: list[EventRow], *, held: EventRow | None
) -> tuple[Decision, Verdict]:
    draft, room, event = step.draft, step.room, incoming.event
    live = incoming.origin == "live"
    placement = place(draft, room, event, nid, parents)
    step.order = placement.order
    before = before_event(step, incoming.state_before, parents)
    is_back = bool(parents.missing) and out_of_band.brings_back(draft, room, event)  # the current state is of when this server left
    current = step.main_group() if live and room.extremities and not is_back else None
    judged = verdict(draft, room, event, auth_rows, before=before, current=current)
    row = _row(step, incoming, auth_rows, judged, nid=nid, placement=placement, before=before)
    draft.pending, draft.pending_event = row, event  # found by its nid while its own effects are worked out
    ends = _ends(step, row, parents, placement, live=live)
    after, current, ends = _states(step, row, before, ends)
    if row.membership == JOIN and row.accepted:
        audience.note_join(step, event.state_key or "", placement.order)
    row = row.with_state(None if after is before else after.state_group, audience.of_event(step, row, before, after))
    audience.note_place(step, row.audience or 0, placement.order)
    _note_moves(step, placement)
    found = redactions.find(step, row, event, before)
    if found.redacted_by is not None or found.ineffective:
        row = row._replace(redacted_by=found.redacted_by, ineffective=found.ineffective)
    has_place = held is not None and held.rejected is None and not held.is_out_of_band
    entry = None if has_place else cover(draft, row)
    overruled = out_of_band.overruled(step, current, nid)
    return Decision(row, placement, before, after, current, ends, entry, found, held, overruled), judged


def _ends(step: Step, row: EventRow, parents: Parents, placement: Placement, *, live: bool) -> Ends | None:
    """The room's ends if the event changes them: it is accepted and live, or an extremity stands on it."""
    gap = placement.arrived
    covered = gap is not None and gap.covered
    if not (covered or (live and row.accepted)):
        return None
    ends = ends_after(step.draft, step.room, row, parents.held, covered=covered)
    return ends._replace(dropped=[row.event_nid]) if gap is not None and has_lost_cover(step.draft, step.room, row, gap) else ends


def _states(step: Step, row: EventRow, before: Group, ends: Ends | None) -> tuple[Group, Group | None, Ends | None]:
    """The state after the event; if it changes the extremities, the room's current state, and those that stay."""
    extremities = {} if ends is None else ends.extremities
    alone = list(extremities) == [row.event_nid]
    after = before if row.rejected is not None else after_event(step, row, before, becomes_current=alone)
    if ends is None or alone:
        return after, None if ends is None else after, ends
    kept = pruning.kept(step, extremities, row, after)
    ends = ends._replace(extremities=kept, dropped=[*ends.dropped, *(nid for nid in extremities if nid not in kept)])
    return after, current_after(step, kept, row.event_nid, after), ends


def _note_moves(step: Step, placement: Placement) -> None:
    for nid, order in placement.moves.items():
        row = step.draft.row_of(nid)
        audience.note_place(step, row.audience or 0, order)
        if row.membership == JOIN and row.accepted and row.state_key_nid is not None:
            audience.note_join(step, step.draft.state_key_name(row.state_key_nid)[1], order)


def _row(
    step: Step,
    incoming: Incoming,
    auth_rows: list[EventRow],
    judged: Verdict,
    *,
    nid: int,
    placement: Placement | None = None,
    before: Group | None = None,
) -> EventRow:
    """The row of an event before its own effects are known; without a place it is an outlier."""
    draft, event = step.draft, incoming.event
    type_nid = draft.type_nid(event.type)
    draft.related(event)  # what may be lacking for it is asked for now
    return EventRow(
        event_nid=nid,
        event_id=event.event_id,
        room_nid=step.room_nid,
        stream_ordering=None,
        topological_ordering=None if placement is None else placement.order,
        depth=_int8(event.depth),
        origin_server_ts=_int8(event.origin_server_ts),
        state_group_before=None if before is None else before.state_group,
        state_group_after=None,
        audience=None,
        redacted_by=None,
        sender_nid=draft.principal_nid(event.sender),
        type_nid=type_nid,
        state_key_nid=None if event.state_key is None else draft.state_key_nid(type_nid, event.state_key),
        membership=None if event.state_key is None or type_nid != TYPE_MEMBER else membership_code(event.content.get("membership")),
        outlier=placement is None,
        backfilled=incoming.origin == "backfill",
        soft_failed=judged.soft_failed is not None,
        redacted_form=not event.content_hash_valid,
        rejected=judged.rejected,
        prev_events=() if placement is None else placement.prev_events,
        auth_events=auth_nids(event, auth_rows),
        ineffective=False,
    )


def _int8(number: int) -> int:
    return max(-INT8_MAX - 1, min(number, INT8_MAX))


def _store(step: Step, decision: Decision, event: Event) -> None:
    """Move a complete decision into the draft."""
    draft, room, row, placement = step.draft, step.room, decision.row, decision.placement
    draft.pending = draft.pending_event = None
    old = room.current
    step.commit()
    if decision.entry is not None:
        draft.add_place(row.event_nid, decision.entry)
    _store_event(draft, decision, event)
    if placement.missing and not row.backfilled:
        draft.after_gaps.add(row.event_nid)
    for gap in placement.missing:
        draft.add_missing(gap._replace(covered=gap.covered or decision.ends is not None))
    for gap in decision.ends.covered if decision.ends is not None else ():
        draft.add_missing(gap)
    if placement.arrived is not None:
        draft.drop_missing(placement.arrived)
    for nid, order in placement.moves.items():
        draft.move_up(draft.row_of(nid), order)
    room.max_order = max(room.max_order, placement.order, *placement.moves.values())
    room.changed = True
    redactions.store(draft, decision.redactions, row)
    if decision.ends is not None:
        room.extremities = decision.ends.extremities
        draft.dropped.update(dict.fromkeys(decision.ends.dropped, room.row.room_nid))
    _store_overruled(draft, decision)
    if decision.current is not None:
        _store_current(draft, room, row.event_nid, None if old is None else draft.group(old), decision.current)


def _store_event(draft: Draft, decision: Decision, event: Event) -> None:
    if decision.held is None:
        draft.add_event(decision.row, event)
        return
    if decision.held.is_out_of_band:
        draft.authorise(decision.row, event)
    draft.place_outlier(decision.row, event)


def _store_overruled(draft: Draft, decision: Decision) -> None:
    for one in decision.overruled:
        _store_membership(draft, one.membership)
        draft.overruled.append((decision.row.room_nid, one.state_key_nid, one.user))


def _store_current(draft: Draft, room: RoomDraft, cause_nid: int, old: Group | None, new: Group) -> None:
    """The differences between the old and the new current state."""
    room_nid = room.row.room_nid
    for key in sorted(set(new.entries) if old is None else changed_keys(old, new)):
        before = None if old is None else old.entries.get(key)
        nid = new.entries.get(key)
        membership = None if nid is None else draft.row_of(nid).membership
        draft.deltas.append(Delta(room_nid, cause_nid, key, nid, before))
        draft.current_changes[room_nid, key] = (nid or 0, membership)
        type_nid, user = draft.state_key_name(key)
        if type_nid == TYPE_MEMBER and user.endswith(":" + draft.server_name):
            principal = draft.principal_nid(user)
            _store_membership(draft, Membership(principal, room_nid, membership or 0, nid or 0, cause_nid))


def _refused(event: Event, missing: list[EventId]) -> AppendResult:
    lacking = tuple(dict.fromkeys(missing))  # a parent may be an auth event as well
    return AppendResult(event.event_id, "missing_parents", f"{len(lacking)} events that it builds on are not held", missing=lacking)


def _result(event: Event, judged: Verdict) -> AppendResult:
    if judged.rejected is not None:
        return AppendResult(event.event_id, "rejected", judged.rejected)
    if judged.soft_failed is not None:
        return AppendResult(event.event_id, "soft_failed", judged.soft_failed)
    return stored(event)
