"""Dictionaries with a size limit, for caches that are trimmed between batches."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R", bound=tuple[Any, ...])


class BoundedCache(dict[K, V]):
    """A dict that drops its older half when it exceeds its limit.

    It is trimmed between batches, never while planning.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def trim(self) -> None:
        """Drop the older half if there are more entries than the limit."""
        if len(self) > self.limit:
            for key in list(self)[: len(self) - self.limit // 2]:
                del self[key]


class RowCache(BoundedCache[K, tuple[Any, ...]], Generic[K, R]):
    """A cache of named tuples of one kind, which it keeps as plain tuples.

    The garbage collector stops visiting a plain tuple of numbers and text, but never an instance of
    a subclass. So a full collection takes less than half of the time.
    """

    def __init__(self, limit: int, kind: type[R]) -> None:
        super().__init__(limit)
        self._as_row: Callable[[tuple[Any, ...]], R] = partial(tuple.__new__, kind)

    def row(self, key: K) -> R | None:
        found = self.get(key)
        return None if found is None else self._as_row(found)

    def keep(self, key: K, row: R) -> None:
        self[key] = tuple(row)

    def keep_all(self, rows: Mapping[K, R]) -> None:
        self.update(zip(rows, map(tuple, rows.values()), strict=True))

    def take(self, key: K) -> R | None:
        """Remove the row and return it; return None if it is not cached."""
        found = self.pop(key, None)
        return None if found is None else self._as_row(found)
