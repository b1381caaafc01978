"""Plan one event, from its checks to the rows that it adds.

Its steps: stored already or dependencies missing? topological position; state before the event;
auth result; extremities, state after it and current state; audience; redactions; chain cover.

Steps before `_store` only read; on `MissingData` they begin again once the data is loaded.
`_store` only writes, so a plan is complete or has no effect.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from storage.auth import auth_event_keys, check, keys_needed
from storage.auth.power_levels import PowerLevels
from storage.database.names import JOIN, TYPE_MEMBER, membership_code
from storage.errors import AuthDenied, InvalidEvent, UnknownRoom
from storage.event import Event, parse, sign
from storage.event.building import Citation, EventTemplate, cite, outline, unsigned_event
from storage.event.parsing import MAX_PREV_EVENTS
from storage.event.versions import RoomVersion, version_of
from storage.graph.chains import ChainEntry
from storage.ids import EventId, StateKey
from storage.persist.model.change_set import ChangeSet, room_of
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.incoming import AnyEvent, IncomingEvent, LocalEvent, Readmission
from storage.persist.model.results import AppendResult, Origin, invalid, stored
from storage.persist.model.rows import EventRow, MembershipChange, RoomChanges
from storage.persist.plan import audience, fast_path, out_of_band, redactions, topology
from storage.persist.plan.audience import (
    store_current,
    store_extremities,
    store_membership,
    store_overruled,
)
from storage.persist.plan.auth_checks import (
    AuthResult,
    auth_nids,
    auth_result,
    auth_rows_of,
    auth_state,
    with_authoriser,
)
from storage.persist.plan.auth_difference import cover_event
from storage.persist.plan.fast_path import note_time
from storage.persist.plan.partial_state import supplemented, unmarked
from storage.persist.plan.redactions import plan_readmission
from storage.persist.plan.state import after_event, before_event, current_after
from storage.persist.plan.topology import (
    ExtremityChange,
    ParentEvents,
    Placement,
    extremities_after,
    is_extremity_again,
    parents_of,
    placement_of,
)
from storage.state.groups import Group

INT8_MAX = (1 << 63) - 1
ACCEPTED = AuthResult()


class EventDecision(NamedTuple):
    """All that a timeline event changes, as `_store` writes it to the change set.

    ``extremity_change`` has the new forward extremities and ``current`` the new current state, if
    they change. ``entry`` is the position in the chain cover, ``stored_row`` the outlier stored
    under the same id.
    """

    row: EventRow
    placement: Placement
    before: Group
    after: Group
    current: Group | None
    extremity_change: ExtremityChange | None
    entry: ChainEntry | None
    redactions: redactions.RedactionEffects
    stored_row: EventRow | None
    overruled: list[out_of_band.OverruledMembership]


def plan_event(change_set: ChangeSet, incoming: IncomingEvent) -> AppendResult:
    """Plan an event and add its rows; on `MissingData` nothing was added."""
    is_to_be_checked = incoming.refused is None and incoming.rejected is None
    may_be_ordinary = incoming.origin == "live" and is_to_be_checked
    ordinary = fast_path.plan_message(change_set, incoming.event) if may_be_ordinary else None
    return plan_whole(change_set, incoming) if ordinary is None else ordinary


def plan_whole(change_set: ChangeSet, incoming: IncomingEvent) -> AppendResult:
    """Plan any event without the fast path; the result is that of `plan_event`."""
    event = incoming.event
    change_set.events.pending = change_set.events.pending_event = None
    row = change_set.events.row(event.event_id)
    if row is not None and not _goes_on(row, incoming.origin):
        return AppendResult(
            event.event_id, "duplicate", None, row.stream_ordering, row.topological_ordering
        )
    room = room_of(change_set, event)
    unfit = _unfit(room, event, row) or unmarked(change_set, room, incoming)
    if unfit is not None:
        return unfit
    if incoming.origin == "out_of_band":
        return _plan_out_of_band(change_set, room, incoming)
    if row is not None:
        # an outlier keeps the bytes that arrived first
        event = change_set.events.events_of([row.event_nid])[row.event_nid]
        incoming = incoming._replace(event=event)
    auth_rows, missing = auth_rows_of(change_set, event)
    if incoming.rejected is not None:
        missing = []
    parents = parents_of(change_set, room, event)
    if incoming.origin != "outlier":
        missing += _unknown_state(change_set, room, incoming, parents)
    if missing:
        return _refused(event, missing)
    if incoming.origin == "outlier":
        return _plan_outlier(change_set, room, incoming, auth_rows, stored_row=row)
    return _plan_timeline(change_set, room, incoming, parents, auth_rows, stored_row=row)


def _plan_timeline(
    change_set: ChangeSet,
    room: RoomChanges,
    incoming: IncomingEvent,
    parents: ParentEvents,
    auth_rows: list[EventRow],
    *,
    stored_row: EventRow | None,
) -> AppendResult:
    nid = _nid(change_set, incoming.event, stored_row)
    changes = EventChanges(change_set, room)
    try:
        decision, auth = _decide(changes, incoming, nid, parents, auth_rows, stored_row=stored_row)
    except InvalidEvent as error:
        return invalid(error, incoming.event.event_id)
    _store(changes, decision, incoming.event)
    return _result(incoming.event, auth)


def _unfit(room: RoomChanges, event: Event, stored_row: EventRow | None) -> AppendResult | None:
    """Return the refusal if the event does not fit its room or the row stored under its id.

    The room may have become known after the event was parsed, with another version. A version 12
    room id is made of the create event, which proves the version. With an older version such an id
    is refused, or the room would keep the wrong version forever.
    """
    version, of_room = event.room_version.identifier, room.row.room_version
    if not event.room_version.may_have_room(event.room_id):
        stored = (
            ", which it is stored under: `room-storage verify --repair`"
            if room.row.write_version
            else ""
        )
        return AppendResult(
            None, "invalid", f"{event.room_id} is not the id of a room of version {version}{stored}"
        )
    if version != of_room and not (
        event.type == "m.room.create" and event.room_version.create_room_id
    ):
        return AppendResult(
            None,
            "invalid",
            f"read as an event of version {version}, while the room has version {of_room}",
        )
    # possible because in versions 1 and 2 senders choose the event ids
    if stored_row is not None and stored_row.room_nid != room.row.room_nid:
        return AppendResult(event.event_id, "duplicate")
    return None


def _goes_on(row: EventRow, origin: Origin) -> bool:
    """Return whether a stored event enters the timeline, or comes with auth events it lacked."""
    if origin == "out_of_band":
        return False
    return row.outlier and (origin != "outlier" or row.is_out_of_band)


def _plan_out_of_band(
    change_set: ChangeSet, room: RoomChanges, incoming: IncomingEvent
) -> AppendResult:
    event = incoming.event
    reason = out_of_band.refusal(change_set, room, event) if change_set.is_live else None
    if reason is not None:
        return AppendResult(event.event_id, "invalid", reason)
    row = _row(
        EventChanges(change_set, room),
        incoming,
        [],
        AuthResult(),
        nid=_nid(change_set, event, None),
    )
    own = out_of_band.membership_of(change_set, row, event.state_key or "")
    change_set.events.add_event(row, event)
    store_membership(change_set, own)
    if incoming.stripped_state is not None:
        change_set.members.stripped[own.principal_nid, own.room_nid] = incoming.stripped_state
    room.changed = True
    return stored(event)


def _unknown_state(
    change_set: ChangeSet, room: RoomChanges, incoming: IncomingEvent, parents: ParentEvents
) -> list[EventId]:
    """Return the ids still missing to know the state before an event: parents or given state."""
    if not parents.missing:
        return []
    if incoming.state_before is None:
        return [EventId(event_id) for event_id in parents.missing]
    state = room.row.room_nid, incoming.state_before
    if state in change_set.states.complete_states:
        return []
    change_set.events.ensure_ids(incoming.state_before)
    rows = [
        (event_id, out_of_band.usable(change_set.events.row(event_id)))
        for event_id in incoming.state_before
    ]
    missing = [
        event_id
        for event_id, row in rows
        if row is None or row.state_key_nid is None or row.room_nid != room.row.room_nid
    ]
    if not missing:
        change_set.states.complete_states.add(state)
    return missing


def _plan_outlier(
    change_set: ChangeSet,
    room: RoomChanges,
    incoming: IncomingEvent,
    auth_rows: list[EventRow],
    *,
    stored_row: EventRow | None,
) -> AppendResult:
    """Plan an outlier, which is checked by its auth events alone.

    ``stored_row``: it came out of band before, so its membership is stored and may have changed
    since.
    """
    event = incoming.event
    auth = _auth_result(change_set, room, incoming, auth_rows, before=None, current=None)
    changes = EventChanges(change_set, room)
    row = _row(changes, incoming, auth_rows, auth, nid=_nid(change_set, event, stored_row))
    membership = _own_membership(changes, row, event) if stored_row is None else None
    entry = cover_event(change_set, row)
    if entry is not None:
        change_set.auth_graph.add_chain_position(row.event_nid, entry)
    if stored_row is None:
        change_set.events.add_event(row, event)
    else:
        change_set.authorise(row, event)
    if membership is not None:
        store_membership(change_set, membership)
    room.changed = True
    return _result(event, auth)


def _nid(change_set: ChangeSet, event: Event, row: EventRow | None) -> int:
    """Return the nid of the outlier or of the missing event under this id, or a new one."""
    if row is not None:
        return row.event_nid
    gap = change_set.events.missing_row(event.event_id)
    return change_set.events.nid_for(event.event_id) if gap is None else gap.event_nid


def _own_membership(changes: EventChanges, row: EventRow, event: Event) -> MembershipChange | None:
    """Return the membership that an accepted outlier gives a local user, or None.

    It counts only while this server is not in the room: a federated invite or knock, or its end.
    """
    change_set = changes.change_set
    if row.membership is None or row.rejected is not None or event.state_key is None:
        return None
    if not event.state_key.endswith(":" + change_set.server_name) or row.membership == JOIN:
        return None
    if (
        changes.room.current is not None
        and changes.visible(change_set.names.principal_nid(change_set.server_name)).joined_count
    ):
        return None
    return MembershipChange(
        change_set.names.principal_nid(event.state_key),
        row.room_nid,
        row.membership,
        row.event_nid,
        None,
    )


def _decide(
    changes: EventChanges,
    incoming: IncomingEvent,
    nid: int,
    parents: ParentEvents,
    auth_rows: list[EventRow],
    *,
    stored_row: EventRow | None,
) -> tuple[EventDecision, AuthResult]:
    """Work out the effects of a timeline event; `_store` writes them to the change set."""
    change_set, room, event = changes.change_set, changes.room, incoming.event
    live = incoming.origin == "live"
    placement = placement_of(change_set, room, event, nid, parents)
    changes.order = placement.order
    before = before_event(changes, incoming.state_before, parents)
    # this server rejoins: the current state dates from when it left, so no soft failure by it
    is_back = bool(parents.missing) and out_of_band.brings_back(change_set, room, event)
    current = changes.main_group() if live and room.extremities and not is_back else None
    before, current = supplemented(changes, parents, auth_rows, before, current)
    auth = _auth_result(change_set, room, incoming, auth_rows, before=before, current=current)
    row = _row(changes, incoming, auth_rows, auth, nid=nid, placement=placement, before=before)
    # so that lookups by nid find the event while its effects are worked out
    change_set.events.pending, change_set.events.pending_event = row, event
    extremity_change = _extremity_change(changes, row, parents, placement, live=live)
    after, current, extremity_change = _states(changes, row, before, extremity_change)
    if row.membership == JOIN and row.accepted:
        audience.note_join(changes, event.state_key or "", placement.order)
    row = row.with_state(
        None if after is before else after.state_group,
        audience.of_event(changes, row, before, after),
    )
    audience.note_out_of_range(changes, row.audience or 0, placement.order)
    _note_reordered(changes, placement)
    redaction_effects = redactions.find(changes, row, event, before)
    row = redactions.applied(row, redaction_effects)
    has_position = (
        stored_row is not None and stored_row.rejected is None and not stored_row.is_out_of_band
    )
    entry = None if has_position else cover_event(change_set, row)
    overruled = out_of_band.overruled(changes, current, nid)
    if stored_row is not None:
        overruled += out_of_band.overruled_by_timeline(changes, row, event, current)
    return EventDecision(
        row,
        placement,
        before,
        after,
        current,
        extremity_change,
        entry,
        redaction_effects,
        stored_row,
        overruled,
    ), auth


def _auth_result(
    change_set: ChangeSet,
    room: RoomChanges,
    incoming: IncomingEvent,
    auth_rows: list[EventRow],
    *,
    before: Group | None,
    current: Group | None,
) -> AuthResult:
    """Return the result of the auth rules; of an event that they accept, the caller's verdict."""
    if incoming.rejected is not None:
        return AuthResult(rejected=incoming.rejected)
    found = auth_result(change_set, room, incoming.event, auth_rows, before=before, current=current)
    if before is not None and found == ACCEPTED and incoming.refused is not None:
        return AuthResult(soft_failed=incoming.refused, refused=incoming.refused)
    return found


