"""Append events in executors with the live path's writer: to stored rooms, and from data frames.

Each task opens a writer under a separate name, with two connections at most. It does not follow the
writes of other tasks. An append is idempotent, so a repeated task continues where it was.
"""

import asyncio
import gc
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

import uvloop
from pyspark import TaskContext

from storage.config import Config
from storage.errors import (
    CommitUnknown,
    DatabaseConflict,
    InputError,
    InstanceNameTaken,
    UnknownEvent,
)
from storage.ids import EventId
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import AppendResult
from storage.persist.readmit import readmit
from storage.store.open import OpenWriter, open_writer

CONNECTIONS: Final = 2
ATTEMPTS: Final = 3
BATCH_MAX: Final = 1_000
PART: Final = 5_000
LOCK_TIMEOUT_MS: Final = 2_000
ENTER_PAUSE_SECONDS: Final = 3.0
ENTER_WAIT_MS: Final = 1_000
NAMES_TRIED: Final = 8
NAMES_MIN: Final = 32
"""Names of writers that tasks share by number, unless more run at once."""

COLLECTED_AFTER: Final = 100_000
BULK_TIMEOUT_MS: Final = 3_600_000
"""The timeout of statements, and of pauses between them, for tasks that move much data."""


def spare_collector() -> None:
    """Tune the garbage collector for many long-lived objects with few cycles."""
    gc.freeze()
    gc.set_threshold(COLLECTED_AFTER, 20, 20)


class ArrivedEvent(NamedTuple):
    """An event to store, and its position in the input."""

    incoming: IncomingEvent
    place: int


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """The store to write to.

    ``instance_name``: tasks write under this name and their number. ``part``: approximate number of
    events in one bulk write. ``config``: that of the driver, as executors may have another
    environment.
    """

    dsn: str = field(repr=False)  # it may contain a password
    server_name: str | None
    instance_name: str = "spark"
    part: int = PART
    config: Config = field(default_factory=Config.from_env)

    def name(self, attempt: "TaskAttempt") -> str:
        """Return the writer name of a task attempt.

        Each attempt has its own, because an earlier or speculative one may still run.
        """
        return f"{self.instance_name}-{attempt.task}" + (
            f"-{attempt.number}" if attempt.number else ""
        )


class TaskAttempt(NamedTuple):
    """An attempt at a task.

    ``number``: how many other attempts there are, earlier or concurrent, in this attempt at the
    stage.
    """

    task: int
    number: int = 0

    @classmethod
    def of(cls, context: TaskContext | None, names: int | None = None) -> Self:
        """Return the attempt that runs in this process; outside of Spark the first at task 0.

        Tasks share at most so many ``names``, because the database keeps each name.
        """
        if context is None:
            return cls(0)
        task = context.partitionId()
        return cls(task if names is None else task % names, context.attemptNumber())

    @property
    def next(self) -> Self:
        """Return the attempt to use if the name of this one is taken.

        Spark counts from 0 again when it repeats a stage.
        """
        return self._replace(number=self.number + 1)


class Loader:
    """The writer of a store in this process, for callers without an event loop."""

    def __init__(self, target: StoreTarget, attempt: TaskAttempt) -> None:
        self._target = target
        self._attempt = attempt
        self.outcomes: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self.runner: asyncio.Runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        try:
            self.store: OpenWriter = self.runner.run(self._open())
        except BaseException:
            self.runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.runner.run(self._stack.aclose())
        finally:
            self.runner.close()

    async def _open(self) -> OpenWriter:
        """Open under the first free name.

        Raise `InstanceNameTaken` if none of `NAMES_TRIED` is free.
        """
        attempt = self._attempt
        for _ in range(1, NAMES_TRIED):
            try:
                return await self._open_as(self._target.name(attempt))
            except InstanceNameTaken:
                attempt = attempt.next
        return await self._open_as(self._target.name(attempt))

    async def _open_as(self, instance_name: str) -> OpenWriter:
        """Register the writer, in several short attempts.

        It enters between two writes of others, and while it waits, other writers wait, too.
        """
        config = replace(
            self._target.config,
            instance_name=instance_name,
            enter_wait_ms=min(self._target.config.enter_wait_ms, ENTER_WAIT_MS),
            pool_size_max=CONNECTIONS,
            statement_timeout_ms=BULK_TIMEOUT_MS,
            lock_timeout_ms=LOCK_TIMEOUT_MS,
        )
        deadline = time.monotonic() + BULK_TIMEOUT_MS / 1000
        while True:
            try:
                opened = open_writer(
                    self._target.dsn, server_name=self._target.server_name, config=config
                )
                return await self._stack.enter_async_context(opened)
            except DatabaseConflict:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ENTER_PAUSE_SECONDS)

    def append(self, arrivals: list[ArrivedEvent]) -> list[tuple[ArrivedEvent, AppendResult]]:
        """Store these in order; return those that were not stored, with their results."""
        return self.runner.run(self.appended(arrivals))

    async def appended(
        self, arrivals: list[ArrivedEvent]
    ) -> list[tuple[ArrivedEvent, AppendResult]]:
        """Do the same within the event loop."""
        results = await self._append_all([one.incoming for one in arrivals])
        self.outcomes.update(result.outcome for result in results if result.is_stored)
        return [
            (one, result)
            for one, result in zip(arrivals, results, strict=True)
            if not result.is_stored
        ]

    async def readmitted(self, event_id: EventId) -> AppendResult:
        """Readmit an event; return what came of it, also if that is refused."""
        try:
            result = await self._readmit(event_id)
        except UnknownEvent:
            reason = "the event to readmit is not stored"
            return AppendResult(event_id, "missing_parents", reason, missing=(event_id,))
        except InputError as error:
            return AppendResult(event_id, "invalid", str(error))
        self.outcomes[result.outcome] += 1
        return result

    async def _readmit(self, event_id: EventId) -> AppendResult:
        for _ in range(1, ATTEMPTS):
            try:
                return await readmit(self.store.database, self.store.writer, event_id)
            except (CommitUnknown, DatabaseConflict):
                continue
        return await readmit(self.store.database, self.store.writer, event_id)

    async def _append_all(self, incoming: list[IncomingEvent]) -> list[AppendResult]:
        """Append all batches in this order; the writer plans the next one while it writes one.

        If one fails, later ones may have lacked its events. Then all are appended once more, which
        is idempotent.
        """
        batches = [
            incoming[start : start + BATCH_MAX] for start in range(0, len(incoming), BATCH_MAX)
        ]
        answers = await asyncio.gather(
            *map(self.store.writer.append, batches), return_exceptions=True
        )
        if any(isinstance(answer, BaseException) for answer in answers):
            return [result for batch in batches for result in await self._append(batch)]
        return [
            result
            for answer in answers
            if not isinstance(answer, BaseException)
            for result in answer
        ]

    async def _append(self, incoming: list[IncomingEvent]) -> list[AppendResult]:
        for _ in range(1, ATTEMPTS):
            try:
                return await self.store.writer.append(incoming)
            except (CommitUnknown, DatabaseConflict):
                continue
        return await self.store.writer.append(incoming)
