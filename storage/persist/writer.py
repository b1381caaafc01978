"""Group commit: appends of many tasks and rooms are planned together and written by one statement, one write at a time.

A lone append waits for nobody; while a write is under way others gather, and go into the next one. Planning is optimistic:
nothing is locked while it runs, and a write that was planned on rows that have changed since is refused, whole. Then the
caches are dropped and it is planned again, this time holding the rooms' locks, so that it cannot lose twice. Where the answer to a
write is lost with the connection, it is looked up whether it was done: a write is one statement, so one of its events tells for all.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final, LiteralString, NamedTuple

from storage.database.connection import Connection, Database
from storage.errors import DatabaseConflict, DatabaseError, DatabaseFull, StorageClosed, StorageCorrupt
from storage.persist.commit import absorb, tell
from storage.persist.context import Caches, Needs
from storage.persist.draft import Blocks, Draft
from storage.persist.load import load
from storage.persist.plan import Incoming, plan_event
from storage.persist.prefetch import prefetch
from storage.persist.results import AppendResult
from storage.persist.write import Written, write
from storage.streams.following import learn_writers
from storage.streams.in_flight import LOST, InFlight
from storage.streams.registry import Streams

SQL_LOCK_ROOMS: Final[LiteralString] = """
SELECT pg_advisory_xact_lock(1919905645, room_nid)
FROM (SELECT room_nid FROM rooms WHERE room_id = ANY($1::text[]) ORDER BY room_nid) AS ordered
"""

SQL_STORED: Final[LiteralString] = """
SELECT event_nid, COALESCE(stream_ordering, 0) AS stream_ordering
FROM events
WHERE event_nid = ANY($1::bigint[])
"""

ROUNDS_MAX: Final = 10_000  # loads for one event; a state resolution takes some dozens


class StoredRow(NamedTuple):
    """An event that is held, and its position; 0 for an outlier."""

    event_nid: int
    stream_ordering: int


@dataclass(frozen=True, slots=True)
class Sent:
    """A write that was sent, with the answers to give if it was done."""

    draft: Draft
    answers: list[AppendResult]


class _Unsure(Exception):  # noqa: N818  # a turn of the plan, not an error
    """An event that was taken for new cannot be stored: look up whether it is held already."""


@dataclass(slots=True)
class Job:
    """One append call on its way."""

    incoming: Sequence[Incoming]
    future: asyncio.Future[list[AppendResult]]


class Writer:
    """The writer of one store: a queue, a task that empties it, and the caches that planning reads."""

    def __init__(self, database: Database, streams: Streams, *, server_name: str, writer_nid: int) -> None:
        config = database.config
        self._database = database
        self._server_name = server_name
        self._streams = streams
        self._blocks = Blocks()
        self._in_flight = InFlight(database, streams, ("events", "backfill", "caches"), writer_nid)
        self._sent: Sent | None = None
        self._queue: deque[Job] = deque()
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(config.writer_queue_max)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._attempts = config.transaction_attempts
        self._batch_max = config.writer_batch_max
        self._extremities_max = max(config.forward_extremities_max, 1)
        self.caches = Caches(
            events=config.cache_events_max, groups=config.cache_groups_max, rooms=config.cache_rooms_max, names=config.cache_names_max
        )

    def start(self) -> None:
        """Begin to work; needs a running event loop."""
        self._task = asyncio.create_task(self._work(), name="storage-writer")

    async def close(self) -> None:
        """Finish what is queued, then stop. Appends that come later get `StorageClosed`."""
        self._closed = True
        self._wake.set()
        if self._task is not None:
            await self._task
            self._task = None

    async def append(self, incoming: Sequence[Incoming]) -> list[AppendResult]:
        """Store a batch; one result per event, in order. Waits while the queue is full.

        Cancelling the caller does not take back what is under way. Raises what the database said if nothing could be stored.
        """
        async with self._room:
            if self._closed:
                raise StorageClosed("writer")
            job = Job(incoming, asyncio.get_running_loop().create_future())
            self._queue.append(job)
            self._wake.set()
            return await job.future

    async def _work(self) -> None:
        while not (self._closed and not self._queue):
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._serve(self._gather())

    def _gather(self) -> list[Job]:
        """The jobs for the next write: at least one, and then as many as keep it within its size."""
        jobs = [self._queue.popleft()]
        size = len(jobs[0].incoming)
        while self._queue and size + len(self._queue[0].incoming) <= self._batch_max:
            jobs.append(self._queue.popleft())
            size += len(jobs[-1].incoming)
        return jobs

    async def _serve(self, jobs: list[Job]) -> None:
        """Answer these jobs. One that fails is taken out and answered alone; the others are written without it."""
        try:
            results = await self._write(jobs)
        except (*LOST, DatabaseFull) as error:
            _fail(jobs, error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer to whoever waits
            if len(jobs) == 1:
                _fail(jobs, error)
                return
            for job in jobs:
                await self._serve([job])
        else:
            for job, answers in zip(jobs, results, strict=True):
                if not job.future.done():
                    job.future.set_result(answers)

    async def _write(self, jobs: list[Job]) -> list[list[AppendResult]]:
        """Once in the hope that all is new and nobody interferes; then, looking everything up, under the rooms' locks."""
        await self._in_flight.ready()
        attempts = max(self._attempts, 2)
        lost = False
        for attempt in range(attempts):
            optimistic = attempt == 0
            connection = self._database.connection() if optimistic else self._database.transaction()
            self._sent = None
            try:
                return _split(jobs, await self._attempt(jobs, connection, assume_new=optimistic, locked=not optimistic))
            except _Unsure:
                continue
            except DatabaseError as error:
                self.caches.forget()
                if attempt + 1 == attempts or (lost and isinstance(error, LOST)) or not isinstance(error, (DatabaseConflict, *LOST)):
                    raise
                if isinstance(error, LOST):
                    lost = True
                    if (answers := await self._look_up()) is not None:
                        return _split(jobs, answers)
        raise StorageCorrupt("a write was neither done nor refused")

    async def _look_up(self) -> list[AppendResult] | None:
        """The answers of a write whose own was lost, if it was done. `DatabaseUnavailable` if there is nobody to ask."""
        await self._in_flight.settle()
        if self._sent is None or not self._sent.draft.new_events:
            return None
        async with self._database.connection() as conn:
            rows = await conn.fetch(SQL_STORED, list(self._sent.draft.new_events), row=StoredRow)
        positions = {row.event_nid: row.stream_ordering for row in rows}
        return [_positioned(self._sent.draft, answer, positions) for answer in self._sent.answers] if rows else None

    async def _attempt(
        self, jobs: list[Job], connection: AbstractAsyncContextManager[Connection], *, assume_new: bool, locked: bool
    ) -> list[AppendResult]:
        """Plan and write once, and let it be known. `_Unsure`: an assumption needs checking before the answers can be given."""
        incoming = [one for job in jobs for one in job.incoming]
        draft = Draft(self.caches, self._blocks, self._server_name, extremities_max=self._extremities_max)
        with self._in_flight.writing():
            async with connection as conn:
                if locked:
                    await conn.execute(SQL_LOCK_ROOMS, list({one.event.room_id for one in incoming}))
                if assume_new:
                    draft.assume_new(one.event.event_id for one in incoming)
                await prefetch(conn, draft, incoming)
                answers = [await _decide(conn, draft, one) for one in incoming]
                if assume_new and any(answer.outcome == "missing_parents" for answer in answers):
                    raise _Unsure
                self._sent = Sent(draft, answers)
                self._in_flight.sent(conn)
                written = await write(conn, draft, self._in_flight.author, _now_ms()) if draft.has_changes else Written({}, 0)
            await learn_writers(self._database, self._streams, "events", written.writers)
            self._in_flight.answered()
        absorb(self.caches, draft, written.positions)
        tell(self._streams, draft, written)
        return [_positioned(draft, answer, written.positions) for answer in answers]


async def _decide(conn: Connection, draft: Draft, incoming: Incoming) -> AppendResult:
    """Plan one event, loading what it lacks."""
    for _ in range(ROUNDS_MAX):
        try:
            return plan_event(draft, incoming)
        except Needs as needs:
            lacking = needs
        await load(conn, draft, lacking)
    raise StorageCorrupt("planning does not come to an end", event_id=incoming.event.event_id)


def _positioned(draft: Draft, answer: AppendResult, positions: dict[int, int]) -> AppendResult:
    """The answer with the position the event took."""
    row = None if answer.event_id is None else draft.rows.get(answer.event_id)
    if row is None or row.outlier or row.event_nid not in positions:
        return answer
    return AppendResult(answer.event_id, answer.outcome, answer.reason, positions[row.event_nid], row.topological_ordering)


def _split(jobs: list[Job], answers: list[AppendResult]) -> list[list[AppendResult]]:
    parts = iter(answers)
    return [[next(parts) for _ in job.incoming] for job in jobs]


def _fail(jobs: list[Job], error: Exception) -> None:
    for job in jobs:
        if not job.future.done():
            job.future.set_exception(error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