def _extremity_change(
    changes: EventChanges, row: EventRow, parents: ParentEvents, placement: Placement, *, live: bool
) -> ExtremityChange | None:
    """Return the new forward extremities; None unless live and accepted, or of a superseded gap."""
    gap, superseded = placement.arrived, placement.is_superseded
    if not (superseded or (live and row.accepted)):
        return None
    extremity_change = extremities_after(
        changes.change_set, changes.room, row, parents.stored, superseded=superseded
    )
    return (
        extremity_change._replace(dropped=[row.event_nid])
        if gap is not None and is_extremity_again(changes.change_set, changes.room, row, gap)
        else extremity_change
    )


def _states(
    changes: EventChanges, row: EventRow, before: Group, extremity_change: ExtremityChange | None
) -> tuple[Group, Group | None, ExtremityChange | None]:
    """Return the state after the event, the room's current state and the extremities that remain.

    The last two are None if the extremities do not change. A single extremity needs no resolution:
    the state after it is the current state.
    """
    extremities = {} if extremity_change is None else extremity_change.extremities
    alone = list(extremities) == [row.event_nid]
    after = (
        before
        if row.rejected is not None
        else after_event(changes, row, before, becomes_current=alone)
    )
    if extremity_change is None or alone:
        return after, None if extremity_change is None else after, extremity_change
    kept = topology.kept_extremities(changes, extremities, row, after)
    extremity_change = extremity_change._replace(
        extremities=kept,
        dropped=[*extremity_change.dropped, *(nid for nid in extremities if nid not in kept)],
    )
    return after, current_after(changes, kept, row.event_nid, after), extremity_change


