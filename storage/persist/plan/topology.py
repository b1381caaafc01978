"""Where a timeline event stands: its parents, its gaps, its topological ordering, and what has to move up for it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from storage.errors import InvalidEvent
from storage.event import Event
from storage.graph import topological_ordering
from storage.persist.model.change_set import ChangeSet, RoomChanges
from storage.persist.model.rows import EventRow, MissingRow

SWEEP_ROWS = 512  # events of the order read at a time when some have to move up


WALK_EVENTS_MAX = (
    1_000  # events that cannot be extremities, looked behind for extremities that are none any more
)


class ParentEvents(NamedTuple):
    """The parents of an event: those in the timeline, and the ids of the others (not held, or outliers), each once."""

    held: list[EventRow]
    missing: list[str]


class Placement(NamedTuple):
    """What the tables say of an event's place.

    ``moves`` are new orderings of other events, by nid.
    """

    prev_events: tuple[int, ...]
    order: int
    missing: list[MissingRow]
    arrived: MissingRow | None
    moves: dict[int, int]


def parents_of(change_set: ChangeSet, room: RoomChanges, event: Event) -> ParentEvents:
    """The parents, as far as this server has them.

    What is of another room is no parent, as if it were not held.
    """
    change_set.ensure_ids(event.prev_event_ids)
    parents = ParentEvents([], [])
    for event_id in dict.fromkeys(event.prev_event_ids):
        row = change_set.row(event_id)
        if row is None or row.outlier or row.room_nid != room.row.room_nid:
            parents.missing.append(event_id)
        else:
            parents.held.append(row)
    return parents


def placement_of(
    change_set: ChangeSet, room: RoomChanges, event: Event, nid: int, parents: ParentEvents
) -> Placement:
    """The place of an event that is going to be in the timeline.

    Nothing is changed yet. `InvalidEvent` if it closes a circle.
    """
    arrived = change_set.missing_row(event.event_id)
    if arrived is None and not parents.missing:
        ordering = topological_ordering.above(parent.order for parent in parents.held)
        return Placement(
            tuple([parent.event_nid for parent in parents.held]), ordering, [], None, {}
        )
    children = _children(change_set, arrived)
    ordering = topological_ordering.ordering(
        (parent.order for parent in parents.held),
        complete=not parents.missing,
        depth=event.depth,
        children=(child.order for child in children),
        room_max=room.max_order,
    )
    gaps = {event_id: _gap(change_set, room, event_id, nid) for event_id in parents.missing}
    nids = {row.event_id: row.event_nid for row in parents.held} | {
        event_id: gap.event_nid for event_id, gap in gaps.items()
    }
    prev_events = tuple(nids[event_id] for event_id in dict.fromkeys(event.prev_event_ids))
    lowest = min((child.order for child in children), default=ordering + 1)
    moves = {} if lowest > ordering else _moves(change_set, room, {nid: ordering}, lowest)
    if any(parent.event_nid in moves for parent in parents.held):
        raise InvalidEvent(
            "its parents stand on the event itself: a circle, which only chosen event ids can form",
            event_id=event.event_id,
        )
    return Placement(prev_events, ordering, list(gaps.values()), arrived, moves)


def _children(change_set: ChangeSet, arrived: MissingRow | None) -> list[EventRow]:
    if arrived is None:
        return []
    change_set.ensure_rows(arrived.child_nids)
    return [change_set.row_of(child) for child in arrived.child_nids]


def _gap(change_set: ChangeSet, room: RoomChanges, event_id: str, child_nid: int) -> MissingRow:
    """The row of a missing parent with one more child."""
    known = change_set.missing_row(event_id)
    if known is not None:
        return known._replace(child_nids=(*known.child_nids, child_nid))
    outlier = change_set.row(event_id)
    nid = change_set.nid_for(event_id) if outlier is None else outlier.event_nid
    return MissingRow(nid, event_id, room.row.room_nid, superseded=False, child_nids=(child_nid,))


def _moves(
    change_set: ChangeSet, room: RoomChanges, start: dict[int, int], lowest: int
) -> dict[int, int]:
    """The events above a new one that must move up.

    Reads the order from ``lowest`` on, as far as it must.
    """
    limit = SWEEP_ROWS
    while True:
        held: list[EventRow] = change_set.answer(("order", room.row.room_nid, lowest, limit))
        complete = len(held) < limit
        rows = _in_order(change_set, room, held, lowest, upto=None if complete else held[-1].order)
        moved, enough = topological_ordering.moved_up(start, rows)
        if enough or complete:
            return moved
        limit *= 4


def _in_order(
    change_set: ChangeSet,
    room: RoomChanges,
    held: Iterable[EventRow],
    lowest: int,
    upto: int | None,
) -> list[tuple[int, int, tuple[int, ...]]]:
    """The events of the order from the database, with what this change set adds and moves."""
    latest = {row.event_nid: change_set.rows.get(row.event_id) or row for row in held}
    added = [new.row for new in change_set.new_events.values()] + list(
        change_set.changed_events.values()
    )
    latest.update(
        (row.event_nid, row)
        for row in added
        if row.room_nid == room.row.room_nid and not row.outlier
    )
    rows = sorted((row.order, row.event_nid, row.prev_events) for row in latest.values())
    return [
        (nid, at, parents)
        for at, nid, parents in rows
        if at >= lowest and (upto is None or at < upto)
    ]


class ExtremityChange(NamedTuple):
    """The forward extremities after an event, and the gaps that it covers besides those of its own parents.

    ``dropped``: what would be an extremity too, and is left out (`storage.persist.plan.extremity_limit`), or has lost what stood on it (`is_extremity_again`).
    """

    extremities: dict[int, None]
    superseded: list[MissingRow]
    dropped: Sequence[int] = ()


def extremities_after(
    change_set: ChangeSet,
    room: RoomChanges,
    row: EventRow,
    parents: Iterable[EventRow],
    *,
    superseded: bool,
) -> ExtremityChange:
    """The ends of the room once an event stands on these parents.

    ``covered``: an extremity stands on the event already.

    What an accepted live event names as parent is no extremity, also behind events that cannot be
    one themselves: those not accepted, and backfilled ones.
    """
    left = dict(room.extremities)
    ends = ExtremityChange(left, [])
    front = list(parents)
    seen: set[int] = set()
    while front and len(seen) < WALK_EVENTS_MAX:
        parent = front.pop()
        left.pop(parent.event_nid, None)
        if not _may_end(parent) and parent.event_nid not in seen:
            seen.add(parent.event_nid)
            front.extend(_above(change_set, parent, ends.superseded))
    if _may_end(row) and not superseded:
        left[row.event_nid] = None
    return ends


def is_extremity_again(
    change_set: ChangeSet, room: RoomChanges, row: EventRow, gap: MissingRow
) -> bool:
    """Whether an event arrives that is no extremity, though what stood on it was purged since: it is to be remembered that it is none."""
    if not (gap.superseded and room.row.removals and _may_end(row)):
        return False
    change_set.ensure_rows(gap.child_nids)
    children = (change_set.find_row(nid) for nid in gap.child_nids)
    return not any(
        child is not None and not child.outlier and _may_end(child) for child in children
    )


def _may_end(row: EventRow) -> bool:
    """Whether an event may be a forward extremity at all."""
    return row.accepted and not row.backfilled


def _above(change_set: ChangeSet, row: EventRow, superseded: list[MissingRow]) -> list[EventRow]:
    """The parents of an event that cannot be an extremity; gaps among them are covered now."""
    change_set.ensure_rows(row.prev_events)
    found = [(nid, change_set.find_row(nid)) for nid in row.prev_events]
    for nid, parent in found:
        gap = change_set.gap(nid) if parent is None or parent.outlier else None
        if gap is not None and not gap.superseded:
            superseded.append(gap._replace(superseded=True))
    return [parent for _, parent in found if parent is not None and not parent.outlier]
