"""Find or add the state groups before and after an event, and of the room's current state.

A state equal to a stored one gets that group. Any other gets a new group, stored as the difference
from a group nearby.
"""

from collections.abc import Mapping

from storage.errors import StorageCorrupt
from storage.ids import EventId
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.event_changes import EventChanges
from storage.persist.model.missing_data import StalePlan
from storage.persist.model.rows import EventRow
from storage.persist.plan import audience
from storage.persist.plan.partial_state import keeping_the_join
from storage.persist.plan.state_resolution import merged_state, same_state
from storage.persist.plan.topology import ParentEvents
from storage.persistent_map import Map
from storage.state.groups import REMOVED, Group, State, root_group
from storage.visibility.multirange import NOTHING


def before_event(
    changes: EventChanges, state_before: tuple[EventId, ...] | None, parents: ParentEvents
) -> Group:
    """Return the state before an event.

    It is the resolution of the states after its parents. If a parent is missing, it is the state
    that the caller gave.
    """
    if parents.missing:
        return _caller_state(changes, state_before or (), parents)
    if not parents.stored:
        return empty(changes)
    states = [changes.group(parent.after) for parent in parents.stored]
    return merged(changes, [*keeping_the_join(changes, states)])


def after_event(
    changes: EventChanges, row: EventRow, before: Group, *, becomes_current: bool
) -> Group:
    """Return the state after an accepted event.

    ``becomes_current`` makes it the room's current state.
    """
    if row.state_key_nid is not None and before.entries.get(row.state_key_nid) != row.event_nid:
        return _new(
            changes, before, {row.state_key_nid: row.event_nid}, becomes_current=becomes_current
        )
    if becomes_current:
        audience.advance(changes, before)
    return before


def current_after(
    changes: EventChanges, extremities: Mapping[int, None], nid: int, after: Group
) -> Group:
    """Make the resolution of the states after all extremities the room's current state.

    In a partial room the join is kept (`keeping_the_join`). Return its group. ``nid`` is the event
    being planned, and ``after`` the state after it. Raise `StalePlan` without extremities: another
    writer has stored the event that has ``nid`` and all known extremities as parents.
    """
    if not extremities:
        raise StalePlan("no forward extremity is left", room_id=changes.room.row.room_id)
    others = [
        changes.group(changes.change_set.events.row_of(extremity).after)
        for extremity in extremities
        if extremity != nid
    ]
    states = [after, *others] if nid in extremities else others
    current = merged(changes, [*keeping_the_join(changes, states)])
    audience.advance(changes, current)
    return current


def empty(changes: EventChanges) -> Group:
    """Return the room's empty state group; add it if the room has no state yet."""
    if changes.main is None:
        number = changes.change_set.states.empty_nid(changes.room_nid)
        group = changes.add_group(
            root_group(number, changes.room_nid, Map(), changes.next_audience)
        )
        audience.advance(changes, group)
        return group
    existing = same_state(changes, root_group(0, changes.room_nid, Map(), NOTHING))
    if existing is None:
        raise StorageCorrupt(
            "a room has state groups, but not the empty one that every room begins with",
            room_nid=changes.room_nid,
        )
    return existing


def merged(changes: EventChanges, groups: list[Group]) -> Group:
    """Return the group of the resolution of several states."""
    return merged_state(changes, groups, lambda base, change: _sought(changes, base, change))


def _caller_state(
    changes: EventChanges, event_ids: tuple[EventId, ...], parents: ParentEvents
) -> Group:
    """Return the group of a state that the caller gave.

    A new group is derived from whichever is nearest: the current state or the state after a stored
    parent. The change is kept until the event is planned, because the state may be large.
    """
    kept, afters = changes.change_set.states.nearest, tuple(row.after for row in parents.stored)
    key = changes.room_nid, changes.main, afters, event_ids
    if key not in kept:
        entries = _entries(changes.change_set, event_ids)
        existing = same_state(changes, root_group(0, changes.room_nid, entries, NOTHING))
        if existing is not None:
            return existing
        candidates = [(base, _between(base.entries, entries)) for base in _bases(changes, parents)]
        kept[key] = min(candidates, key=lambda pair: len(pair[1]))
    elif changes.main is None:
        empty(changes)  # which is the base then, or what comes before it
    base, change = kept[key]
    return _sought(changes, base, change) if change else base


def _entries(change_set: ChangeSet, event_ids: tuple[EventId, ...]) -> State:
    """Return a state by key; ids of events that are not stored are left out."""
    rows = [row for event_id in event_ids if (row := change_set.events.row(event_id)) is not None]
    return Map({row.state_key_nid: row.event_nid for row in rows if row.state_key_nid is not None})


def _bases(changes: EventChanges, parents: ParentEvents) -> list[Group]:
    """Return the states near one that the caller gave: the current one, and those after parents."""
    return [
        changes.main_group() or empty(changes),
        *(changes.group(parent.after) for parent in parents.stored),
    ]


def _between(old: State, new: State) -> dict[int, int]:
    """Return the change from one state to another, with `REMOVED` for keys that are gone."""
    change = {key: event for key, event in new.items() if old.get(key) != event}
    change.update((key, REMOVED) for key in old if key not in new)
    return change


def _new(
    changes: EventChanges, base: Group, change: Mapping[int, int], *, becomes_current: bool
) -> Group:
    """Add a group for the state that differs from ``base`` by ``change``, with its audience."""
    group = _derived(changes, base, change)
    if not becomes_current:
        return changes.add_group(group._replace(audience=audience.branch(changes, base, group)))
    if changes.main is None:
        empty(changes)
    audience.advance(changes, group)
    return changes.add_group(group._replace(audience=changes.current_audience))


def _sought(changes: EventChanges, base: Group, change: Mapping[int, int]) -> Group:
    """Add a group as `_new`, for a state that another merge or event may have again."""
    group = _derived(changes, base, change)
    number = audience.branch(changes, base, group)
    return changes.add_group(group._replace(audience=number, is_sought=True))


def _derived(changes: EventChanges, base: Group, change: Mapping[int, int]) -> Group:
    group = changes.change_set.states.derive(base, change)
    changes.change_set.names.ensure_state_key_names(group.steps[-1].delta)
    return group
