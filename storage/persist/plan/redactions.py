"""Find the redactions that take effect on an event, whichever of the two arrives first.

A redaction whose target is not in the timeline of its room waits for it. The result is the same in
either order of arrival. One that names an event of another room waits for good, so that a purge of
the other room changes nothing here.

Source: room version 3, "Handling redactions".
"""

from typing import Final, NamedTuple

from storage.auth import keys_needed, redaction_allowed
from storage.database.names import JOIN, TYPE_REDACTION
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.persist.model.change_set import ChangeSet, room_of
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.incoming import Readmission
from storage.persist.model.missing_data import StalePlan
from storage.persist.model.results import AppendResult, stored
from storage.persist.model.rows import EventRow, MissingRow, RoomChanges
from storage.persist.plan import audience, out_of_band, topology
from storage.persist.plan.audience import store_current, store_extremities, store_overruled
from storage.persist.plan.auth_checks import auth_state
from storage.persist.plan.fast_path import note_time
from storage.persist.plan.state import current_after
from storage.persist.plan.topology import ExtremityChange, extremities_after, stored_parents
from storage.state.groups import Group


class RedactionEffects(NamedTuple):
    """The effects of an event on redactions.

    - ``redacted_by``: the nid of the redaction that takes effect on the event itself.
    - ``ineffective``: the event is a redaction without effect, or without effect so far.
    - ``changed``: new rows of other events. They are the event that it redacts, and the redactions
      that waited for it and take effect now.
    - ``waits_for``: the id of its target, if that is not in the timeline of the room.
    - ``settled``: the nids of all redactions of the room that waited for the event.

    A rejected or soft-failed event is not redacted: both events must be valid, and no client has
    its content. The redactions of an event that the caller refused wait until it is readmitted.
    """

    redacted_by: int | None
    ineffective: bool = False
    changed: tuple[EventRow, ...] = ()
    waits_for: str | None = None
    settled: tuple[int, ...] = ()


NONE: Final = RedactionEffects(None)


def find(changes: EventChanges, row: EventRow, event: Event, before: Group) -> RedactionEffects:
    """Return the effects of an event that is going to be in the timeline.

    The event may be the target of waiting redactions, a redaction itself, or both.
    """
    waiting = tuple(
        nid
        for nid in changes.change_set.events.waiting_for(event.event_id)
        if changes.change_set.events.row_of(nid).room_nid == row.room_nid
    )
    if not waiting and row.type_nid != TYPE_REDACTION:
        return NONE
    applying = [
        changes.change_set.events.row_of(nid)
        for nid in waiting
        if row.accepted and _applies(changes, nid, row)
    ]
    first = min(applying, key=_rank, default=None)
    changed = tuple(redaction._replace(ineffective=False) for redaction in applying)
    effects = RedactionEffects(
        None if first is None else first.event_nid,
        changed=changed,
        settled=waiting if row.refused is None else (),
    )
    if row.type_nid != TYPE_REDACTION or not row.accepted:
        return effects
    # senders choose the ids of versions 1 and 2, so an event can name itself
    if event.redacts is None or event.redacts == event.event_id:
        return effects._replace(ineffective=True)
    target = changes.change_set.events.row(event.redacts)
    if (
        target is None
        or target.room_nid != row.room_nid
        or target.outlier
        or target.refused is not None
    ):
        return effects._replace(ineffective=True, waits_for=event.redacts)
    if not target.accepted or not _allowed(changes, row, event, before, target):
        return effects._replace(ineffective=True)
    # the two may redact each other: then the target has changed already
    target = next(
        (redaction for redaction in changed if redaction.event_nid == target.event_nid), target
    )
    return effects._replace(changed=(*changed, *_redacted(changes, row, target)))


def applied(row: EventRow, effects: RedactionEffects) -> EventRow:
    if effects.redacted_by is None and not effects.ineffective:
        return row
    return row._replace(redacted_by=effects.redacted_by, ineffective=effects.ineffective)


