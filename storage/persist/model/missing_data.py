"""What planning raises when it cannot go on: the data to load, or the end of its time slice."""

from collections.abc import Hashable, Iterable
from typing import Any, Final

ABSENT: Final[Any] = None  # looked up in the database, and not there


class MissingData(Exception):  # noqa: N818  # a question to the driver, not an error
    """Planning cannot go on without these: kind of thing -> keys."""

    def __init__(self, kind: str, keys: Iterable[Hashable]) -> None:
        super().__init__(kind)
        self.kind = kind
        self.keys = set(keys)


class TimeSliceOver(MissingData):
    """The turn is over in the middle of a state resolution.

    Asked again, planning goes on with it where it stopped.
    """

    def __init__(self) -> None:
        super().__init__("turn", ())