def _note_reordered(changes: EventChanges, placement: Placement) -> None:
    for nid, order in placement.reordered.items():
        row = changes.change_set.events.row_of(nid)
        audience.note_out_of_range(changes, row.audience or 0, order)
        if row.membership == JOIN and row.accepted and row.state_key_nid is not None:
            audience.note_join(
                changes, changes.change_set.names.state_key_name(row.state_key_nid)[1], order
            )


def _row(
    changes: EventChanges,
    incoming: IncomingEvent,
    auth_rows: list[EventRow],
    auth: AuthResult,
    *,
    nid: int,
    placement: Placement | None = None,
    before: Group | None = None,
) -> EventRow:
    """Return the event's row before its effects are known; without a placement, an outlier's."""
    change_set, event = changes.change_set, incoming.event
    type_nid = change_set.names.type_nid(event.type)
    # raises MissingData for missing names now, not in _store
    change_set.events.stored_columns(event)
    return EventRow(
        event_nid=nid,
        event_id=event.event_id,
        room_nid=changes.room_nid,
        stream_ordering=None,
        topological_ordering=None if placement is None else placement.order,
        depth=_int8(event.depth),
        origin_server_ts=_int8(event.origin_server_ts),
        state_group_before=None if before is None else before.state_group,
        state_group_after=None,
        audience=None,
        redacted_by=None,
        sender_nid=change_set.names.principal_nid(event.sender),
        type_nid=type_nid,
        state_key_nid=None
        if event.state_key is None
        else change_set.names.state_key_nid(type_nid, event.state_key),
        membership=None
        if event.state_key is None or type_nid != TYPE_MEMBER
        else membership_code(event.content.get("membership")),
        outlier=placement is None,
        backfilled=incoming.origin == "backfill",
        soft_failed=auth.soft_failed is not None,
        redacted_form=not event.content_hash_valid,
        rejected=auth.rejected,
        prev_events=() if placement is None else placement.prev_events,
        auth_events=auth_nids(event, auth_rows),
        ineffective=False,
        refused=auth.refused,
        superseded=True if auth.refused is not None and _is_superseded(placement) else None,
    )