def store(change_set: ChangeSet, effects: RedactionEffects, row: EventRow) -> None:
    for changed in effects.changed:
        change_set.events.change_event(changed)
    if effects.waits_for is not None:
        change_set.events.new_waiting[row.event_nid] = (row.room_nid, effects.waits_for)
    for nid in effects.settled:
        if change_set.events.new_waiting.pop(nid, None) is None:
            change_set.events.deleted_waiting[nid] = None


def _redacted(changes: EventChanges, row: EventRow, target: EventRow) -> tuple[EventRow, ...]:
    """Return the target's row with this redaction; none if a lower rank redacts it already."""
    if target.redacted_by is not None and _rank(
        changes.change_set.events.row_of(target.redacted_by)
    ) <= _rank(row):
        return ()
    return (target._replace(redacted_by=row.event_nid),)


def _applies(changes: EventChanges, redaction_nid: int, target: EventRow) -> bool:
    """Return whether a redaction that waited may redact its target, which arrives now."""
    redaction = changes.change_set.events.row_of(redaction_nid)
    if redaction.state_group_before is None:
        return False
    event = changes.change_set.events.events_of((redaction_nid,))[redaction_nid]
    return _allowed(changes, redaction, event, changes.group(redaction.state_group_before), target)


def _allowed(
    changes: EventChanges, row: EventRow, event: Event, before: Group, target: EventRow
) -> bool:
    """Return whether the state before the redaction permits it for this target."""
    state = auth_state(changes.change_set, before, keys_needed(event))
    own = row.sender_nid == target.sender_nid  # the usual case, in which the target is not read
    sender = event.sender if own else changes.change_set.events.sender_of(target)
    return redaction_allowed(event, sender, state, event.room_version)


def _rank(row: EventRow) -> tuple[int, str]:
    """Return the sort key of a redaction: of several that apply, the smallest is `redacted_by`.

    The key does not depend on the order of arrival.
    """
    return row.origin_server_ts, row.event_id


# --------------------------------------------------------------------------------------------------
# Readmit an event that the caller refused (`storage.persist.receive`).
#
# A refused event is soft-failed, so it has its place already: topological position, states,
# audience and chain cover. The states of its descendants contain it. So what it lacks is only what
# a soft-failed event does not do, and it does that now, at a new stream position:
#
# - It becomes a forward extremity, unless an accepted live event descends from it. Its parents are
#   none any more.
# - The current state is resolved again, with its deltas at the new position.
# - Redactions of it take effect, which have waited for that. If it is a redaction, so does it.
# - A join of a local user counts for the history that the user may see.
#
# It is not checked against the current state again: it passed that check when it arrived.


class ReadmissionEffects(NamedTuple):
    """All that a readmission changes, as `_store` writes it to the change set."""

    row: EventRow
    extremity_change: ExtremityChange | None
    current: Group | None
    redactions: RedactionEffects
    overruled: list[out_of_band.OverruledMembership]


def plan_readmission(change_set: ChangeSet, readmission: Readmission) -> AppendResult:
    """Plan the readmission of an event that is stored and refused.

    On `MissingData` nothing was changed. The result is "missing_parents" for an event that was
    purged meanwhile, and "duplicate" for one that was readmitted meanwhile. Raise `StalePlan` for a
    cached row from before the event was refused.
    """
    change_set.events.pending = change_set.events.pending_event = None
    row = change_set.events.row(readmission.event_id)
    if row is None:
        return AppendResult(readmission.event_id, "missing_parents", "it is not stored")
    if row.refused is None and row.accepted and not row.outlier:
        return AppendResult(
            readmission.event_id, "duplicate", None, row.stream_ordering, row.topological_ordering
        )
    if row.refused is None or row.event_nid in change_set.events.new_events:
        raise StalePlan("a refused event is cached as it was before", event_id=row.event_id)
    event = change_set.events.events_of((row.event_nid,))[row.event_nid]
    changes = EventChanges(change_set, room_of(change_set, event))
    _store(changes, _effects(changes, row, event), event)
    return stored(event)


