"""The lane of the rooms whose state takes long to resolve: they are planned here, slowly, while all other rooms go on.

The writer plans all rooms together until a room has taken `HEAVY_SECONDS` for resolutions. Then the rest of that append, and every append
that shares a room with it, comes here. A part of an append is planned in a change set of its own, a turn at a time, with a rest after each
turn as long as the turn. Its plan is then written like any other, between those of the other rooms. Change sets share no room, so neither
builds on the other. What they may share are names that are new: of two plans that add the same name, this one is made again.

A plan is also made again when a write failed or something was removed meanwhile, as it may build on that. A room leaves the lane with
its last append in it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.commit.retry import WriteAttempts
from storage.persist.load.prefetch import Load
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.time_slice import TimeSlice

SLOW_ROOM_SLICE_SECONDS: Final = 0.005
BATCH_EVENTS_MAX: Final = (
    128  # events planned and written together; `SLOW_ROOM_EVENTS_MIN` if they are heavy
)


class BatchWriter(Protocol):
    """What the lane takes of the writer."""

    failures: int
    """How often something was taken back that a plan may build on."""

    def has_to_do_with(self, request: AppendRequest) -> bool:
        """Whether an append that shares a room with this one, or its own beginning, is not written yet."""

    async def write(self, batch: WriteBatch) -> None:
        """Write a plan, or find out why it cannot be made; return once that is over."""


class SlowRooms:
    """Appends of heavy rooms, in the order in which they came."""

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
        """Whether an append shares a room with one that is here."""
        return bool(self._rooms) and not self._rooms.isdisjoint(request.rooms)

    def add(self, request: AppendRequest) -> None:
        """Plan what is left of an append here."""
        self._requests[request] = None
        self._rooms |= request.rooms
        self._more.set()
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="storage-writer-lane")

    async def close(self) -> None:
        """Stop. Nothing may be left to do."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _work(self) -> None:
        while True:
            await self._more.wait()
            while self._requests:
                request = next(iter(self._requests))
                try:
                    await self._do(request)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer to whoever waits
                    request.fail(error)
                del self._requests[request]
                self._rooms = set().union(*(other.rooms for other in self._requests))
            self._more.clear()
            self._wake()

    async def _do(self, request: AppendRequest) -> None:
        while not request.is_over:
            while self._pipeline.has_to_do_with(request):  # noqa: ASYNC110  # the end of any plan may be what it waits for
                await asyncio.sleep(SLOW_ROOM_SLICE_SECONDS)
            failures = self._pipeline.failures
            batch = await self._planned(request, request.rest[:BATCH_EVENTS_MAX])
            if failures == self._pipeline.failures:
                await self._pipeline.write(batch)

    async def _planned(self, request: AppendRequest, part: Sequence[IncomingEvent]) -> WriteBatch:
        batch = self._attempts.plan()
        batch.is_aside = True
        batch.change_set.time_slice = TimeSlice(
            SLOW_ROOM_SLICE_SECONDS, rest=SLOW_ROOM_SLICE_SECONDS
        )
        for room_id in request.rooms:  # whatever is read later is guarded by the version of now, also if the caches forget the room
            room = self._attempts.caches.rooms.get(room_id)
            if room is not None:
                batch.change_set.rooms[room_id] = room
        try:
            await self._attempts.extend(
                batch, [(request, part)], self._load, named=part, assume_new=False
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the slow way finds out whose answer it is
            batch.error = error
        return batch


def share_new_names(one: ChangeSet, other: ChangeSet) -> bool:
    """Whether both change sets give a nid to the same name."""
    return not (
        one.new_principals.keys().isdisjoint(other.new_principals)
        and one.new_types.keys().isdisjoint(other.new_types)
        and one.new_state_keys.keys().isdisjoint(other.new_state_keys)
    )


def has_known_names(change_set: ChangeSet) -> bool:
    """Whether a name to which the change set gives a nid has one by now."""
    names = change_set.caches.names
    return not (
        names.principals.keys().isdisjoint(change_set.new_principals)
        and names.types.keys().isdisjoint(change_set.new_types)
        and names.state_keys.keys().isdisjoint(change_set.new_state_keys)
    )
