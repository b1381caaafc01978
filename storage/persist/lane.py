"""The lane of the rooms whose state takes long to resolve: they are planned here, slowly, while all other rooms go on.

The writer plans all rooms together until a room has taken `HEAVY_SECONDS` for resolutions. Then the rest of that append, and every append
that shares a room with it, comes here. A part of an append is planned in a draft of its own, a turn at a time, with a rest after each
turn as long as the turn. Its plan is then written like any other, between those of the other rooms. Drafts share no room, so neither
builds on the other. What they may share are names that are new: of two plans that add the same name, this one is made again.

A plan is also made again when a write failed or something was removed meanwhile, as it may build on that. A room leaves the lane with
its last append in it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from storage.persist.attempts import Attempts
from storage.persist.draft import Draft
from storage.persist.jobs import Job, Plan
from storage.persist.plan import Incoming
from storage.persist.prefetch import Load
from storage.persist.turns import Turn

TURN_SECONDS: Final = 0.005
MOST: Final = 128  # events planned and written together; `LEAST_ASIDE` if they are heavy


class Pipeline(Protocol):
    """What the lane takes of the writer."""

    failures: int
    """How often something was taken back that a plan may build on."""

    def has_to_do_with(self, job: Job) -> bool:
        """Whether an append that shares a room with this one, or its own beginning, is not written yet."""

    async def write(self, plan: Plan) -> None:
        """Write a plan, or find out why it cannot be made; return once that is over."""


class Lane:
    """Appends of heavy rooms, in the order in which they came."""

    def __init__(self, attempts: Attempts, load: Load, pipeline: Pipeline, wake: Callable[[], None]) -> None:
        self._attempts = attempts
        self._load = load
        self._pipeline = pipeline
        self._wake = wake
        self._jobs: dict[Job, None] = {}
        self._rooms: set[str] = set()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return job in self._jobs

    def takes(self, job: Job) -> bool:
        """Whether an append shares a room with one that is here."""
        return bool(self._rooms) and not self._rooms.isdisjoint(job.rooms)

    def add(self, job: Job) -> None:
        """Plan what is left of an append here."""
        self._jobs[job] = None
        self._rooms |= job.rooms
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
            while self._jobs:
                job = next(iter(self._jobs))
                try:
                    await self._do(job)
                except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer to whoever waits
                    job.fail(error)
                del self._jobs[job]
                self._rooms = set().union(*(other.rooms for other in self._jobs))
            self._more.clear()
            self._wake()

    async def _do(self, job: Job) -> None:
        while not job.is_over:
            while self._pipeline.has_to_do_with(job):  # noqa: ASYNC110  # the end of any plan may be what it waits for
                await asyncio.sleep(TURN_SECONDS)
            failures = self._pipeline.failures
            plan = await self._planned(job, job.rest[:MOST])
            if failures == self._pipeline.failures:
                await self._pipeline.write(plan)

    async def _planned(self, job: Job, part: Sequence[Incoming]) -> Plan:
        plan = self._attempts.plan()
        plan.is_aside = True
        plan.draft.turn = Turn(TURN_SECONDS, rest=TURN_SECONDS)
        for room_id in job.rooms:  # whatever is read later is guarded by the version of now, also if the caches forget the room
            room = self._attempts.caches.rooms.get(room_id)
            if room is not None:
                plan.draft.rooms[room_id] = room
        try:
            await self._attempts.extend(plan, [(job, part)], self._load, named=part, assume_new=False)
        except Exception as error:  # noqa: BLE001  # whatever it is, the slow way finds out whose answer it is
            plan.error = error
        return plan


def share_new_names(one: Draft, other: Draft) -> bool:
    """Whether both drafts give a nid to the same name."""
    return not (
        one.new_principals.keys().isdisjoint(other.new_principals)
        and one.new_types.keys().isdisjoint(other.new_types)
        and one.new_state_keys.keys().isdisjoint(other.new_state_keys)
    )


def has_known_names(draft: Draft) -> bool:
    """Whether a name to which the draft gives a nid has one by now."""
    names = draft.caches.names
    return not (
        names.principals.keys().isdisjoint(draft.new_principals)
        and names.types.keys().isdisjoint(draft.new_types)
        and names.state_keys.keys().isdisjoint(draft.new_state_keys)
    )
