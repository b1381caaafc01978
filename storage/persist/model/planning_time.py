"""Time slices of planning: how long it may block the event loop."""

import time
from collections.abc import Callable
from typing import Final

SLICE_SECONDS: Final = 0.01
"""Time after which planning yields the event loop.

The clock is read between events and between steps of a resolution.
"""


HEAVY_SECONDS: Final = 0.01
"""Processor time for resolutions that makes a room heavy.

A room whose resolutions take longer in one plan moves to `storage.persist.commit.slow_rooms`.
Processor time does not grow while a small resolution waits on a busy machine.
"""


SLOW_ROOM_EVENTS_MIN: Final = 16
"""Minimum events of a heavy room per write. Batches grow while they stay below `HEAVY_SECONDS`."""


class TimeSlice:
    """A restartable time slice. Without a length it never ends."""

    __slots__ = ("_clock", "_seconds", "_until", "rest")

    def __init__(
        self,
        seconds: float | None = None,
        *,
        rest: float = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start a slice. ``rest`` is the minimum number of seconds to wait after it."""
        self._seconds = seconds
        self.rest: float = rest
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start the slice again."""
        self._until = float("inf") if self._seconds is None else self._clock() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def is_long(self, seconds: float) -> bool:
        """Return whether a part took as long as the whole slice should."""
        return self._seconds is not None and seconds >= self._seconds
