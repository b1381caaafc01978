"""Exceptions of planning when it cannot continue.

There is data to load, the time slice is over, or the cached rows are stale.
"""

from collections.abc import Container, Hashable, Iterable
from typing import Any, Final

from storage.errors import StorageCorrupt

ABSENT: Final[Any] = None  # looked up in the database, and absent


class MissingData(Exception):  # noqa: N818  # a request for data, not an error
    """Planning needs these keys of one kind of data before it can continue."""

    def __init__(self, kind: str, keys: Iterable[Hashable]) -> None:
        super().__init__(kind)
        self.kind = kind
        self.keys: set[Hashable] = set(keys)


class TimeSliceOver(MissingData):
    """The time slice ended during a state resolution. The next call continues where it stopped."""

    def __init__(self) -> None:
        super().__init__("turn", ())


class StalePlan(StorageCorrupt):
    """The rows that the plan reads contradict each other: plan again without cached rows.

    It reaches the caller only if rows that were just read, under the locks, are contradictory too.
    """


def ensure(
    kind: str,
    keys: Iterable[Any],
    overlay: Container[Any],
    cache: Container[Any],
) -> None:
    """Raise `MissingData` for the keys that neither the batch nor a cache knows."""
    unknown = [key for key in keys if key not in overlay and key not in cache]
    if unknown:
        raise MissingData(kind, unknown)


# --------------------------------------------------------------------------------------------------
# Answers of the database to questions that no cache can answer.


class Answers:
    """Answers of the database, collected while a batch is planned (`storage.persist.load`)."""

    def __init__(self) -> None:
        self.results: dict[Hashable, Any] = {}

    def answer(self, question: Hashable) -> Any:
        """Return the answer to a question; `MissingData` if it was not asked yet."""
        if question not in self.results:
            raise MissingData("questions", (question,))
        return self.results[question]
