"""Persistent maps: a changed copy costs O(log n) and shares the rest with the original.

`Map` is the one of immutables. It is the fastest to read, and the planner reads states for each
event. It has no wheel for Python 3.14. Where it is not installed, `Map` is the one of rpds, whose
reads cost three times as much. Use only the methods that both have: `get`, `[]`, `in`, `len`,
`==`, iteration, `keys`, `values`, `items`, and `update` with a mapping.

The map of rpds has no subscript at run time: outside functions use `IntMap`, or quotes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from immutables import Map

    IntMap: TypeAlias = Map[int, int]
else:
    try:
        from immutables import Map
    except ModuleNotFoundError:
        from rpds import HashTrieMap as Map

    IntMap = Map

__all__ = ["IntMap", "Map", "changed"]

K = TypeVar("K")
V = TypeVar("V")


def changed(
    entries: "Map[K, V]", change: Mapping[K, V | None], *, removed: V | None = None
) -> "Map[K, V]":
    """Return a map with a change applied; the value ``removed`` removes its key."""
    mutation = entries.mutate()
    for key, value in change.items():
        if value is not None and value != removed:
            mutation[key] = value
        elif key in mutation:
            del mutation[key]
    return mutation.finish()


def _changed_by_key(
    entries: "Map[K, V]", change: Mapping[K, V | None], *, removed: V | None = None
) -> "Map[K, V]":
    """Do the same where maps have no draft."""
    result: Any = entries
    for key, value in change.items():
        drop = value is None or value == removed
        result = result.discard(key) if drop else result.insert(key, value)
    return cast("Map[K, V]", result)


if not hasattr(Map, "mutate"):
    changed = _changed_by_key
