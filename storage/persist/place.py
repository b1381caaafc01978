"""Where a timeline event stands: its parents, its gaps, its topological ordering, and what has to move up for it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from storage.errors import InvalidEvent
from storage.event import Event
from storage.graph import order
from storage.persist.draft import Draft, RoomDraft
from storage.persist.rows import EventRow, MissingRow

SWEEP_ROWS = 512  # events of the order read at a time when some have to move up


WALK_EVENTS_MAX = 1_000  # events that cannot be extremities, looked behind for extremities that are none any more


class Parents(NamedTuple):
    """The parents of an event: those in the timeline, and the ids of the others (not held, or outliers), each once."""

    held: list[EventRow]
    missing: list[str]


class Placement(NamedTuple):
    """What the tables say of an event's place. ``moves`` are new orderings of other events, by nid."""

    prev_events: tuple[int, ...]
    order: int
    missing: list[MissingRow]
    arrived: MissingRow | None
    moves: dict[int, int]


def parents_of(draft: Draft, room: RoomDraft, event: Event) -> Parents:
    """The parents, as far as this server has them. What is of another room is no parent, as if it were not held."""
    draft.ensure_ids(event.prev_event_ids)
    parents = Parents([], [])
    for event_id in dict.fromkeys(event.prev_event_ids):
        row = draft.row(event_id)
        if row is None or row.outlier or row.room_nid != room.row.room_nid:
            parents.missing.append(event_id)
        else:
            parents.held.append(row)
    return parents


def place(draft: Draft, room: RoomDraft, event: Event, nid: int, parents: Parents) -> Placement:
    """The place of an event that is going to be in the timeline. Nothing is changed yet. `InvalidEvent` if it closes a circle."""
    arrived = draft.missing_row(event.event_id)
    if arrived is None and not parents.missing:
        ordering = order.above(parent.order for parent in parents.held)
        return Placement(tuple([parent.event_nid for parent in parents.held]), ordering, [], None, {})
    children = _children(draft, arrived)
    ordering = order.ordering(
        (parent.order for parent in parents.held),
        complete=not parents.missing,
        depth=event.depth,
        children=(child.order for child in children),
        room_max=room.max_order,
    )
    gaps = {event_id: _gap(draft, room, event_id, nid) for event_id in parents.missing}
    nids = {row.event_id: row.event_nid for row in parents.held} | {event_id: gap.event_nid for event_id, gap in gaps.items()}
    prev_events = tuple(nids[event_id] for event_id in dict.fromkeys(event.prev_event_ids))
    lowest = min((child.order for child in children), default=ordering + 1)
    moves = {} if lowest > ordering else _moves(draft, room, {nid: ordering}, lowest)
    if any(parent.event_nid in moves for parent in parents.held):
        raise InvalidEvent("its parents stand on the event itself: a circle, which only chosen event ids can form", event_id=event.event_id)
    return Placement(prev_events, ordering, list(gaps.values()), arrived, moves)


def _children(draft: Draft, arrived: MissingRow | None) -> list[EventRow]:
    if arrived is None:
        return []
    draft.ensure_rows(arrived.child_nids)
    return [draft.row_of(child) for child in arrived.child_nids]


def _gap(draft: Draft, room: RoomDraft, event_id: str, child_nid: int) -> MissingRow:
    """The row of a missing parent with one more child."""
    known = draft.missing_row(event_id)
    if known is not None:
        return known._replace(child_nids=(*known.child_nids, child_nid))
    outlier = draft.row(event_id)
    nid = draft.nid_for(event_id) if outlier is None else outlier.event_nid
    return MissingRow(nid, event_id, room.row.room_nid, covered=False, child_nids=(child_nid,))


def _moves(draft: Draft, room: RoomDraft, start: dict[int, int], lowest: int) -> dict[int, int]:
    """The events above a new one that must move up. Reads the order from ``lowest`` on, as far as it must."""
    limit = SWEEP_ROWS
    while True:
        held: list[EventRow] = draft.answer(("order", room.row.room_nid, lowest, limit))
        complete = len(held) < limit
        rows = _in_order(draft, room, held, lowest, upto=None if complete else held[-1].order)
        moved, enough = order.moved_up(start, rows)
        if enough or complete:
            return moved
        limit *= 4


def _in_order(
    draft: Draft, room: RoomDraft, held: Iterable[EventRow], lowest: int, upto: int | None
) -> list[tuple[int, int, tuple[int, ...]]]:
    """The events of the order from the database, with what this draft adds and moves."""
    latest = {row.event_nid: draft.rows.get(row.event_id) or row for row in held}
    added = [new.row for new in draft.new_events.values()] + list(draft.changed_events.values())
    latest.update((row.event_nid, row) for row in added if row.room_nid == room.row.room_nid and not row.outlier)
    rows = sorted((row.order, row.event_nid, row.prev_events) for row in latest.values())
    return [(nid, at, parents) for at, nid, parents in rows if at >= lowest and (upto is None or at < upto)]


class Ends(NamedTuple):
    """The forward extremities after an event, and the gaps that it covers besides those of its own parents.

    ``dropped``: what would be an extremity too, and is left out (`storage.persist.pruning`), or has lost what stood on it (`has_lost_cover`).
    """

    extremities: dict[int, None]
    covered: list[MissingRow]
    dropped: Sequence[int] = ()


def ends_after(draft: Draft, room: RoomDraft, row: EventRow, parents: Iterable[EventRow], *, covered: bool) -> Ends:
    """The ends of the room once an event stands on these parents. ``covered``: an extremity stands on the event already.

    What an accepted live event names as parent is no extremity, also behind events that cannot be one themselves: those not
    accepted, and backfilled ones.
    """
    left = dict(room.extremities)
    ends = Ends(left, [])
    front = list(parents)
    seen: set[int] = set()
    while front and len(seen) < WALK_EVENTS_MAX:
        parent = front.pop()
        left.pop(parent.event_nid, None)
        if not _may_end(parent) and parent.event_nid not in seen:
            seen.add(parent.event_nid)
            front.extend(_above(draft, parent, ends.covered))
    if _may_end(row) and not covered:
        left[row.event_nid] = None
    return ends


def has_lost_cover(draft: Draft, room: RoomDraft, row: EventRow, gap: MissingRow) -> bool:
    """Whether an event arrives that is no extremity, though what stood on it was purged since: it is to be remembered that it is none."""
    if not (gap.covered and room.row.removals and _may_end(row)):
        return False
    draft.ensure_rows(gap.child_nids)
    children = (draft.find_row(nid) for nid in gap.child_nids)
    return not any(child is not None and not child.outlier and _may_end(child) for child in children)


def _may_end(row: EventRow) -> bool:
    """Whether an event may be a forward extremity at all."""
    return row.accepted and not row.backfilled


def _above(draft: Draft, row: EventRow, covered: list[MissingRow]) -> list[EventRow]:
    """The parents of an event that cannot be an extremity; gaps among them are covered now."""
    draft.ensure_rows(row.prev_events)
    found = [(nid, draft.find_row(nid)) for nid in row.prev_events]
    for nid, parent in found:
        gap = draft.gap(nid) if parent is None or parent.outlier else None
        if gap is not None and not gap.covered:
            covered.append(gap._replace(covered=True))
    return [parent for _, parent in found if parent is not None and not parent.outlier]
