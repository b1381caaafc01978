"""Which forward extremities a room goes on without, where it has more than it may: so that each append costs bounded work.

Every extremity whose state differs makes each change of the current state dearer, and anybody in a room can leave as many as they like by
sending events with parents of long ago. So beyond ``Config.forward_extremities_max`` (20: as many parents as an event may have), those
whose state the others cover are dropped, the one furthest back in the topological order first:

1. one with the same state after it as another one further on;
2. one that has nothing of the current state for itself, and without which the states of the others resolve to it. `TRIED_MAX` are tried;
3. if none is found, the room stays as it was and the event in hand does not become an extremity.

So dropping never changes the current state: 1 and 2 by their definition, 3 because a room's current state is that of its extremities.
It is as if somebody had sent a message on top of the dropped extremity and the others, which ends it as well, and which servers do for
that purpose; here nobody has to be allowed to. Nothing else changes: the event is held, accepted, in the timeline, and has its states; an
event that names it as parent has the state after it among those that it resolves, and becomes an extremity like any other. By 3 an
accepted state event may not be in the current state. It comes in by the next event that stands on it, or whose author names it.

A room that has more than it may (the limit was larger once) keeps what is not covered, and does not grow.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from storage.persist.model.event_changes import EventChanges
from storage.persist.model.rows import EventRow
from storage.persist.plan.state_merge import resolution
from storage.state.groups import REMOVED, Group, changed_keys

TRIED_MAX: Final = 4  # resolutions to find one without which the others come to the same


def kept_extremities(
    changes: EventChanges, extremities: Mapping[int, None], row: EventRow, after: Group
) -> dict[int, None]:
    """The extremities that stay, in their order.

    ``row`` is the event in hand, ``after`` the state after it.
    """
    limit = changes.change_set.extremities_max
    if limit is None or len(extremities) <= limit:
        return dict(extremities)
    changes.change_set.ensure_rows(extremities)
    groups = {
        nid: after if nid == row.event_nid else changes.group(changes.change_set.row_of(nid).after)
        for nid in extremities
    }
    ordered = sorted(extremities, key=lambda nid: changes.change_set.row_of(nid).order)
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
    """Without the first of those whose states are equal to one further on."""
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
    """Without the first of those that make no difference to the resolution; only some are tried.

    All states differ by now.
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
    """Those that alone have some value of the resolution: no need to resolve again to see what they are good for."""
    found = set()
    for key, value in resolved.items():
        having = [nid for nid in nids if groups[nid].entries.get(key, REMOVED) == value]
        if len(having) == 1:
            found.add(having[0])
    return found


def _same(base: Group, one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Whether two resolutions come to the same.

    ``base`` is one of the states of both: what they do not mention is as in it.
    """
    return all(
        one.get(key, base.entries.get(key, REMOVED))
        == other.get(key, base.entries.get(key, REMOVED))
        for key in one.keys() | other.keys()
    )
