"""A dictionary with a size limit, for caches that are trimmed between batches."""

from collections.abc import Hashable
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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
