"""Group commit: appends of many tasks and rooms are planned together and written by one statement, one write at a time.

A lone append waits for nobody. While a write is under way, what arrives is planned already, as if that write were done: its rows go
into the caches when it is sent. If it is not done after all, the caches are dropped with all that was planned on them. So the database
and this process work at the same time, also on one room.

A room whose state takes long to resolve is planned on its own, in the lane (`storage.persist.commit.slow_rooms`), so that the others need not wait for it.

What others have written shows when a plan is refused. What was thrown away may not: a purged event that comes back would be taken for a duplicate.
So whoever purges says in the stream "caches" what has gone (`storage.maintenance.invalidate_caches`), and it is forgotten before the next plan.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from storage.database.connection import Database
from storage.errors import DatabaseFull, DatabaseReplaced, StorageClosed
from storage.observability.opentelemetry import tracing
from storage.persist.commit.publish import absorb
from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.commit.retry import OutcomeUnknown, Part, WriteAttempts
from storage.persist.commit.slow_rooms import SlowRooms, has_known_names, share_new_names
from storage.persist.load.by_kind import load, tells_of
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData
from storage.persist.model.results import AppendResult
from storage.streams.caches import REMOVED, Removed
from storage.streams.feed import Advance
from storage.streams.in_flight import LOST
from storage.streams.registry import Restart, Streams

BATCH_EVENTS_MAX: Final = (
    128  # events planned before others have their turn, and written though more wait
)
BATCH_EVENTS_MIN: Final = (
    16  # the least that is written though more wait: a write costs as much as 20 events
)
WRITER_READS: Final = ("caches",)
"""The streams whose facts a writer has to be told: what was thrown away."""


class _BaseNotWritten(Exception):  # noqa: N818  # a turn of the plan, not an error
    """The write that a plan builds on was not done."""


class Writer:
    """The writer of one store: a queue, and a task that empties it."""

    def __init__(
        self, database: Database, streams: Streams, *, server_name: str, writer_nid: int
    ) -> None:
        config = database.config
        self.caches = WriterCaches(
            events=config.cache_events_max,
            groups=config.cache_groups_max,
            state_entries=config.cache_state_entries_max,
            rooms=config.cache_rooms_max,
            names=config.cache_names_max,
        )
        self.looking_up = asyncio.Lock()
        """Held while the versions of rooms are looked up, before appends are queued."""
        self.in_hand = 0
        """Appends that wait for their answer: queued, planned or being written."""
        self.lookers = 0
        """How many hold that lock or wait for it: who comes after them waits, too."""
        self._database = database
        self._attempts = WriteAttempts(
            database, streams, self.caches, server_name=server_name, writer_nid=writer_nid
        )
        self._queue: deque[AppendRequest] = deque()
        self._next: WriteBatch | None = None  # grows
        self._sent: WriteBatch | None = None  # is being written, or was not done
        self._writing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(config.writer_queue_max)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._removed: list[
            Removed | None
        ] = []  # told, and remembered still; None: anything may have gone
        self._batch_max = config.writer_batch_max
        self._events = 0  # of the appends in hand
        self._lane = SlowRooms(self._attempts, self._load_aside, self, self._wake.set)
        self._aside: deque[WriteBatch] = deque()  # planned there, and not sent
        self._mending: WriteBatch | None = None
        self.failures = 0
        """How often something was taken back that a plan of the lane may build on."""
        self._planning = False  # what is planned may not be written before that is over
        self._requests: set[AppendRequest] = set()
        streams.feed.subscribe(self._told)
        streams.on_restart(self._restart)

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
        await self._lane.close()

    async def append(self, incoming: Sequence[IncomingEvent]) -> list[AppendResult]:
        """Store a batch; one result per event, in order. Waits while the queue is full.

        Cancelling the caller does not take back what is under way. Raises what the database said if
        not everything could be stored; a large batch is written in several transactions, so its
        beginning may be stored then.
        """
        async with self._room:
            if self._closed:
                raise StorageClosed("writer")
            request = AppendRequest(
                incoming, asyncio.get_running_loop().create_future(), caller=tracing.caller()
            )
            self._requests.add(request)
            if self._lane.takes(request):
                self._lane.add(request)
            else:
                self._queue.append(request)
            self._wake.set()
            self.in_hand += 1
            self._events += len(incoming)
            try:
                return await request.future
            finally:
                self._requests.discard(request)
                self.in_hand -= 1
                self._events -= len(incoming)

    @property
    def queued(self) -> int:
        """Appends of which not everything is planned yet."""
        return len(self._queue) + len(self._lane)

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            if (failed := self._failed()) is not None:
                await self._landed()
                await self._mend(self._failed() or failed)
            elif (batch := self._taken()) is not None:
                self._writing = asyncio.create_task(self._write_ahead(batch), name="storage-writer")
                await self._others(bool(self._queue))  # it is on its way before more is planned
            elif self._queue and (self._next is None or self._next.size < self._batch_max):
                self._planning = True
                await self._plan()
                self._planning = False
                await self._others(
                    bool(self._queue or self._sent)
                )  # among them the answer to the write
            elif self._closed and self._sent is None and not self._lane:
                return
            else:
                await self._wake.wait()

    @staticmethod
    async def _others(there_is_more: bool) -> None:
        """Others have their turn, before what else there is to do."""
        if there_is_more:
            await asyncio.sleep(0)

    def _told(self, advance: Advance) -> None:
        """Something was thrown away that may be remembered here."""
        if advance.stream_name != "caches":
            return
        for fact in advance.facts:
            name, key = fact.row[:2]
            if name == REMOVED and key is not None:
                self._removed.append(Removed.of(key))
            elif name == "events" and key is None:
                self._removed.append(None)

    def _restart(self, _: Restart) -> None:
        """The database is another one: what it has of the events that were written before is not known."""
        self._removed = [None]
        self._give_up_aside()
        for request in self._requests:
            if request.answers:
                request.fail(
                    DatabaseReplaced(
                        "the database was replaced while the batch was written: repeat it, what is stored is a duplicate"
                    )
                )

    def _forget_removed(self) -> None:
        """With nothing under way, as what is planned and written comes into the caches with what it was planned on."""
        told, self._removed = self._removed, []
        self._give_up_aside()
        if None in told:
            self.caches.forget()
        for removed in told:
            if removed is not None:
                self.caches.remove(removed)

    # ----------------------------------------------------------------------------------------------
    # planned and sent ahead

    async def _plan(self) -> None:
        """Plan the next events on top of what is being written."""
        if self._removed and self._next is None:
            await self._landed()
            if self._sent is None:
                self._forget_removed()
            return
        self._next = self._next or self._attempts.plan(after=self._sent)
        left = self._batch_max - self._next.size
        parts = self._gather(min(self._stretch, left), whole=min(BATCH_EVENTS_MAX, left))
        named = [
            one
            for request, part in parts
            for one in (request.incoming if request.planned == len(part) else part)
        ]
        try:
            await self._attempts.extend(
                self._next, parts, self._load, named=named, assume_new=True, aside=self._lane
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the slow way finds out whose answer it is
            self._next.error = error
            await self._landed()

    def _gather(self, most: int, *, whole: int) -> list[Part]:
        """The next events of the queue: of jobs that stay whole, or the beginning of one that is larger than ``whole``."""
        parts: list[Part] = []
        while self._queue and most > 0:
            request = self._queue[0]
            if self._lane.takes(request):
                self._lane.add(self._queue.popleft())
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
        """Whether an append that shares a room with this one is under way, outside of the lane."""
        planned = (
            other
            for batch in (self._next, self._sent, self._mending)
            if batch is not None
            for other in batch.answers
        )
        return any(not other.rooms.isdisjoint(request.rooms) for other in (*planned, *self._queue))

    async def write(self, batch: WriteBatch) -> None:
        """Write a plan of the lane in its turn.

        One that cannot be written as it is, but might be if it is made again, is not.
        """
        batch.over = asyncio.Event()
        self._aside.append(batch)
        self._wake.set()
        await batch.over.wait()

    def _give_up_aside(self) -> None:
        """Have the lane make its plans again."""
        self.failures += 1
        while self._aside:
            _set_over(self._aside.popleft())

    async def _load_aside(self, change_set: ChangeSet, needs: MissingData) -> None:
        """Load something for the lane. What is being written is of other rooms."""
        async with self._database.connection() as conn:
            await load(conn, change_set, needs)
            self._database.measures.writer_statements += conn.statements

    async def _load(self, change_set: ChangeSet, needs: MissingData) -> None:
        """Load something while a write may be under way, of which the database does not tell yet."""
        if self._sent is not None and not tells_of(needs, self._sent.change_set):
            await self._landed()
        if self._sent is not None and self._sent.error is not None:
            raise _BaseNotWritten
        async with self._database.connection() as conn:
            await load(conn, change_set, needs)
            self._database.measures.writer_statements += conn.statements

    @property
    def _stretch(self) -> int:
        """So many events are written though more wait: half of what is in hand, and the other half is planned meanwhile."""
        return min(BATCH_EVENTS_MAX, max(BATCH_EVENTS_MIN, self._events // 2), self._batch_max)

    def _may_send(self) -> bool:
        batch = self._next
        if batch is None or batch.error is not None or self._sent is not None or self._planning:
            return False
        if batch.era != self._database.era:
            batch.error = self._database.guard.error()
            self._wake.set()
            return False
        return not self._queue or batch.size >= self._stretch

    def _taken(self) -> WriteBatch | None:
        """What is planned, if it may be written now; from here on it is as if that were done."""
        batch = self._taken_aside()
        if batch is None:
            if not self._may_send():
                return None
            batch, self._next = self._next, None
        if batch is not None:
            self._sent = batch
            absorb(self.caches, batch.change_set)
        return batch

    def _taken_aside(self) -> WriteBatch | None:
        """A plan of the lane, if one may be written now."""
        if (
            self._sent is not None
            or self._planning
            or not self._aside
            or self._aside[0].error is not None
        ):
            return None
        batch = self._aside.popleft()
        if (
            batch.era != self._database.era
            or has_known_names(batch.change_set)
            or (self._next is not None and share_new_names(batch.change_set, self._next.change_set))
        ):
            _set_over(batch)
            return None
        return batch

    async def _write_ahead(self, batch: WriteBatch | None) -> None:
        """Write this, then what was planned meanwhile, before those who have their answers now come with more."""
        while batch is not None:
            try:
                await self._attempts.send(batch)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer to whoever waits
                batch.error = error
            else:
                self._sent = None
                _set_over(batch)
            batch = self._taken()
        self._wake.set()

    async def _landed(self) -> None:
        """What was sent is written, or was not done."""
        if self._writing is not None:
            await self._writing

    def _failed(self) -> WriteBatch | None:
        return next(
            (
                batch
                for batch in (self._sent, self._next, *self._aside)
                if batch is not None and batch.error is not None
            ),
            None,
        )

    async def _mend(self, failed: WriteBatch) -> None:
        """Take back what was not done and what was planned on it; then do the former in the slow way."""
        again = [
            request for request in failed.answers if failed.is_aside or request not in self._lane
        ]
        later = [
            request
            for request in (self._next.answers if self._next is not None else ())
            if request not in again
        ]
        if failed is self._sent:
            self._give_up_aside()
        if failed in self._aside:
            self._aside.remove(failed)
        self._sent = self._next = None
        self._mending = failed
        for request in (*again, *later):
            request.planned = len(request.answers)
        waiting = dict.fromkeys((*later, *self._queue))
        self._queue = deque(
            request for request in waiting if request not in again and request not in self._lane
        )
        if not isinstance(failed.error, OutcomeUnknown):
            self._attempts.forget(failed)
        await self._serve(
            again, failed if failed.sent or isinstance(failed.error, OutcomeUnknown) else None
        )
        self._mending = None
        self._queue.extendleft(
            request
            for request in reversed(again)
            if not request.is_over and request not in self._lane
        )
        _set_over(failed)

    async def _serve(
        self, requests: Sequence[AppendRequest], failed: WriteBatch | None = None
    ) -> None:
        """Do these jobs the slow way.

        One that fails is taken out and answered alone; the others are written without it.
        """
        try:
            await self._attempts.serve(requests, failed)
        except (*LOST, DatabaseFull) as error:
            for request in requests:
                request.fail(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer to whoever waits
            if len(requests) == 1:
                requests[0].fail(error)
                return
            for request in requests:
                await self._serve([request])


def _set_over(batch: WriteBatch) -> None:
    if batch.over is not None:
        batch.over.set()
