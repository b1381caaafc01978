"""Split state maps into unconflicted and conflicted keys."""

from collections.abc import Mapping, Sequence

from storage.ids import EventId, StateKey

StateMap = Mapping[StateKey, EventId]
Conflicts = dict[StateKey, set[EventId]]


def split_conflicts(state_maps: Sequence[StateMap]) -> tuple[dict[StateKey, EventId], Conflicts]:
    """Return (unconflicted, conflicted): values that all maps share, and all other values by key.

    A key that one map lacks is conflicted, with the values that the others have, as versions 2 and
    2.1 of the algorithm define it. Version 1 differs; `storage.auth.resolution.v1` handles that. No
    maps give two empty results.
    """
    if not state_maps:
        return {}, {}
    first, *others = state_maps
    unconflicted = {
        key: value
        for key, value in first.items()
        if all(other.get(key) == value for other in others)
    }
    conflicted: Conflicts = {}
    for state_map in state_maps:
        for key, value in state_map.items():
            if key not in unconflicted:
                conflicted.setdefault(key, set()).add(value)
    return unconflicted, conflicted
