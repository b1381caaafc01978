"""Which redaction takes effect on which event, whichever of the two arrives first.

Source: room version 3, "Handling redactions"; rules.md section 6.
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
    """What an event means for redactions.

    ``redacted_by`` takes effect on the event itself; ``ineffective`` says that it is a redaction
    that takes none (yet). ``changed`` are other events with new rows: what it redacts, and
    redactions that waited for it and take effect now. ``waits_for`` is the id of a target that is
    not held; ``settled`` are all redactions that waited for this event. A rejected or soft-failed
    event is not redacted: both events must be valid, and no client has its content.
    """

    redacted_by: int | None
    ineffective: bool = False
    changed: tuple[EventRow, ...] = ()
    waits_for: str | None = None
    settled: tuple[int, ...] = ()


NONE: Final = RedactionEffects(None)


def find(changes: EventChanges, row: EventRow, event: Event, before: Group) -> RedactionEffects:
    """Look up both sides of an event that is going to be in the timeline."""
    waiting: tuple[int, ...] = changes.change_set.waiting_for(event.event_id)
    if not waiting and row.type_nid != TYPE_REDACTION:
        return NONE
    applying = [
        changes.change_set.row_of(one)
        for one in waiting
        if row.accepted and _applies(changes, one, row)
    ]
    first = min(applying, key=_rank, default=None)
    changed = tuple(one._replace(ineffective=False) for one in applying)
    found = RedactionEffects(
        None if first is None else first.event_nid, changed=changed, settled=waiting
    )
    if row.type_nid != TYPE_REDACTION or not row.accepted:
        return found
    if event.redacts is None:
        return found._replace(ineffective=True)
    target = changes.change_set.row(event.redacts)
    if target is None or target.outlier:
        return found._replace(ineffective=True, waits_for=event.redacts)
    if (
        target.room_nid != row.room_nid
        or not target.accepted
        or not _allowed(changes, row, event, before, target)
    ):
        return found._replace(ineffective=True)
    return found._replace(changed=(*changed, *_redacted(changes, row, target)))


def store(change_set: ChangeSet, found: RedactionEffects, row: EventRow) -> None:
    """Into the change set."""
    for changed in found.changed:
        change_set.change_event(changed)
    if found.waits_for is not None:
        change_set.new_waiting[row.event_nid] = (row.room_nid, found.waits_for)
    for nid in found.settled:
        if change_set.new_waiting.pop(nid, None) is None:
            change_set.gone_waiting[nid] = None


def _redacted(changes: EventChanges, row: EventRow, target: EventRow) -> tuple[EventRow, ...]:
    """The target's row with a redaction that takes effect, if no earlier one stands."""
    if target.redacted_by is not None and _rank(
        changes.change_set.row_of(target.redacted_by)
    ) <= _rank(row):
        return ()
    return (target._replace(redacted_by=row.event_nid),)


def _applies(changes: EventChanges, redaction_nid: int, target: EventRow) -> bool:
    redaction = changes.change_set.row_of(redaction_nid)
    if redaction.room_nid != target.room_nid or redaction.state_group_before is None:
        return False
    event = changes.change_set.events_of((redaction_nid,))[redaction_nid]
    return _allowed(changes, redaction, event, changes.group(redaction.state_group_before), target)


def _allowed(
    changes: EventChanges, row: EventRow, event: Event, before: Group, target: EventRow
) -> bool:
    state = auth_state(changes.change_set, before, keys_needed(event))
    own = row.sender_nid == target.sender_nid  # mostly: then the target need not be read
    sender = event.sender if own else changes.change_set.sender_of(target)
    return redaction_allowed(event, sender, state, event.room_version)


def _rank(row: EventRow) -> tuple[int, str]:
    """Of several redactions that apply, the one with the smallest rank is named: it does not depend on their arrival."""
    return row.origin_server_ts, row.event_id
