"""Limit the forward extremities of a room, so that each append costs bounded work.

Each extremity with a different state makes every change of the current state dearer. Anyone in a
room can create any number of them by sending events with old prev_events. So above
``Config.forward_extremities_max`` some extremities are dropped. The default limit is the number of
prev_events that an event may have. An extremity may be dropped if the others supersede its state;
the lowest in the topological order goes first:

1. One that has the same state after it as a higher one.
2. One without which the states of the others resolve to the same state. It must not be the only
   one with some value of the current state. At most `TRIED_MAX` are tried.
3. If there is none, the event being planned does not become an extremity.

So dropping never changes the current state: 1 and 2 by definition, and 3 because the current state
is the resolution of the states after the extremities. The effect is as if a user had sent a message
whose prev_events are the dropped extremity and the others. Servers do send such messages to reduce
extremities; here nobody needs permission.

Nothing else changes. The event is stored and accepted, is in the timeline, and has its states. An
event with a dropped one as prev_event resolves the state after it like any other, and becomes an
extremity itself. Because of 3, an accepted state event may be absent from the current state. It
enters with the next event that has it among its ancestors.

If the limit was larger before, the extremities that cannot be dropped stay, and no more are added.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow
from storage.persist.plan.state_merge import resolution
from storage.state.groups import REMOVED, Group, changed_keys

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
    found = set()
    for key, value in resolved.items():
        having = [nid for nid in nids if groups[nid].entries.get(key, REMOVED) == value]
        if len(having) == 1:
            found.add(having[0])
    return found


def _same(base: Group, one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Return whether two resolutions give the same state.

    ``base`` is a state that was resolved in both. A key that a resolution does not list has the
    value of ``base``.
    """
    return all(
        one.get(key, base.entries.get(key, REMOVED))
        == other.get(key, base.entries.get(key, REMOVED))
        for key in one.keys() | other.keys()
    )