def _is_superseded(placement: Placement | None) -> bool:
    return placement is not None and placement.is_superseded


def _int8(number: int) -> int:
    return max(-INT8_MAX - 1, min(number, INT8_MAX))


def _store(changes: EventChanges, decision: EventDecision, event: Event) -> None:
    """Write a complete decision to the change set; raise no `MissingData` from here on."""
    change_set, room, row, placement = (
        changes.change_set,
        changes.room,
        decision.row,
        decision.placement,
    )
    change_set.events.pending = change_set.events.pending_event = None
    # read before commit() replaces it: the deltas below compare old and new
    old = room.current
    changes.commit()
    if decision.entry is not None:
        change_set.auth_graph.add_chain_position(row.event_nid, decision.entry)
    _store_event(change_set, decision, event)
    note_time(change_set, room, row)
    if placement.missing and not row.backfilled:
        change_set.events.after_gaps.add(row.event_nid)
    for gap in placement.missing:
        change_set.events.add_missing(
            gap._replace(superseded=gap.superseded or decision.extremity_change is not None)
        )
    if decision.extremity_change is not None:
        store_extremities(change_set, room, decision.extremity_change)
    if placement.arrived is not None:
        change_set.events.drop_missing(placement.arrived)
    for nid, order in placement.reordered.items():
        change_set.events.move_up(change_set.events.row_of(nid), order)
    room.max_order = max(room.max_order, placement.order, *placement.reordered.values())
    room.changed = True
    redactions.store(change_set, decision.redactions, row)
    store_overruled(change_set, row, decision.overruled)
    if decision.current is not None:
        before = None if old is None else change_set.states.group(old)
        store_current(change_set, room, row.event_nid, before, decision.current)


