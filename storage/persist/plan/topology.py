"""Place a timeline event in the topological order.

The parents of an event are its prev_events. A parent that is not in the timeline is a missing
event: a row of `missing_events`, which lists the children that wait for it. When a missing event
arrives, it has to get a position below its children. If that is impossible, the events above it are
reordered:

    stored        B at 10, whose parent A is missing
    A arrives     its own parent P is at 12: A gets 13, and B moves up to 14
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from storage.errors import InvalidEvent
from storage.event import Event
from storage.graph import topological_ordering
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow, MissingRow, RoomChanges
from storage.persist.plan.state_resolution import resolution
from storage.state.groups import REMOVED, Group, changed_keys

SWEEP_ROWS = 512  # events read first when events have to be reordered; later reads are larger


# non-accepted and backfilled events that `extremities_after` walks through at most
WALK_EVENTS_MAX = 1_000


class ParentEvents(NamedTuple):
    """The parents of an event: rows of those in the timeline, and ids of the others, each once.

    The others are not stored, stored as outliers, or events of another room.
    """

    stored: list[EventRow]
    missing: list[str]


class Placement(NamedTuple):
    """The topological position of an event and what it changes for others.

    ``prev_events`` are nids, also of missing events. ``missing`` are the missing parents, with this
    event among their children. ``arrived`` is the gap that the event fills. ``reordered`` has the
    new positions of reordered events, by nid.
    """

    prev_events: tuple[int, ...]
    order: int
    missing: list[MissingRow]
    arrived: MissingRow | None
    reordered: dict[int, int]

    @property
    def is_superseded(self) -> bool:
        """Return whether an accepted live event descends from the event already."""
        return self.arrived is not None and self.arrived.superseded


def parents_of(change_set: ChangeSet, room: RoomChanges, event: Event) -> ParentEvents:
    """Return the parents of an event.

    An event of another room counts as missing.
    """
    change_set.events.ensure_ids(event.prev_event_ids)
    parents = ParentEvents([], [])
    for event_id in dict.fromkeys(event.prev_event_ids):
        row = change_set.events.row(event_id)
        if row is None or row.outlier or row.room_nid != room.row.room_nid:
            parents.missing.append(event_id)
        else:
            parents.stored.append(row)
    return parents


def placement_of(
    change_set: ChangeSet, room: RoomChanges, event: Event, nid: int, parents: ParentEvents
) -> Placement:
    """Return the placement of an event that is going to be in the timeline.

    Nothing is changed yet. Raise `InvalidEvent` if the event closes a cycle of prev_events.
    """
    arrived = change_set.events.missing_row(event.event_id)
    if arrived is None and not parents.missing:
        ordering = topological_ordering.next_after(parent.order for parent in parents.stored)
        return Placement(
            tuple([parent.event_nid for parent in parents.stored]), ordering, [], None, {}
        )
    children = _children(change_set, arrived)
    ordering = topological_ordering.ordering(
        (parent.order for parent in parents.stored),
        complete=not parents.missing,
        depth=event.depth,
        children=(child.order for child in children),
        room_max=room.max_order,
    )
    gaps = {event_id: _gap(change_set, room, event_id, nid) for event_id in parents.missing}
    nids = {row.event_id: row.event_nid for row in parents.stored} | {
        event_id: gap.event_nid for event_id, gap in gaps.items()
    }
    prev_events = tuple(nids[event_id] for event_id in dict.fromkeys(event.prev_event_ids))
    lowest = min((child.order for child in children), default=ordering + 1)
    reordered = {} if lowest > ordering else _reordered(change_set, room, {nid: ordering}, lowest)
    # a parent that must move above the event is its descendant as well
    if any(parent.event_nid in reordered for parent in parents.stored):
        raise InvalidEvent(
            "its parents descend from the event itself: a cycle, which only chosen ids can form",
            event_id=event.event_id,
            key="prev_events",
        )
    return Placement(prev_events, ordering, list(gaps.values()), arrived, reordered)


def _children(change_set: ChangeSet, arrived: MissingRow | None) -> list[EventRow]:
    """Return the rows of the events that wait for this one as their parent."""
    if arrived is None:
        return []
    change_set.events.ensure_rows(arrived.child_nids)
    return [change_set.events.row_of(child) for child in arrived.child_nids]


def _gap(change_set: ChangeSet, room: RoomChanges, event_id: str, child_nid: int) -> MissingRow:
    """Return the row of a missing parent with one more child.

    An outlier keeps its nid; any other new missing event gets the nid that it will be stored under.
    """
    gap = change_set.events.missing_row(event_id)
    if gap is not None:
        return gap._replace(child_nids=(*gap.child_nids, child_nid))
    outlier = change_set.events.row(event_id)
    nid = change_set.events.nid_for(event_id) if outlier is None else outlier.event_nid
    return MissingRow(nid, event_id, room.row.room_nid, superseded=False, child_nids=(child_nid,))


def _reordered(
    change_set: ChangeSet, room: RoomChanges, start: dict[int, int], lowest: int
) -> dict[int, int]:
    """Return the new positions of the events that a new one forces up, by nid.

    Read the topological order upwards from ``lowest``, the position of the lowest child. Stop at
    the first point above which nothing has to move.
    """
    limit = SWEEP_ROWS
    while True:
        stored_rows: list[EventRow] = change_set.answers.answer(
            ("order", room.row.room_nid, lowest, limit)
        )
        complete = len(stored_rows) < limit
        rows = _in_order(
            change_set, room, stored_rows, lowest, upto=None if complete else stored_rows[-1].order
        )
        # enough: nothing above these rows has to move
        orderings, enough = topological_ordering.raised_orderings(start, rows)
        if enough or complete:
            return orderings
        limit *= 4


def _in_order(
    change_set: ChangeSet,
    room: RoomChanges,
    stored_rows: Iterable[EventRow],
    lowest: int,
    upto: int | None,
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (nid, position, parents) in topological order, with this change set's changes applied.

    ``stored_rows`` are rows from the database. Rows at ``upto`` and above are left out: at that
    position the database may have more events than were read.
    """
    latest = {row.event_nid: change_set.events.rows.get(row.event_id) or row for row in stored_rows}
    added = [new.row for new in change_set.events.new_events.values()] + list(
        change_set.events.changed_events.values()
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
    """The forward extremities after an event, and the gaps that it supersedes.

    ``superseded`` does not list the event's own missing parents. ``dropped`` are events that would
    be extremities but are left out: above the limit of extremities, or because the
    events that superseded them were purged (`is_extremity_again`). ``refused`` are the refused
    events that are superseded now.
    """

    extremities: dict[int, None]
    superseded: list[MissingRow]
    dropped: Sequence[int] = ()
    refused: Sequence[EventRow] = ()


def extremities_after(
    change_set: ChangeSet,
    room: RoomChanges,
    row: EventRow,
    parents: Iterable[EventRow],
    *,
    superseded: bool,
) -> ExtremityChange:
    """Return the room's forward extremities once this event has these parents.

    The parent of an accepted live event is no extremity. Events that cannot be extremities
    (rejected, soft-failed or backfilled ones) are transparent: their parents are superseded too.
    ``superseded`` means that an extremity descends from the event already, so the event itself
    does not become one.
    """
    left = dict(room.extremities)
    refused: list[EventRow] = []
    change = ExtremityChange(left, [], refused=refused)
    stack = list(parents)
    seen: set[int] = set()
    while stack and len(seen) < WALK_EVENTS_MAX:
        parent = stack.pop()
        left.pop(parent.event_nid, None)
        if not _may_end(parent) and parent.event_nid not in seen:
            seen.add(parent.event_nid)
            stack.extend(stored_parents(change_set, parent, change.superseded))
            if parent.refused is not None and not parent.superseded:
                refused.append(parent)
    if _may_end(row) and not superseded:
        left[row.event_nid] = None
    return change


def is_extremity_again(
    change_set: ChangeSet, room: RoomChanges, row: EventRow, gap: MissingRow
) -> bool:
    """Return whether an arriving event is superseded only by events that were purged since.

    By its stored children alone it would be an extremity. So it is recorded as dropped.
    """
    if not (gap.superseded and room.row.removals and _may_end(row)):
        return False
    change_set.events.ensure_rows(gap.child_nids)
    children = (change_set.events.find_row(nid) for nid in gap.child_nids)
    return not any(
        child is not None and not child.outlier and _may_end(child) for child in children
    )


def _may_end(row: EventRow) -> bool:
    """Return whether an event may be a forward extremity at all."""
    return row.accepted and not row.backfilled


def stored_parents(
    change_set: ChangeSet, row: EventRow, superseded: list[MissingRow]
) -> list[EventRow]:
    """Return the parents of a stored event that are in the timeline.

    Add its missing parents to ``superseded``.
    """
    change_set.events.ensure_rows(row.prev_events)
    parents = [(nid, change_set.events.find_row(nid)) for nid in row.prev_events]
    for nid, parent in parents:
        gap = change_set.events.gap(nid) if parent is None or parent.outlier else None
        if gap is not None and not gap.superseded:
            superseded.append(gap._replace(superseded=True))
    return [parent for _, parent in parents if parent is not None and not parent.outlier]


# --------------------------------------------------------------------------------------------------
# Limit the forward extremities of a room, so that each append costs bounded work.
#
# Each extremity with a different state makes every change of the current state dearer. Anyone in a
# room can create any number of them by sending events with old prev_events. So above
# ``Config.forward_extremities_max`` some extremities are dropped. The default limit is the number
# of prev_events that an event may have. An extremity may be dropped if the others supersede its
# state; the lowest in the topological order goes first:
#
# 1. One that has the same state after it as a higher one.
# 2. One without which the states of the others resolve to the same state. It must not be the only
#    one with some value of the current state. At most `TRIED_MAX` are tried.
# 3. If there is none, the event being planned does not become an extremity.
#
# So dropping never changes the current state: 1 and 2 by definition, and 3 because the current
# state is the resolution of the states after the extremities. The effect is as if a user had sent a
# message whose prev_events are the dropped extremity and the others. Servers do send such messages
# to reduce extremities; here nobody needs permission.
#
# Nothing else changes. The event is stored and accepted, is in the timeline, and has its states. An
# event with a dropped one as prev_event resolves the state after it like any other, and becomes an
# extremity itself. Because of 3, an accepted state event may be absent from the current state. It
# enters with the next event that has it among its ancestors.
#
# If the limit was larger before, the extremities that cannot be dropped stay, and no more are
# added.

TRIED_MAX: Final = 4  # extremities whose removal is tried by resolving the others' states


def kept_extremities(
    changes: EventChanges, extremities: Mapping[int, None], row: EventRow, after: Group
) -> dict[int, None]:
    """Return the extremities that stay, in their order.

    ``row`` is the event being planned, ``after`` the state after it.
    """
    limit = changes.change_set.extremities_max
    if limit is None or len(extremities) <= limit:
        return dict(extremities)
    changes.change_set.events.ensure_rows(extremities)
    groups = {
        nid: after
        if nid == row.event_nid
        else changes.group(changes.change_set.events.row_of(nid).after)
        for nid in extremities
    }
    ordered = sorted(extremities, key=lambda nid: changes.change_set.events.row_of(nid).order)
    left = _without_covered(changes, groups, _without_doubles(groups, ordered, limit), limit)
    if (
        len(left) > limit
        and row.event_nid in extremities
        and len(extremities) > len(changes.room.extremities)
    ):
        left = _without_doubles(groups, [nid for nid in ordered if nid != row.event_nid], limit)
    staying = set(left)
    return {nid: None for nid in extremities if nid in staying}


def _without_doubles(groups: Mapping[int, Group], nids: Sequence[int], limit: int) -> list[int]:
    """Return these without those whose state equals that of a later one, as far as needed.

    ``nids`` are in topological order. The digest finds candidates; the states are then compared.
    """
    last = {groups[nid].digest: nid for nid in nids}
    excess = len(nids) - limit
    left = []
    for nid in nids:
        other = last[groups[nid].digest]
        if excess > 0 and other != nid and not changed_keys(groups[nid], groups[other]):
            excess -= 1
        else:
            left.append(nid)
    return left


def _without_covered(
    changes: EventChanges, groups: Mapping[int, Group], nids: Sequence[int], limit: int
) -> list[int]:
    """Return these without those that do not change the resolution, as far as needed.

    All their states differ. Only `TRIED_MAX` of them are tried.
    """
    left = list(nids)
    if len(left) <= limit:
        return left
    whole = resolution(changes, [groups[nid] for nid in left])
    needed = _needed(groups, left, whole)
    for nid in [nid for nid in nids if nid not in needed][:TRIED_MAX]:
        others = [groups[other] for other in left if other != nid]
        if len(left) > limit and _same(others[0], whole, resolution(changes, others)):
            left.remove(nid)
    return left


def _needed(
    groups: Mapping[int, Group], nids: Sequence[int], resolved: Mapping[int, int]
) -> set[int]:
    """Return those that alone have some value of the resolution.

    They are not tried: without them that value would be lost.
    """
    needed = set()
    for key, value in resolved.items():
        having = [nid for nid in nids if groups[nid].entries.get(key, REMOVED) == value]
        if len(having) == 1:
            needed.add(having[0])
    return needed


def _same(base: Group, resolved: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Return whether two resolutions give the same state.

    ``base`` is a state that was resolved in both. A key that a resolution does not list has the
    value of ``base``.
    """
    return all(
        resolved.get(key, base.entries.get(key, REMOVED))
        == other.get(key, base.entries.get(key, REMOVED))
        for key in resolved.keys() | other.keys()
    )
