"""Slow rooms: plan rooms whose state takes long to resolve, while all other rooms go on.

The writer plans all rooms together until a room has used `HEAVY_SECONDS` for resolutions. Then the
rest of that append comes here, with every later append that shares a room with it. Each part of an
append is planned in its own change set, one time slice at a time. A pause as long as the slice
follows each slice. The plan is then written like any other, between those of the other rooms.

Concurrent change sets share no room, so neither depends on the other. They may both add the same
new name. Then the plan made here is dropped and made again.

A plan is also made again if a write failed or rows were deleted in the meantime, because it may
depend on them. A room leaves with its last append.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.commit.retry import WriteAttempts
from storage.persist.load.prefetch import Load
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent
from storage.persist.model.planning_time import TimeSlice

SLOW_ROOM_SLICE_SECONDS: Final = 0.005
# Events planned and written together, or `SLOW_ROOM_EVENTS_MIN` if they are heavy.
BATCH_EVENTS_MAX: Final = 128


class BatchWriter(Protocol):
    """The methods of the writer that slow rooms use."""

    failures: int
    """Number of failed writes, deletions and restarts, which make the plans here invalid."""

    def has_to_do_with(self, request: AppendRequest) -> bool:
        """Return whether the main queue or a batch has an append that shares a room."""

    async def write(self, batch: WriteBatch) -> None:
        """Write a plan and return once it is written, has failed or was dropped."""


class SlowRooms:
    """Appends of slow rooms, in order of arrival."""

    def __init__(
        self, attempts: WriteAttempts, load: Load, pipeline: BatchWriter, wake: Callable[[], None]
    ) -> None:
        self._attempts = attempts
        self._load = load
        self._pipeline = pipeline
        self._wake = wake
        self._requests: dict[AppendRequest, None] = {}
        self._rooms: set[str] = set()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: AppendRequest) -> bool:
        return request in self._requests

    def takes(self, request: AppendRequest) -> bool:
        """Return whether an append shares a room with one in the queue."""
        return bool(self._rooms) and not self._rooms.isdisjoint(request.rooms)

    def add(self, request: AppendRequest) -> None:
        """Queue the remaining events of an append."""
        self._requests[request] = None
        self._rooms |= request.rooms
        self._more.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="storage-writer-lane")

    def stop(self) -> None:
        """Cancel the task. Appends in the queue get no result here."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop the task and wait for its end."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _work(self) -> None:
        while True:
            await self._more.wait()
            while self._requests:
                request = next(iter(self._requests))
                try:
                    await self._do(request)
                except Exception as error:  # noqa: BLE001  # any error is the result of the append
                    request.fail(error)
                del self._requests[request]
                self._rooms = set().union(*(other.rooms for other in self._requests))
            self._more.clear()
            self._wake()

    async def _do(self, request: AppendRequest) -> None:
        while not request.is_over:
            while self._pipeline.has_to_do_with(request):  # noqa: ASYNC110  # the end of any batch may be the awaited one
                await asyncio.sleep(SLOW_ROOM_SLICE_SECONDS)
            failures = self._pipeline.failures
            batch = await self._planned(request, request.rest[:BATCH_EVENTS_MAX])
            if failures == self._pipeline.failures:
                await self._pipeline.write(batch)

    # Rows that are read later are guarded by the version of now, even if the caches drop the room.
    async def _planned(self, request: AppendRequest, part: Sequence[AnyEvent]) -> WriteBatch:
        batch = self._attempts.plan()
        batch.is_aside = True
        batch.change_set.time_slice = TimeSlice(
            SLOW_ROOM_SLICE_SECONDS, rest=SLOW_ROOM_SLICE_SECONDS
        )
        for room_id in request.rooms:
            room = self._attempts.caches.rooms.get(room_id)
            if room is not None:
                batch.change_set.rooms.known[room_id] = room
        try:
            await self._attempts.extend(batch, [(request, part)], self._load, assume_new=False)
        except Exception as error:  # noqa: BLE001  # any error: the slow path finds out which append it belongs to
            batch.error = error
        return batch


def share_new_names(one: ChangeSet, other: ChangeSet) -> bool:
    """Return whether both change sets allocate a nid for the same name."""
    return not (
        one.names.new_principals.keys().isdisjoint(other.names.new_principals)
        and one.names.new_types.keys().isdisjoint(other.names.new_types)
        and one.names.new_state_keys.keys().isdisjoint(other.names.new_state_keys)
    )


def has_known_names(change_set: ChangeSet) -> bool:
    """Return whether a new name of the change set has received a nid by now."""
    names = change_set.caches.names
    return not (
        names.principals.keys().isdisjoint(change_set.names.new_principals)
        and names.types.keys().isdisjoint(change_set.names.new_types)
        and names.state_keys.keys().isdisjoint(change_set.names.new_state_keys)
    )
