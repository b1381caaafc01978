"""Find the redactions that take effect on an event, whichever of the two arrives first.

A redaction whose target is not in the timeline of its room waits for it. The result is the same in
either order of arrival. One that names an event of another room waits for good, so that a purge of
the other room changes nothing here.

Source: room version 3, "Handling redactions".
"""

from typing import Final, NamedTuple

from storage.auth import keys_needed, redaction_allowed
from storage.database.names import TYPE_REDACTION
from storage.event import Event
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow
from storage.persist.plan.auth_checks import auth_state
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
        changes.change_set.events.row_of(one)
        for one in waiting
        if row.accepted and _applies(changes, one, row)
    ]
    first = min(applying, key=_rank, default=None)
    changed = tuple(one._replace(ineffective=False) for one in applying)
    found = RedactionEffects(
        None if first is None else first.event_nid,
        changed=changed,
        settled=waiting if row.refused is None else (),
    )
    if row.type_nid != TYPE_REDACTION or not row.accepted:
        return found
    # senders choose the ids of versions 1 and 2, so an event can name itself
    if event.redacts is None or event.redacts == event.event_id:
        return found._replace(ineffective=True)
    target = changes.change_set.events.row(event.redacts)
    if (
        target is None
        or target.room_nid != row.room_nid
        or target.outlier
        or target.refused is not None
    ):
        return found._replace(ineffective=True, waits_for=event.redacts)
    if not target.accepted or not _allowed(changes, row, event, before, target):
        return found._replace(ineffective=True)
    # the two may redact each other: then the target has changed already
    target = next((one for one in changed if one.event_nid == target.event_nid), target)
    return found._replace(changed=(*changed, *_redacted(changes, row, target)))


def applied(row: EventRow, found: RedactionEffects) -> EventRow:
    if found.redacted_by is None and not found.ineffective:
        return row
    return row._replace(redacted_by=found.redacted_by, ineffective=found.ineffective)


def store(change_set: ChangeSet, found: RedactionEffects, row: EventRow) -> None:
    for changed in found.changed:
        change_set.events.change_event(changed)
    if found.waits_for is not None:
        change_set.events.new_waiting[row.event_nid] = (row.room_nid, found.waits_for)
    for nid in found.settled:
        if change_set.events.new_waiting.pop(nid, None) is None:
            change_set.events.gone_waiting[nid] = None


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