def _store_event(change_set: ChangeSet, decision: EventDecision, event: Event) -> None:
    if decision.stored_row is None:
        change_set.events.add_event(decision.row, event)
        return
    if decision.stored_row.is_out_of_band:
        change_set.authorise(decision.row, event)
    change_set.add_outlier_to_timeline(decision.row, event)


def _refused(event: Event, missing: list[EventId]) -> AppendResult:
    lacking = tuple(dict.fromkeys(missing))  # an id can be both a prev_event and an auth event
    return AppendResult(
        event.event_id,
        "missing_parents",
        f"{len(lacking)} events that it depends on are not stored",
        missing=lacking,
    )


def _result(event: Event, auth: AuthResult) -> AppendResult:
    if auth.rejected is not None:
        return AppendResult(event.event_id, "rejected", auth.rejected)
    if auth.soft_failed is not None:
        return AppendResult(event.event_id, "soft_failed", auth.soft_failed)
    return stored(event)


# --------------------------------------------------------------------------------------------------
# Build an event of a local user in the plan, on the room as it is there, and plan it.
#
# Its parents are all forward extremities of the room, so it leaves one. The state before it is then
# the room's current state. Its auth events and its authorisation are by that state. If another
# writer changes the room first, the write is refused, and the event is built and signed again.
#
# A refused event adds nothing to the plan. Source: server-server API, "PDUs" and "Auth events
# selection".

REDACTION: Final = "m.room.redaction"


class Ancestry(NamedTuple):
    """Parents and auth events of a new event, and its depth."""

    prev_events: list[Citation]
    auth_events: list[Citation]
    depth: int


def plan_any(change_set: ChangeSet, incoming: AnyEvent) -> AppendResult:
    """Plan a received event, build and plan a local one, or readmit one."""
    if isinstance(incoming, IncomingEvent):
        return plan_event(change_set, incoming)
    if isinstance(incoming, Readmission):
        return plan_readmission(change_set, incoming)
    return plan_local(change_set, incoming)


def plan_local(change_set: ChangeSet, local: LocalEvent) -> AppendResult:
    """Build an event and add its rows; on `MissingData` nothing was added.

    If it cannot be built, the result has no event id, and nothing was added: "rejected" with the
    auth rule, "invalid", or "missing_parents" for an unknown room. A repeated request adds nothing
    either: the result is a "duplicate" with the id of the first event.
    """
    transaction = local.transaction
    first = None if transaction is None else change_set.transactions.first_event(transaction)
    if first is not None:
        return AppendResult(first, "duplicate")
    try:
        version = _version_of(change_set, local.template)
        template = completed(change_set, local.template, version)
        ancestry = ancestry_of(change_set, template, version)
        event = _signed(local, template, version, ancestry)
    except AuthDenied as error:
        return AppendResult(None, "rejected", f"{error.rule}: {error.reason}")
    except InvalidEvent as error:
        return invalid(error, None)
    except UnknownRoom as error:
        return AppendResult(None, "missing_parents", str(error))
    # nobody else can have seen an event whose id is a hash of what is signed here
    change_set.events.assume_new([event.event_id])
    result = plan_event(change_set, IncomingEvent(event, "live"))
    row = change_set.events.rows.get(event.event_id)
    if transaction is not None and row is not None:
        change_set.transactions.add(transaction, row)
    return result


