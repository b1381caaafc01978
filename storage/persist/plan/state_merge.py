"""Merge several states: resolve their conflicts and store the smallest difference.

The merged state is stored as a difference to the state that it differs least from. Only keys in
which the states differ are compared, and only auth events that can matter are loaded. So no work
here is proportional to the size of the room's state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from storage.persist.model.event_changes import EventChanges
from storage.persist.plan.state_resolution import StateResolution
from storage.state.groups import REMOVED, Group, changed_keys, derive

Derive = Callable[[Group, Mapping[int, int]], Group]


def merged_state(changes: EventChanges, groups: Sequence[Group], new: Derive) -> Group:
    """Return the group of the resolution of these states.

    ``new`` makes a group from a base and a change. It is called only if no group has that state.
    """
    distinct = {group.state_group: group for group in groups}
    if len(distinct) == 1:
        return groups[0]
    question = frozenset(distinct)
    known = changes.merged_before(question)
    if known is not None:
        return known
    states = sorted(distinct.values(), key=lambda group: group.state_group)
    resolved = resolution(changes, states)
    result = _smallest(changes, states, resolved, new)
    changes.merged[question] = result.state_group
    return result


def resolution(changes: EventChanges, states: Sequence[Group]) -> dict[int, int]:
    """Return the resolved event nid of each key in which these states differ.

    It is `REMOVED` if the resolved state lacks the key. No two of the states are equal. The work is
    kept in the change set, so that it continues after `MissingData` (`StateResolution`).
    """
    if len(states) == 1:
        return {}
    change_set, question = changes.change_set, frozenset(group.state_group for group in states)
    work = change_set.states.resolving.get(question)
    if work is None:
        work = change_set.states.resolving[question] = StateResolution(
            change_set, changes.room.row, states
        )
    return work.run(change_set)


def _smallest(
    changes: EventChanges, states: Sequence[Group], resolved: Mapping[int, int], new: Derive
) -> Group:
    base, change = min(_changes(changes, states, resolved), key=lambda pair: len(pair[1]))
    if not change:
        return base
    return same_state(changes, derive(base, change, 0, 0)) or new(base, change)


def _changes(
    changes: EventChanges, states: Sequence[Group], resolved: Mapping[int, int]
) -> Iterator[tuple[Group, dict[int, int]]]:
    """Yield groups to derive the resolved state from, each with the change that leads to it.

    The change with the fewest keys is always among them. The room's current state comes first:
    while a fork grows, each event of a branch changes it by one key. After a change of at most one
    key, only states that need no change are yielded: `_has` finds the difference of the others in
    their first keys.
    """
    main = changes.main_group()
    if main is not None:
        keys = changed_keys(main, states[0]) - resolved.keys()
        change = _change(
            main, {**resolved, **{key: states[0].entries.get(key, REMOVED) for key in keys}}
        )
        yield main, change
        if len(change) <= 1:
            yield from ((group, {}) for group in states if _has(group, resolved))
            return
    for group in states:
        yield group, _change(group, resolved)


def _has(group: Group, target: Mapping[int, int]) -> bool:
    return all(group.entries.get(key, REMOVED) == value for key, value in target.items())


def _change(base: Group, target: Mapping[int, int]) -> dict[int, int]:
    """Return the part of ``target`` in which it differs from ``base``."""
    return {key: value for key, value in target.items() if base.entries.get(key, REMOVED) != value}


def same_state(changes: EventChanges, wanted: Group) -> Group | None:
    """Return a group of the room that has exactly this state, or None.

    ``wanted`` carries the state and its digest; it need not be a group that will be stored. The
    digest finds candidates, which are then compared key by key. States after one event have no
    digest in the table, mostly (`storage.state.groups.keeps_digest`), and are not found: the
    caller compares with those nearby. A state may so have two groups, which are read alike.
    """
    digest = wanted.digest
    candidates = [
        *changes.room.group_digests.get(digest, ()),
        *(group.state_group for group in changes.groups.values()),
    ]
    candidates += changes.change_set.answers.answer(("digest", changes.room_nid, digest))
    for number in candidates:
        group = changes.group(number)
        if group.digest == digest and not changed_keys(group, wanted):
            return group
    return None
