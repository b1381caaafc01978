"""Group commit: plan the appends of many tasks and rooms together and write them in one statement.

One write runs at a time. A lone append is written at once. While a write runs, new appends are
planned as if that write had committed. For this, its rows go into the caches when it is sent. If
the write fails, the caches are cleared, and all plans based on it are made again. So Postgres and
this process work at the same time, even on one room.

A room whose state takes long to resolve is planned separately, so that the other rooms need not
wait for it.

Writes by other processes are detected when the database refuses a plan. Deletions may not be
detected that way: a purged event that comes back would count as a duplicate. Each deletion is
therefore published in the stream "caches" (`storage.streams.invalidate_caches`). The writer
removes the deleted rows from its caches before the next plan. It may hear of them late, so it
compares the rooms of duplicates before it answers (`storage.persist.commit.publish`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from storage.cache_sizes import CacheSizes
from storage.database.connection import Database
from storage.database.translate import refused_row
from storage.errors import CommitUnknown, DatabaseFull, DatabaseReplaced, StorageClosed
from storage.event import Event
from storage.observability.opentelemetry import tracing
from storage.persist.commit.publish import absorb
from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.commit.retry import EVENTS_PER_LOAD, OutcomeUnknown, Part, WriteAttempts
from storage.persist.load.on_demand import load, tells_of
from storage.persist.load.prefetch import Load
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet, TimeSlice
from storage.persist.model.incoming import AnyEvent, IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.results import AppendResult
from storage.streams.caches import DICTIONARIES, REMOVED, Removed
from storage.streams.feed import Advance
from storage.streams.registry import Restart, Streams
from storage.streams.stream_writer import LOST

# --------------------------------------------------------------------------------------------------
# Slow rooms: plan rooms whose state takes long to resolve, while all other rooms go on.
#
# The writer plans all rooms together until a room has used `HEAVY_SECONDS` for resolutions. Then
# the rest of that append comes here, with every later append that shares a room with it. Each part
# of an append is planned in its own change set, one time slice at a time. A pause as long as the
# slice follows each slice. The plan is then written like any other, between those of the other
# rooms.
#
# Concurrent change sets share no room, so neither depends on the other. They may both add the same
# new name. Then the plan made here is dropped and made again.
#
# A plan is also made again if a write failed or rows were deleted in the meantime, because it may
# depend on them. A room leaves with its last append.

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
            self._task = asyncio.create_task(self._work(), name="storage-writer-slow-rooms")

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
        while not request.is_finished:
            while self._pipeline.has_to_do_with(request):  # noqa: ASYNC110  # the end of any batch may be the awaited one
                await asyncio.sleep(SLOW_ROOM_SLICE_SECONDS)
            failures = self._pipeline.failures
            batch = await self._planned(request, request.rest[:BATCH_EVENTS_MAX])
            if failures == self._pipeline.failures:
                await self._pipeline.write(batch)

    # Rows that are read later are guarded by the version of now, even if the caches drop the room.
    async def _planned(self, request: AppendRequest, part: Sequence[AnyEvent]) -> WriteBatch:
        batch = self._attempts.plan()
        batch.is_of_slow_room = True
        batch.change_set.time_slice = TimeSlice(
            SLOW_ROOM_SLICE_SECONDS, rest=SLOW_ROOM_SLICE_SECONDS
        )
        for room_id in request.rooms:
            room = self._attempts.caches.rooms.get(room_id)
            if room is not None:
                batch.change_set.rooms.rows[room_id] = room
        try:
            await self._attempts.extend(batch, [(request, part)], self._load, assume_new=False)
        except Exception as error:  # noqa: BLE001  # any error: the slow path finds out which append it belongs to
            batch.error = error
        return batch


def share_new_names(change_set: ChangeSet, other: ChangeSet) -> bool:
    """Return whether both change sets allocate a nid for the same name."""
    return not (
        change_set.names.new_principals.keys().isdisjoint(other.names.new_principals)
        and change_set.names.new_types.keys().isdisjoint(other.names.new_types)
        and change_set.names.new_state_keys.keys().isdisjoint(other.names.new_state_keys)
    )


def has_written_names(change_set: ChangeSet) -> bool:
    """Return whether a new name of the change set has received a nid by now."""
    names = change_set.caches.names
    return not (
        names.principals.keys().isdisjoint(change_set.names.new_principals)
        and names.types.keys().isdisjoint(change_set.names.new_types)
        and names.state_keys.keys().isdisjoint(change_set.names.new_state_keys)
    )


# --------------------------------------------------------------------------------------------------
# The slow path: appends together, then each alone, then the parts of one.
#
# A constraint refuses a whole write. If one append alone is refused, it is written in halves, and
# the half that is refused in halves again. So a single event remains, which gets the outcome
# "invalid", and all others are stored. That takes about 4 * log2(events) writes for such an event.
#
# An event that is built here fails its append instead: its sender gets the error.

logger: logging.Logger = logging.getLogger(__name__)


async def serve(
    attempts: WriteAttempts, requests: Sequence[AppendRequest], failed: WriteBatch | None = None
) -> None:
    """Serve these appends together. ``failed`` is their last batch, if it failed.

    If one append fails, each is served alone, and only the failing ones get the error. If the
    connection is lost or the disk is full, all of them fail.
    """
    error = await _error(attempts, [(request, request.rest) for request in requests], failed)
    if error is None:
        return
    if isinstance(error, (*LOST, DatabaseFull)):
        for request in requests:
            request.fail(error)
    elif len(requests) == 1:
        await _serve_parts(attempts, requests[0], len(requests[0].rest), error)
    else:
        for request in requests:
            await serve(attempts, [request])


async def _error(
    attempts: WriteAttempts, parts: Sequence[Part], failed: WriteBatch | None = None
) -> Exception | None:
    try:
        await attempts.serve(parts, failed)
    except Exception as error:  # noqa: BLE001  # any error is the result of the append
        return error
    return None


async def _serve_parts(
    attempts: WriteAttempts, request: AppendRequest, count: int, error: Exception
) -> None:
    """Serve the next ``count`` events, which were refused with ``error``, in two halves."""
    reason = refused_row(error)
    events = [
        incoming.event for incoming in request.rest[:count] if isinstance(incoming, IncomingEvent)
    ]
    if reason is None or len(events) < count:
        request.fail(error)
    elif count == 1:
        attempts.measures.unwritable_events += 1
        request.answer([_unwritable(events[0], reason)])
    else:
        for half in (count // 2, count - count // 2):
            if request.is_finished:
                return
            refused = await _error(attempts, [(request, request.rest[:half])])
            if refused is not None:
                await _serve_parts(attempts, request, half, refused)


def _unwritable(event: Event, reason: str) -> AppendResult:
    """Log an event that is not stored, without its content, and return its result."""
    logger.error(
        "the database refuses the event %s: %s; run `room-storage verify --repair`, and report it "
        "if that finds nothing",
        event.event_id,
        reason,
        extra={"event_id": event.event_id, "room_id": event.room_id, "constraint": reason},
    )
    return AppendResult(event.event_id, "invalid", f"the database refuses it: {reason}")


# Events planned before the event loop is yielded. Also the largest target size of a batch.
# Smallest target size of a batch: a write costs as much as 20 events.
BATCH_EVENTS_MIN: Final = 16
WRITER_READS: Final = ("caches",)
"""Streams that a writer reads: deletions by other processes."""


class _BaseNotWritten(Exception):  # noqa: N818  # control flow, not an error
    """The write that a plan depends on failed."""


class Writer:
    """The writer of one store: a queue, and a task that empties it."""

    def __init__(
        self, database: Database, streams: Streams, *, server_name: str, writer_nid: int
    ) -> None:
        config = database.config
        sizes = CacheSizes.of(config.cache_mb)
        self.caches: WriterCaches = WriterCaches(
            events=sizes.events,
            groups=sizes.groups,
            state_entries=sizes.state_entries,
            rooms=sizes.rooms,
            names=sizes.names,
        )
        self.version_lock: asyncio.Lock = asyncio.Lock()
        """Lock around the look-up of room versions, before appends are queued."""
        self.in_hand: int = 0
        """Number of appends without a result yet: queued, planned or being written."""
        self.version_waiters = 0
        """Number of tasks that hold `version_lock` or wait for it. Later tasks must wait, too."""
        self._database = database
        self._attempts = WriteAttempts(
            database, streams, self.caches, server_name=server_name, writer_nid=writer_nid
        )
        self._queue: deque[AppendRequest] = deque()
        self._next: WriteBatch | None = None  # the batch being planned
        self._sent: WriteBatch | None = None  # the batch being written, or a failed one
        self._writing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(config.writer_queue_max)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        # Deletions to apply to the caches. None: any row may have been deleted.
        self._removed: list[Removed | None] = []
        self._batch_max = config.writer_batch_max
        self._events = 0  # total of the appends in hand
        self._slow_rooms = SlowRooms(self._attempts, self._load_for_slow_room, self, self._wake.set)
        self._slow_batches: deque[WriteBatch] = deque()  # plans of slow rooms, ready to send
        self._recovering: WriteBatch | None = None
        self.failures: int = 0
        """Number of failed writes, deletions and restarts. They invalidate plans of slow rooms."""
        self._planning = False  # while True, self._next must not be sent
        self._requests: set[AppendRequest] = set()
        streams.feed.subscribe(self._on_stream_rows)
        streams.on_restart(self._restart)

    def start(self) -> None:
        """Start the writer task. Needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="storage-writer")

    async def close(self) -> None:
        """Finish the queue, then stop. Later appends raise `StorageClosed`.

        If it is cancelled, stop at once. Appends without a result raise `CommitUnknown`, or
        `StorageClosed` if nothing of them was sent.
        """
        self._closed = True
        self._wake.set()
        try:
            if self._task is not None:
                await self._task
        finally:
            self._task = None
            await self._slow_rooms.close()

    async def append(
        self, incoming: Sequence[AnyEvent], queued: Callable[[], None] = lambda: None
    ) -> list[AppendResult]:
        """Store a batch and return one result per event, in order. Wait while the queue is full.

        Call ``queued`` when it has its place in the queue.

        A cancelled caller does not cancel the write, which keeps its place in the queue. Raise the
        database error if some events could not be stored. A large batch is written in several
        transactions, so its first events may be stored even then.
        """
        await self._room.acquire()
        if self._closed:
            self._room.release()
            raise StorageClosed("writer")
        future: asyncio.Future[list[AppendResult]] = asyncio.get_running_loop().create_future()
        request = AppendRequest(incoming, future, self._finished, caller=tracing.caller())
        self._requests.add(request)
        if self._slow_rooms.takes(request):
            self._slow_rooms.add(request)
        else:
            self._queue.append(request)
        self._wake.set()
        self.in_hand += 1
        self._events += len(incoming)
        queued()
        return await future

    def _finished(self, request: AppendRequest) -> None:
        """Make room for another append. A cancelled caller alone does not make any."""
        self._requests.discard(request)
        self.in_hand -= 1
        self._events -= len(request.incoming)
        self._room.release()

    @property
    def has_removals(self) -> bool:
        """Return whether the caches still have rows that were deleted."""
        return bool(self._removed)

    @property
    def queued(self) -> int:
        """Return the number of appends that are not planned completely."""
        return len(self._queue) + len(self._slow_rooms)

    async def _run(self) -> None:
        """Work until the end, and leave no append without a result, whatever ends it."""
        try:
            await self._work()
        except Exception:
            logger.exception("the writer has stopped, by a defect: open the store again")
            raise
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Refuse later appends, drop all plans, and fail the appends without a result."""
        self._closed = True
        self._slow_rooms.stop()
        sent = [batch for batch in (self._sent, self._recovering) if batch is not None]
        self._next = None
        self._queue.clear()
        self._drop_slow_batches()
        for request in list(self._requests):
            if request.answers or any(request in batch.answers for batch in sent):
                request.fail(CommitUnknown("the writer was stopped during the write: repeat it"))
            else:
                request.fail(StorageClosed("writer"))

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            if self._writing is not None and self._writing.done():
                self._writing.result()  # raises a defect; a failed write is noted in its batch
            if (failed := self._failed()) is not None:
                await self._write_finished()
                await self._recover(self._failed() or failed)
            elif (batch := self._taken()) is not None:
                self._writing = asyncio.create_task(
                    self._write_batches(batch), name="storage-writer"
                )
                await self._others(bool(self._queue))  # start the write before planning more
            elif self._queue and (self._next is None or self._next.size < self._batch_max):
                self._planning = True
                await self._plan()
                self._planning = False
                # The answer to the write can arrive while the event loop is yielded.
                await self._others(bool(self._queue or self._sent))
            elif self._closed and self._sent is None and not self._slow_rooms:
                return
            else:
                await self._wake.wait()

    @staticmethod
    async def _others(there_is_more: bool) -> None:
        """Yield the event loop if there is more to do afterwards."""
        if there_is_more:
            await asyncio.sleep(0)

    def _on_stream_rows(self, advance: Advance) -> None:
        """Note a deletion that may concern cached rows, and a new dictionary."""
        if advance.stream_name != "caches":
            return
        for stream_row in advance.rows:
            name, key = stream_row.row[:2]
            if name == REMOVED and key is not None:
                self._removed.append(Removed.of(key))
            elif name == "events" and key is None:
                self._removed.append(None)
            elif name == DICTIONARIES:
                self.caches.knows_dictionary = False

    def _restart(self, _: Restart) -> None:
        """Handle a new database. It is unknown which earlier writes the new database has."""
        self._removed = [None]
        self._drop_slow_batches()
        for request in list(self._requests):
            if request.answers:
                request.fail(
                    DatabaseReplaced(
                        "the database was replaced while the batch was written: repeat it, "
                        "what is stored is a duplicate"
                    )
                )

    def _forget_removed(self) -> None:
        """Remove deleted rows from the caches.

        Call it only with nothing planned or being written: `absorb` would cache rows again that a
        plan has read before the deletion.
        """
        removals, self._removed = self._removed, []
        self._drop_slow_batches()
        if None in removals:
            self.caches.forget()
        for removed in removals:
            if removed is not None:
                self.caches.remove(removed)

    # ----------------------------------------------------------------------------------------------
    # planned and sent ahead

    async def _plan(self) -> None:
        """Plan the next events on top of the batch being written."""
        if self._removed and self._next is None:
            await self._write_finished()
            if self._sent is None:
                self._forget_removed()
            return
        self._next = self._next or self._attempts.plan(after=self._sent)
        left = self._batch_max - self._next.size
        parts = self._gather(min(self._batch_target, left), whole=min(BATCH_EVENTS_MAX, left))
        starts = [(request, request.planned - len(part), part) for request, part in parts]
        named = [
            event
            for request, at, part in starts
            for event in (
                part if at % EVENTS_PER_LOAD else request.incoming[at : at + EVENTS_PER_LOAD]
            )
        ]
        try:
            await self._attempts.extend(
                self._next,
                parts,
                self._load,
                named=named,
                assume_new=True,
                slow_rooms=self._slow_rooms,
            )
        except Exception as error:  # noqa: BLE001  # any error: the slow path finds out which append it belongs to
            self._next.error = error
            await self._write_finished()

    def _gather(self, most: int, *, whole: int) -> list[Part]:
        """Take the next events from the queue.

        An append stays whole unless it is larger than ``whole``. Then only its first events are
        taken.
        """
        parts: list[Part] = []
        while self._queue and most > 0:
            request = self._queue[0]
            if self._slow_rooms.takes(request):
                self._slow_rooms.add(self._queue.popleft())
                continue
            part = request.incoming[request.planned :]
            if len(part) <= most or (not parts and len(part) <= whole):
                self._queue.popleft()
            elif parts:
                break
            else:
                part = part[:most]
            request.planned += len(part)
            parts.append((request, part))
            most -= len(part)
        return parts

    def has_to_do_with(self, request: AppendRequest) -> bool:
        """Return whether the main queue or a batch has an append that shares a room."""
        planned = (
            other
            for batch in (self._next, self._sent, self._recovering)
            if batch is not None
            for other in batch.answers
        )
        return any(not other.rooms.isdisjoint(request.rooms) for other in (*planned, *self._queue))

    async def write(self, batch: WriteBatch) -> None:
        """Write a plan of the slow rooms when its turn comes.

        A plan that is out of date is dropped without an error. The caller makes it again.
        """
        batch.finished = asyncio.Event()
        self._slow_batches.append(batch)
        self._wake.set()
        await batch.finished.wait()

    def _drop_slow_batches(self) -> None:
        """Drop all plans of the slow rooms, which are then made again."""
        self.failures += 1
        while self._slow_batches:
            _set_finished(self._slow_batches.popleft())

    async def _load_for_slow_room(self, change_set: ChangeSet, needs: MissingData) -> None:
        """Load data for the slow rooms. A concurrent write concerns other rooms only."""
        async with self._database.connection() as conn:
            await load(conn, change_set, needs)
            self._database.measures.writer_statements += conn.statements

    async def _load(self, change_set: ChangeSet, needs: MissingData) -> None:
        """Load data while a write may be running.

        If the database cannot answer before that write commits (`tells_of`), wait for the write
        first.
        """
        if self._sent is not None and not tells_of(needs, self._sent.change_set):
            await self._write_finished()
        if self._sent is not None and self._sent.error is not None:
            raise _BaseNotWritten
        async with self._database.connection() as conn:
            await load(conn, change_set, needs)
            self._database.measures.writer_statements += conn.statements

    @property
    def _batch_target(self) -> int:
        """Return the target batch size: half of the pending events.

        The other half is planned during the write.
        """
        return min(BATCH_EVENTS_MAX, max(BATCH_EVENTS_MIN, self._events // 2), self._batch_max)

    def _may_send(self) -> bool:
        batch = self._next
        if batch is None or batch.error is not None or self._sent is not None or self._planning:
            return False
        if batch.connection_generation != self._database.connection_generation:
            batch.error = self._database.guard.error()
            self._wake.set()
            return False
        return not self._queue or batch.size >= self._batch_target

    def _taken(self) -> WriteBatch | None:
        """Return the next batch to write, if any, and add its rows to the caches.

        From here on, planning assumes that the batch commits.
        """
        batch = self._taken_slow_batch()
        if batch is None:
            if not self._may_send():
                return None
            batch, self._next = self._next, None
        if batch is not None:
            self._sent = batch
            absorb(self.caches, batch.change_set)
        return batch

    def _taken_slow_batch(self) -> WriteBatch | None:
        """Return a plan of the slow rooms that may be written now."""
        if (
            self._sent is not None
            or self._planning
            or not self._slow_batches
            or self._slow_batches[0].error is not None
        ):
            return None
        batch = self._slow_batches.popleft()
        if (
            batch.connection_generation != self._database.connection_generation
            or has_written_names(batch.change_set)
            or (self._next is not None and share_new_names(batch.change_set, self._next.change_set))
        ):
            _set_finished(batch)
            return None
        return batch

    async def _write_batches(self, batch: WriteBatch | None) -> None:
        """Write a batch, then each batch that is ready by then.

        The next batch is sent before the callers of the last one can queue more appends.
        """
        try:
            while batch is not None:
                try:
                    await self._attempts.send(batch)
                except Exception as error:  # noqa: BLE001  # any error is the result of the appends
                    batch.error = error
                else:
                    self._sent = None
                    _set_finished(batch)
                batch = self._taken()
        finally:
            self._wake.set()

    async def _write_finished(self) -> None:
        """Wait until the running write has succeeded or failed."""
        if self._writing is not None:
            await self._writing

    def _failed(self) -> WriteBatch | None:
        return next(
            (
                batch
                for batch in (self._sent, self._next, *self._slow_batches)
                if batch is not None and batch.error is not None
            ),
            None,
        )

    async def _recover(self, failed: WriteBatch) -> None:
        """Undo a failed batch and the plans based on it, then serve it on the slow path."""
        again = [
            request
            for request in failed.answers
            if failed.is_of_slow_room or request not in self._slow_rooms
        ]
        later = [
            request
            for request in (self._next.answers if self._next is not None else ())
            if request not in again
        ]
        if failed is self._sent:
            self._drop_slow_batches()
        if failed in self._slow_batches:
            self._slow_batches.remove(failed)
        self._sent = self._next = None
        self._recovering = failed
        for request in (*again, *later):
            request.planned = len(request.answers)
        waiting = dict.fromkeys((*later, *self._queue))
        self._queue = deque(
            request
            for request in waiting
            if request not in again and request not in self._slow_rooms
        )
        if not isinstance(failed.error, OutcomeUnknown):
            self._attempts.forget(failed)
        counts_as_attempt = failed.sent or isinstance(failed.error, OutcomeUnknown)
        await serve(self._attempts, again, failed if counts_as_attempt else None)
        self._recovering = None
        self._queue.extendleft(
            request
            for request in reversed(again)
            if not request.is_finished and request not in self._slow_rooms
        )
        _set_finished(failed)


def _set_finished(batch: WriteBatch) -> None:
    if batch.finished is not None:
        batch.finished.set()
