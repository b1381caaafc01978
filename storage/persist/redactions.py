"""Which redaction takes effect on which event, whichever of the two arrives first.

Source: room version 3, "Handling redactions"; rules.md section 6.
"""

from typing import NamedTuple

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

    ``redacted_by`` takes effect on the event itself; ``target`` is what it redacts, with its new row; ``waits_for`` is the id
    of a target that is not held; ``settled`` are redactions that waited for this event.
    """

    redacted_by: int | None
    target: EventRow | None
    waits_for: str | None
    settled: tuple[int, ...]


def find(step: Step, row: EventRow, event: Event, before: Group) -> Redactions:
    """Look up both sides of an event that is going to be in the timeline."""
    waiting: tuple[int, ...] = step.draft.waiting_for(event.event_id)
    candidates = [one for one in waiting if _applies(step, one, row)]
    redacted_by = min(candidates, key=lambda nid: _rank(step.draft.row_of(nid)), default=None)
    if row.type_nid != TYPE_REDACTION or event.redacts is None or not row.accepted:
        return Redactions(redacted_by, None, None, waiting)
    target = step.draft.row(event.redacts)
    if target is None or target.outlier:
        return Redactions(redacted_by, None, event.redacts, waiting)
    return Redactions(redacted_by, _redacted(step, row, event, before, target), None, waiting)


def store(draft: Draft, found: Redactions, row: EventRow) -> None:
    """Into the draft."""
    if found.target is not None:
        draft.change_event(found.target)
    if found.waits_for is not None:
        draft.new_waiting[row.event_nid] = (row.room_nid, found.waits_for)
    for nid in found.settled:
        if draft.new_waiting.pop(nid, None) is None:
            draft.gone_waiting[nid] = None


def _redacted(step: Step, row: EventRow, event: Event, before: Group, target: EventRow) -> EventRow | None:
    """The target's row with the redaction, if it takes effect and no earlier one stands."""
    if target.room_nid != row.room_nid or not _allowed(step, event, before, target):
        return None
    if target.redacted_by is not None and _rank(step.draft.row_of(target.redacted_by)) <= _rank(row):
        return None
    return target._replace(redacted_by=row.event_nid)


def _applies(step: Step, redaction_nid: int, target: EventRow) -> bool:
    redaction = step.draft.row_of(redaction_nid)
    if redaction.room_nid != target.room_nid or redaction.state_group_before is None:
        return False
    event = step.draft.events_of((redaction_nid,))[redaction_nid]
    return _allowed(step, event, step.group(redaction.state_group_before), target)


def _allowed(step: Step, event: Event, before: Group, target: EventRow) -> bool:
    state = auth_state(step.draft, before, keys_needed(event))
    sender = step.draft.events_of((target.event_nid,))[target.event_nid].sender
    return redaction_allowed(event, sender, state, event.room_version)


def _rank(row: EventRow) -> tuple[int, str]:
    """Of several redactions that apply, the one with the smallest rank is named: it does not depend on their arrival."""
    return row.origin_server_ts, row.event_id