def _effects(changes: EventChanges, refused: EventRow, event: Event) -> ReadmissionEffects:
    change_set = changes.change_set
    changes.order = refused.order
    row = refused._replace(soft_failed=False, refused=None, superseded=None, stream_ordering=None)
    # so that lookups by nid find it accepted while its effects are worked out
    change_set.events.pending, change_set.events.pending_event = row, event
    after = changes.group(row.after)
    extremity_change = _extremity_change(changes, row, is_superseded=bool(refused.superseded))
    extremity_change, current = _current(changes, row, after, extremity_change)
    if row.membership == JOIN:
        audience.note_join(changes, event.state_key or "", row.order)
    redaction_effects = find(changes, row, event, _before(changes, row))
    overruled = out_of_band.overruled(changes, current, row.event_nid)
    return ReadmissionEffects(
        applied(row, redaction_effects), extremity_change, current, redaction_effects, overruled
    )


def _before(changes: EventChanges, row: EventRow) -> Group:
    if row.state_group_before is None:
        raise StorageCorrupt("a refused event has no state", event_id=row.event_id)
    return changes.group(row.state_group_before)


def _extremity_change(
    changes: EventChanges, row: EventRow, *, is_superseded: bool
) -> ExtremityChange | None:
    """Return the new forward extremities; None for history.

    With ``is_superseded`` they stay. If the events that supersede it are purged, it would be one by
    the events that are left, so it is recorded as dropped.
    """
    change_set, room = changes.change_set, changes.room
    if row.backfilled:
        return None
    if is_superseded:
        dropped = (row.event_nid,) if room.row.removals else ()
        return ExtremityChange(dict(room.extremities), [], dropped)
    gaps: list[MissingRow] = []
    parents = stored_parents(change_set, row, gaps)
    extremity_change = extremities_after(change_set, room, row, parents, superseded=False)
    return extremity_change._replace(superseded=[*extremity_change.superseded, *gaps])


def _current(
    changes: EventChanges, row: EventRow, after: Group, extremity_change: ExtremityChange | None
) -> tuple[ExtremityChange | None, Group | None]:
    """Return the extremities that remain and the new current state; None if it stays."""
    if extremity_change is None or row.event_nid not in extremity_change.extremities:
        return extremity_change, None
    if list(extremity_change.extremities) == [row.event_nid]:
        audience.advance(changes, after)
        return extremity_change, after
    kept = topology.kept_extremities(changes, extremity_change.extremities, row, after)
    removed = (nid for nid in extremity_change.extremities if nid not in kept)
    extremity_change = extremity_change._replace(
        extremities=kept, dropped=[*extremity_change.dropped, *removed]
    )
    return extremity_change, current_after(changes, kept, row.event_nid, after)


def _store(changes: EventChanges, effects: ReadmissionEffects, event: Event) -> None:
    """Write the effects to the change set; raise no `MissingData` from here on."""
    change_set, room, row = changes.change_set, changes.room, effects.row
    change_set.events.pending = change_set.events.pending_event = None
    old = room.current  # read before commit() replaces it
    changes.commit()
    change_set.readmit(row, event)
    note_time(change_set, room, row)
    room.changed = True
    if effects.extremity_change is not None:
        store_extremities(change_set, room, effects.extremity_change)
    store(change_set, effects.redactions, row)
    store_overruled(change_set, row, effects.overruled)
    if effects.current is not None:
        _store_state(change_set, room, row, old, effects.current)


def _store_state(
    change_set: ChangeSet, room: RoomChanges, row: EventRow, old: int | None, current: Group
) -> None:
    before = None if old is None else change_set.states.group(old)
    store_current(change_set, room, row.event_nid, before, current)
