"""Turns of planning: how long it may keep the event loop."""

import time
from collections.abc import Callable
from typing import Final

SLICE_SECONDS: Final = 0.01
"""The time after which planning lets others have the event loop.

Between two looks at the clock are an event or a step of a resolution.
"""


HEAVY_SECONDS: Final = 0.01
"""Seconds of processor time that the resolutions of a room may take in one plan before the room is planned aside (`storage.persist.commit.slow_rooms`).

On a busy machine a small resolution may wait long for a processor. That does not make its room a heavy one.
"""


SLOW_ROOM_EVENTS_MIN: Final = 16
"""Events of a heavy room that are planned and written together, at least; more as long as they stay below `HEAVY_SECONDS`."""


class TimeSlice:
    """A turn, begun again and again; without a length it is never over."""

    __slots__ = ("_clock", "_seconds", "_until", "rest")

    def __init__(
        self,
        seconds: float | None = None,
        *,
        rest: float = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``rest``: seconds to wait after it, at least."""
        self._seconds = seconds
        self.rest = rest
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begin a turn."""
        self._until = float("inf") if self._seconds is None else self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        """Whether others are to have theirs."""
        return self._clock() >= self._until

    def is_long(self, seconds: float) -> bool:
        """Whether a part of the turn has taken as long as all of it should."""
        return self._seconds is not None and seconds >= self._seconds
