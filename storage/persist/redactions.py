"""Which redaction takes effect on which event, whichever of the two arrives first.

Source: room version 3, "Handling redactions"; rules.md section 6.
"""

from typing import Final, NamedTuple

from storage.auth import keys_needed, redaction_allowed
from storage.database.names import TYPE_REDACTION
from storage.event import Event
from storage.persist.draft import Draft
from storage.persist.receive import auth_state
from storage.persist.rows import EventRow
from storage.persist.step import Step
from storage.state.groups import Group


class Redactions(NamedTuple):
    """What an event means for redactions.

    ``redacted_by`` takes effect on the event itself; ``ineffective`` says that it is a redaction that takes none (yet). ``changed``
    are other events with new rows: what it redacts, and redactions that waited for it and take effect now. ``waits_for`` is the id of
    a target that is not held; ``settled`` are all redactions that waited for this event. A rejected or soft-failed event is not
    redacted: both events must be valid, and no client has its content.
    """

    redacted_by: int | None
    ineffective: bool = False
    changed: tuple[EventRow, ...] = ()
    waits_for: str | None = None
    settled: tuple[int, ...] = ()


NONE: Final = Redactions(None)


def find(step: Step, row: EventRow, event: Event, before: Group) -> Redactions:
    """Look up both sides of an event that is going to be in the timeline."""
    waiting: tuple[int, ...] = step.draft.waiting_for(event.event_id)
    if not waiting and row.type_nid != TYPE_REDACTION:
        return NONE
    applying = [step.draft.row_of(one) for one in waiting if row.accepted and _applies(step, one, row)]
    first = min(applying, key=_rank, default=None)
    changed = tuple(one._replace(ineffective=False) for one in applying)
    found = Redactions(None if first is None else first.event_nid, changed=changed, settled=waiting)
    if row.type_nid != TYPE_REDACTION or not row.accepted:
        return found
    if event.redacts is None:
        return found._replace(ineffective=True)
    target = step.draft.row(event.redacts)
    if target is None or target.outlier:
        return found._replace(ineffective=True, waits_for=event.redacts)
    if target.room_nid != row.room_nid or not target.accepted or not _allowed(step, row, event, before, target):
        return found._replace(ineffective=True)
    return found._replace(changed=(*changed, *_redacted(step, row, target)))


def store(draft: Draft, found: Redactions, row: EventRow) -> None:
    """Into the draft."""
    for changed in found.changed:
        draft.change_event(changed)
    if found.waits_for is not None:
        draft.new_waiting[row.event_nid] = (row.room_nid, found.waits_for)
    for nid in found.settled:
        if draft.new_waiting.pop(nid, None) is None:
            draft.gone_waiting[nid] = None


def _redacted(step: Step, row: EventRow, target: EventRow) -> tuple[EventRow, ...]:
    """The target's row with a redaction that takes effect, if no earlier one stands."""
    if target.redacted_by is not None and _rank(step.draft.row_of(target.redacted_by)) <= _rank(row):
        return ()
    return (target._replace(redacted_by=row.event_nid),)


def _applies(step: Step, redaction_nid: int, target: EventRow) -> bool:
    redaction = step.draft.row_of(redaction_nid)
    if redaction.room_nid != target.room_nid or redaction.state_group_before is None:
        return False
    event = step.draft.events_of((redaction_nid,))[redaction_nid]
    return _allowed(step, redaction, event, step.group(redaction.state_group_before), target)


def _allowed(step: Step, row: EventRow, event: Event, before: Group, target: EventRow) -> bool:
    state = auth_state(step.draft, before, keys_needed(event))
    own = row.sender_nid == target.sender_nid  # mostly: then the target need not be read
    sender = event.sender if own else step.draft.sender_of(target)
    return redaction_allowed(event, sender, state, event.room_version)


def _rank(row: EventRow) -> tuple[int, str]:
    """Of several redactions that apply, the one with the smallest rank is named: it does not depend on their arrival."""
    return row.origin_server_ts, row.event_id
