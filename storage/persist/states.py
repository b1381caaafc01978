"""The state before and after an event, and the room's current state: which groups they are."""

from collections.abc import Mapping

from immutables import Map

from storage.errors import StorageCorrupt
from storage.ids import EventId
from storage.persist import audience
from storage.persist.merge import merge, same_state
from storage.persist.place import Parents
from storage.persist.rows import EventRow
from storage.persist.step import Step
from storage.state.groups import REMOVED, Group, State, derive, root_group
from storage.visibility.numbers import NOTHING


def before_event(step: Step, given: tuple[EventId, ...] | None, parents: Parents) -> Group:
    """The state before an event: given, or that after its parents."""
    if parents.missing:
        return _given(step, given or (), parents)
    if not parents.held:
        return empty(step)
    return merged(step, [step.group(parent.after) for parent in parents.held])


def after_event(step: Step, row: EventRow, before: Group, *, becomes_current: bool) -> Group:
    """The state after an accepted event; ``becomes_current`` says that it is the room's current state now."""
    if row.state_key_nid is not None and before.entries.get(row.state_key_nid) != row.event_nid:
        return _new(step, before, {row.state_key_nid: row.event_nid}, becomes_current=becomes_current)
    if becomes_current:
        audience.advance(step, before)
    return before


def current_after(step: Step, extremities: Mapping[int, None], nid: int, after: Group) -> Group:
    """The room's current state: the resolution of the states after all extremities; ``after`` is that of the event in hand."""
    others = [step.group(step.draft.row_of(one).after) for one in extremities if one != nid]
    current = merged(step, [after, *others] if nid in extremities else others)
    audience.advance(step, current)
    return current


def empty(step: Step) -> Group:
    """The empty state of the room, with which everything begins; made if it is not there."""
    if step.main is None:
        group = step.add_group(root_group(step.draft.blocks.take("state_group_nids"), step.room_nid, Map(), step.next_audience))
        audience.advance(step, group)
        return group
    found = same_state(step, root_group(0, step.room_nid, Map(), NOTHING))
    if found is None:
        raise StorageCorrupt("a room has a state, and not the empty state that it began with", room_nid=step.room_nid)
    return found


def merged(step: Step, groups: list[Group]) -> Group:
    """The resolution of several states, as a group."""
    return merge(step, groups, lambda base, change: _new(step, base, change, becomes_current=False))


def _given(step: Step, given: tuple[EventId, ...], parents: Parents) -> Group:
    """The group of a state that the caller gives, written as a difference to a state nearby."""
    draft = step.draft
    rows = [row for one in given if (row := draft.row(one)) is not None]
    entries = Map({row.state_key_nid: row.event_nid for row in rows if row.state_key_nid is not None})
    known = same_state(step, root_group(0, step.room_nid, entries, NOTHING))
    if known is not None:
        return known
    bases = [step.main_group() or empty(step), *(step.group(parent.after) for parent in parents.held)]
    changes = [(base, _between(base.entries, entries)) for base in bases]
    base, change = min(changes, key=lambda pair: len(pair[1]))
    return _new(step, base, change, becomes_current=False)


def _between(old: State, new: State) -> dict[int, int]:
    change = {key: event for key, event in new.items() if old.get(key) != event}
    change.update((key, REMOVED) for key in old if key not in new)
    return change


def _new(step: Step, base: Group, change: Mapping[int, int], *, becomes_current: bool) -> Group:
    """A group for a state that differs from ``base``, with its audience."""
    group = derive(base, change, step.draft.group_nid_for(base, change), NOTHING)
    step.draft.ensure_state_key_names(group.steps[-1].delta)
    if not becomes_current:
        return step.add_group(group._replace(audience=audience.branch(step, base, group)))
    if step.main is None:
        empty(step)
    audience.advance(step, group)
    return step.add_group(group._replace(audience=step.current_audience))
