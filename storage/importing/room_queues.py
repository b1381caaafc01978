"""Queue each room's lines in order, and append different rooms concurrently.

The result of a live event depends on the earlier events of its room. So a room's next batch waits
for the result of the last. Batches of different rooms are appended at the same time, and the
store's writer commits them together.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, NamedTuple

from storage.event.ndjson import Line, Origin

BATCH_MAX: Final = 1_000
WAITING_MAX: Final = 4_000
WAITING_BYTES_MAX: Final = 16 << 20
SIDE_BY_SIDE_MAX: Final = 256


class QueuedLine(NamedTuple):
    """A queued line: its position, its bytes, its content."""

    source: int
    number: int
    size: int
    raw: bytes
    line: Line

    @property
    def origin(self) -> Origin:
        """Return the line's origin; live by default."""
        return self.line.origin or "live"


class RoomQueues:
    """Takes lines, calls ``work`` with runs of them.

    Bounded: `put` waits while too many lines are queued.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        work: Callable[[list[QueuedLine]], Awaitable[None]],
        *,
        batch_max: int = BATCH_MAX,
    ) -> None:
        self._group = group
        self._work = work
        self._batch_max = batch_max
        self._lanes: dict[Hashable, deque[QueuedLine]] = {}
        self._side_by_side = asyncio.Semaphore(SIDE_BY_SIDE_MAX)
        self._waiting = 0
        self._waiting_bytes = 0
        self._progress = asyncio.Condition()

    async def put(self, room: Hashable, entry: QueuedLine) -> None:
        """Queue a line of a room, once there is space."""
        if self._waiting >= WAITING_MAX or self._waiting_bytes >= WAITING_BYTES_MAX:
            async with self._progress:
                await self._progress.wait_for(
                    lambda: self._waiting < WAITING_MAX and self._waiting_bytes < WAITING_BYTES_MAX
                )
        self._waiting += 1
        self._waiting_bytes += len(entry.raw)
        lane = self._lanes.get(room)
        if lane is None:
            self._lanes[room] = deque([entry])
            self._group.create_task(self._drive(room))
        else:
            lane.append(entry)

    async def drain(self) -> None:
        """Wait until all queued lines are processed."""
        async with self._progress:
            await self._progress.wait_for(lambda: not self._lanes)

    async def _drive(self, room: Hashable) -> None:
        lane = self._lanes[room]
        while lane:
            async with self._side_by_side:
                run = take_run(lane, self._batch_max)
                await self._work(run)
            self._waiting -= len(run)
            self._waiting_bytes -= sum(len(entry.raw) for entry in run)
            if not lane:
                del self._lanes[room]
            async with self._progress:
                self._progress.notify_all()


def take_run(lane: deque[QueuedLine], most: int) -> list[QueuedLine]:
    """Take the next lines that can be appended in one call: of one origin and room version.

    Readmissions are not appended, so they make a run of their own.
    """
    run = [lane.popleft()]
    while lane and len(run) < most and _kind(lane[0]) == _kind(run[0]):
        run.append(lane.popleft())
    return run


def _kind(entry: QueuedLine) -> tuple[Origin, str | None, bool]:
    return entry.origin, entry.line.room_version, entry.line.readmit
