"""Readmit an event that the caller refused (`storage.persist.verdicts`).

A refused event is soft-failed, so it has its place already: topological position, states, audience
and chain cover. The states of its descendants contain it. So what it lacks is only what a
soft-failed event does not do, and it does that now, at a new stream position:

- It becomes a forward extremity, unless an accepted live event descends from it. Its parents are
  none any more.
- The current state is resolved again, with its deltas at the new position.
- Redactions of it take effect, which have waited for that. If it is a redaction, so does it.
- A join of a local user counts for the history that the user may see.

It is not checked against the current state again: it passed that check when it arrived.
"""

from typing import NamedTuple

from storage.database.names import JOIN
from storage.errors import StorageCorrupt
from storage.event import Event
from storage.persist.model.change_set import ChangeSet, room_of
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.incoming import Readmission
from storage.persist.model.missing_data import StalePlan
from storage.persist.model.results import AppendResult, stored
from storage.persist.model.row_changes import RoomChanges
from storage.persist.model.rows import EventRow, MissingRow
from storage.persist.plan import audience, extremity_limit, out_of_band, redactions
from storage.persist.plan.room_changes import (
    store_current,
    store_extremities,
    store_overruled,
)
from storage.persist.plan.state import current_after
from storage.persist.plan.time_order import note_time
from storage.persist.plan.topology import ExtremityChange, extremities_after, stored_parents
from storage.state.groups import Group


class ReadmissionEffects(NamedTuple):
    """All that a readmission changes, as `_store` writes it to the change set."""

    row: EventRow
    ends: ExtremityChange | None
    current: Group | None
    redactions: redactions.RedactionEffects
    overruled: list[out_of_band.OverruledMembership]


def plan_readmission(change_set: ChangeSet, wanted: Readmission) -> AppendResult:
    """Plan the readmission of an event that is stored and refused.

    On `MissingData` nothing was changed. The result is "missing_parents" for an event that was
    purged meanwhile, and "duplicate" for one that was readmitted meanwhile. Raise `StalePlan` for a
    cached row from before the event was refused.
    """
    change_set.events.pending = change_set.events.pending_event = None
    row = change_set.events.row(wanted.event_id)
    if row is None:
        return AppendResult(wanted.event_id, "missing_parents", "it is not stored")
    if row.refused is None and row.accepted and not row.outlier:
        return AppendResult(
            wanted.event_id, "duplicate", None, row.stream_ordering, row.topological_ordering
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
    ends = _ends(changes, row, is_superseded=bool(refused.superseded))
    ends, current = _current(changes, row, after, ends)
    if row.membership == JOIN:
        audience.note_join(changes, event.state_key or "", row.order)
    found = redactions.find(changes, row, event, _before(changes, row))
    overruled = out_of_band.overruled(changes, current, row.event_nid)
    return ReadmissionEffects(redactions.applied(row, found), ends, current, found, overruled)


def _before(changes: EventChanges, row: EventRow) -> Group:
    if row.state_group_before is None:
        raise StorageCorrupt("a refused event has no state", event_id=row.event_id)
    return changes.group(row.state_group_before)


def _ends(changes: EventChanges, row: EventRow, *, is_superseded: bool) -> ExtremityChange | None:
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
    ends = extremities_after(change_set, room, row, parents, superseded=False)
    return ends._replace(superseded=[*ends.superseded, *gaps])


def _current(
    changes: EventChanges, row: EventRow, after: Group, ends: ExtremityChange | None
) -> tuple[ExtremityChange | None, Group | None]:
    """Return the extremities that remain and the new current state; None if it stays."""
    if ends is None or row.event_nid not in ends.extremities:
        return ends, None
    if list(ends.extremities) == [row.event_nid]:
        audience.advance(changes, after)
        return ends, after
    kept = extremity_limit.kept_extremities(changes, ends.extremities, row, after)
    gone = (nid for nid in ends.extremities if nid not in kept)
    ends = ends._replace(extremities=kept, dropped=[*ends.dropped, *gone])
    return ends, current_after(changes, kept, row.event_nid, after)


def _store(changes: EventChanges, effects: ReadmissionEffects, event: Event) -> None:
    """Write the effects to the change set; raise no `MissingData` from here on."""
    change_set, room, row = changes.change_set, changes.room, effects.row
    change_set.events.pending = change_set.events.pending_event = None
    old = room.current  # read before commit() replaces it
    changes.commit()
    change_set.readmit(row, event)
    note_time(change_set, room, row)
    room.changed = True
    if effects.ends is not None:
        store_extremities(change_set, room, effects.ends)
    redactions.store(change_set, effects.redactions, row)
    store_overruled(change_set, row, effects.overruled)
    if effects.current is not None:
        _store_state(change_set, room, row, old, effects.current)


def _store_state(
    change_set: ChangeSet, room: RoomChanges, row: EventRow, old: int | None, current: Group
) -> None:
    before = None if old is None else change_set.states.group(old)
    store_current(change_set, room, row.event_nid, before, current)