def template_of(change_set: ChangeSet, template: EventTemplate) -> dict[str, Any]:
    """Return an event as `plan_local` would build it, neither signed nor planned.

    Raise `AuthDenied`, `UnknownRoom`, or `MissingData`.
    """
    version = _version_of(change_set, template)
    template = completed(change_set, template, version)
    ancestry = ancestry_of(change_set, template, version)
    return unsigned_event(template, version, **ancestry._asdict())


def _version_of(change_set: ChangeSet, template: EventTemplate) -> RoomVersion:
    return version_of(_room(change_set, template).row.room_version)


def _room(change_set: ChangeSet, template: EventTemplate) -> RoomChanges:
    room_id = template.room_id or ""
    changes = change_set.rooms.room_changes.get(room_id)
    if changes is not None:
        return changes
    row = change_set.rooms.room(room_id)
    if row is None or not row.write_version:
        raise UnknownRoom(room_id)
    return RoomChanges.of(row)


def completed(
    change_set: ChangeSet, template: EventTemplate, version: RoomVersion
) -> EventTemplate:
    """Return the parts of an event, with those of its content that the engine chooses."""
    return with_authoriser(change_set, _room(change_set, template), template, version)


def ancestry_of(change_set: ChangeSet, template: EventTemplate, version: RoomVersion) -> Ancestry:
    """Return what a new event stands on. Raise `AuthDenied` if the current state refuses it."""
    room = _room(change_set, template)
    probe = outline(template, version)
    state = _state(change_set, room, probe)
    check(probe, state, version)
    if probe.type == REDACTION:
        _check_redaction(change_set, room, probe, state)
    rows = _parents(change_set, room)
    return Ancestry(
        _cited(change_set, rows, version),
        [cite(state[key]) for key in sorted(auth_event_keys(probe)) if key in state],
        1 + max((row.depth for row in rows), default=0),
    )


def _state(change_set: ChangeSet, room: RoomChanges, probe: Event) -> dict[StateKey, Event]:
    """Return the part of the current state that the auth check of the event reads."""
    if room.current is None:
        return {}
    return auth_state(change_set, change_set.states.group(room.current), keys_needed(probe))


def _parents(change_set: ChangeSet, room: RoomChanges) -> list[EventRow]:
    """Return the rows of the forward extremities, the highest first, as many as an event has."""
    change_set.events.ensure_rows(room.extremities)
    rows = [change_set.events.row_of(nid) for nid in room.extremities]
    return sorted(rows, key=lambda row: (-row.order, row.event_nid))[:MAX_PREV_EVENTS]


def _cited(change_set: ChangeSet, rows: Sequence[EventRow], version: RoomVersion) -> list[Citation]:
    """Return the citations of events; only versions 1 and 2 need their content."""
    if not version.reference_pairs:
        return [Citation(EventId(row.event_id)) for row in rows]
    events = change_set.events.events_of(row.event_nid for row in rows)
    return [cite(events[row.event_nid]) for row in rows]


def _check_redaction(
    change_set: ChangeSet, room: RoomChanges, probe: Event, state: dict[StateKey, Event]
) -> None:
    """Raise `AuthDenied` unless the user redacts an own event, or has the power to redact.

    The auth rules allow any user of a server to redact events of the same server, because a server
    is trusted with its users. So the server has to be stricter with its own. An event of another
    room is never redacted. Source: client-server API, "Redactions".
    """
    row = None if probe.redacts is None else change_set.events.row(probe.redacts)
    if row is not None and row.room_nid != room.row.room_nid:
        raise AuthDenied(
            f"{probe.redacts} is not of {probe.room_id}", rule="redaction.of_other_room"
        )
    levels = PowerLevels.of(state, probe.room_version)
    has, needs = levels.user(probe.sender), levels.named("redact")
    if has >= needs:
        return
    if row is not None and change_set.events.sender_of(row) == probe.sender:
        return
    reason = f"{probe.sender} has level {has}, redacting events of others takes {needs}"
    raise AuthDenied(reason, rule="redaction.not_own")


def _signed(
    local: LocalEvent, template: EventTemplate, version: RoomVersion, ancestry: Ancestry
) -> Event:
    """Return the signed event; the one of the plan before if it has the same ancestry."""
    built_on = (
        tuple(citation.event_id for citation in ancestry.prev_events),
        tuple(citation.event_id for citation in ancestry.auth_events),
    )
    if local.built is None or local.built_on != built_on:
        pdu = unsigned_event(template, version, **ancestry._asdict())
        local.built = parse(sign(pdu, version, *local.signer), version)
        local.built_on = built_on
    return local.built
