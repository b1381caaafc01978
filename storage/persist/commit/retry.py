"""One attempt to plan and write, and the recovery when it fails.

Planning is optimistic and takes no locks. If a row that the plan depends on has changed, the
database refuses the whole write. The events are then planned again under the rooms' advisory locks,
so that the second attempt cannot lose the same race.

Example: two processes append to the same forward extremity. Both plan for `write_version` 7. The
first write sets it to 8, so the second one is refused. The second process locks the room, loads its
rows again and plans for 8.

Planning itself may fail when cached rows do not match rows that were just read. It raises
`StalePlan` where it finds out, or any error. An error is therefore final only if the plan was made
under the locks with empty caches.

If the connection is lost during a write, one of its events is looked up
(`WriteAttempts._find_committed`). A write is one statement, so one stored event proves that all are
stored.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple, Protocol

from storage.database.connection import ATTEMPTS_MAX, Connection, Database
from storage.database.placeholders import fill
from storage.errors import ConstraintViolated, DatabaseConflict, DatabaseError, StorageCorrupt
from storage.observability.opentelemetry import some, tracing
from storage.persist.commit.publish import (
    absorb,
    arrival_ms,
    check_remembered,
    publish,
    remembered_rooms,
    set_positions,
)
from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.load.on_demand import load
from storage.persist.load.prefetch import Load, PendingPrefetch, prefetch
from storage.persist.model.caches import NidBlocks, WriterCaches
from storage.persist.model.change_set import (
    HEAVY_SECONDS,
    SLICE_SECONDS,
    SLOW_ROOM_EVENTS_MIN,
    ChangeSet,
    TimeSlice,
)
from storage.persist.model.incoming import AnyEvent, IncomingEvent, LocalEvent
from storage.persist.model.missing_data import MissingData, StalePlan, TimeSliceOver
from storage.persist.model.results import AppendResult
from storage.persist.plan.event import plan_any
from storage.persist.write.all_tables import WriteResult, write
from storage.streams.position_poller import learn_writers
from storage.streams.registry import Restart, Streams
from storage.streams.stream_writer import LOST, InFlight

logger: logging.Logger = logging.getLogger(__name__)

SQL_LOCK_ROOMS: Final[LiteralString] = fill("""
SELECT pg_advisory_xact_lock({LOCK_ROOM}, room_nid)
FROM (SELECT room_nid FROM rooms WHERE room_id = ANY($1::text[]) ORDER BY room_nid) AS ordered
""")

SQL_STORED: Final[LiteralString] = """
SELECT e.event_nid, COALESCE(e.stream_ordering, 0) AS stream_ordering
FROM unnest($1::bigint[], $2::text[]) AS w (event_nid, event_id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = w.event_nid OFFSET 0) AS e
-- a database that was restored gives a number to another event
WHERE e.event_id = w.event_id
"""

ROUNDS_MAX: Final = 10_000  # per event; a state resolution takes some dozens
EVENTS_PER_LOAD: Final = 512
"""Events whose data is loaded at once: some milliseconds of the event loop."""

Part = tuple[AppendRequest, Sequence[AnyEvent]]


class SlowRoomQueue(Protocol):
    """The queue of appends whose rooms are slow to resolve."""

    def takes(self, request: AppendRequest, /) -> bool:
        """Return whether an append shares a room with one in the queue."""

    def add(self, request: AppendRequest, /) -> None:
        """Queue the remaining events of an append."""


class StoredPositionRow(NamedTuple):
    """A stored event and its stream position, 0 for an outlier."""

    event_nid: int
    stream_ordering: int


class OutcomeUnknown(Exception):  # noqa: N818  # control flow, not an error
    """An event that was assumed to be new may already be stored: look it up."""


class WriteAttempts:
    """Plans and writes for one store. It makes one write at a time."""

    def __init__(
        self,
        database: Database,
        streams: Streams,
        caches: WriterCaches,
        *,
        server_name: str,
        writer_nid: int,
    ) -> None:
        self.caches = caches
        self._database = database
        self.measures = database.measures
        self._streams = streams
        self._server_name = server_name
        self._blocks = NidBlocks()
        streams.on_restart(self._restart)
        self._in_flight = InFlight(database, streams, ("events", "backfill", "caches"), writer_nid)
        # Three of them differ: optimistic, under the locks, and with empty caches.
        self._most = ATTEMPTS_MAX
        self._extremities_max = max(database.config.forward_extremities_max, 1)

    def plan(self, *, after: WriteBatch | None = None) -> WriteBatch:
        """Return an empty batch.

        Names that ``after`` found to be absent are not looked up again.
        """
        change_set = ChangeSet(
            self.caches, self._blocks, self._server_name, extremities_max=self._extremities_max
        )
        if after is not None:
            change_set.names.principals.update(
                (name, None)
                for name, nid in after.change_set.names.principals.items()
                if nid is None
            )
            change_set.names.state_keys.update(
                (key, None) for key, nid in after.change_set.names.state_keys.items() if nid is None
            )
            change_set.names.types.update(
                (name, None) for name, nid in after.change_set.names.types.items() if nid is None
            )
        change_set.time_slice = TimeSlice(SLICE_SECONDS)
        return WriteBatch(change_set, connection_generation=self._database.connection_generation)

    def _restart(self, _: Restart) -> None:
        """Handle a new database, whose sequences may return these numbers again."""
        self._blocks = NidBlocks()
        self.caches.forget()
        self.caches.knows_dictionary = False

    def _check_generation(self, batch: WriteBatch) -> None:
        """Raise `DatabaseReplaced` if the plan was made on an earlier database."""
        if batch.connection_generation != self._database.connection_generation:
            raise self._database.guard.error()

    async def extend(
        self,
        batch: WriteBatch,
        parts: Sequence[Part],
        load_needs: Load,
        *,
        assume_new: bool,
        slow_rooms: SlowRoomQueue | None = None,
        named: Sequence[AnyEvent] = (),
    ) -> None:
        """Load the data that the events refer to, then plan them, `EVENTS_PER_LOAD` at a time.

        ``named`` are these events and later ones, whose data is loaded with theirs. ``slow_rooms``
        takes the remaining events of an append whose room turns out to be heavy. Raise
        `OutcomeUnknown` if an assumption has to be checked before there are results.
        """
        for request, _ in parts:
            batch.answers.setdefault(request, [])
        try:
            for step in _in_steps(parts):
                upcoming = named or [event for _, part in step for event in part]
                await self._extend(
                    batch, step, load_needs, slow_rooms, named=upcoming, assume_new=assume_new
                )
        except Exception:
            self._check_generation(batch)  # the caches may have been cleared meanwhile
            raise
        self._check_generation(batch)

    async def _extend(
        self,
        batch: WriteBatch,
        parts: Sequence[Part],
        load_needs: Load,
        slow_rooms: SlowRoomQueue | None,
        *,
        named: Sequence[AnyEvent],
        assume_new: bool,
    ) -> None:
        pending = await prefetch(
            load_needs,
            batch.change_set,
            named,
            assume_new=assume_new and not any(request.is_repeated for request, _ in parts),
        )
        batch.change_set.time_slice.begin()
        try:
            for request, part in parts:
                if slow_rooms is not None and slow_rooms.takes(request):
                    slow_rooms.add(request)
                    batch.forget(request)
                    continue
                least = (
                    SLOW_ROOM_EVENTS_MIN
                    if batch.is_of_slow_room
                    else None
                    if slow_rooms is None
                    else 0
                )
                answers = await _planned(batch.change_set, part, load_needs, pending, least=least)
                if slow_rooms is not None and len(answers) < len(part):
                    slow_rooms.add(request)
                if pending.assumed and any(
                    answer.outcome == "missing_parents" for answer in answers
                ):
                    raise OutcomeUnknown
                batch.answers[request] += answers
                request.is_repeated = bool(answers) and answers[-1].outcome == "duplicate"
                batch.remembered |= remembered_rooms(
                    batch.change_set, zip(part, answers, strict=False)
                )
                batch.size += len(answers)
                batch.forget(request)
        finally:
            await pending.finished()

    async def send(self, batch: WriteBatch) -> None:
        """Write a batch whose rows are already in the caches."""
        await self._in_flight.ready()
        with self._in_flight.writing():
            async with self._database.connection() as conn:
                written = await self._written(conn, batch)
            self.measures.writer_statements += conn.statements
            await self._answered(batch, written)
        self._tell(batch, written)

    async def serve(self, parts: Sequence[Part], failed: WriteBatch | None = None) -> None:
        """Write the next events of these appends.

        ``failed`` is their last batch, if it failed.

        The first attempt assumes that the events are new and that no other writer interferes. If
        ``failed`` is given, it counts as that attempt. Later attempts look up everything under the
        rooms' locks. The error of the last attempt is raised.

        Events that are built here are planned without the locks until the last attempt, because
        planning signs them. The last attempt signs under the locks: without them, a writer whose
        caches were cleared could lose to one with full caches for ever.
        """
        if failed is None:
            await self._in_flight.ready()
        lost = forgotten = False
        signs = any(isinstance(event, LocalEvent) for _, part in parts for event in part)
        for attempt in range(self._most):
            batch = failed if failed is not None and attempt == 0 else self.plan()
            locks = attempt > 0 and (not signs or attempt + 1 == self._most)
            try:
                return await self._attempt(batch, parts, assume_new=attempt == 0, locks=locks)
            except OutcomeUnknown:
                continue  # the next attempt assumes nothing (`assume_new` in `_attempt`)
            except DatabaseError as error:
                # Stale cached rows can violate a constraint. With empty caches it is a defect.
                again = (
                    (DatabaseConflict, *LOST)
                    if forgotten and attempt > 0
                    else (DatabaseConflict, ConstraintViolated, *LOST)
                )
                self.caches.forget()
                forgotten = True
                if (
                    attempt + 1 == self._most
                    or (lost and isinstance(error, LOST))
                    or not isinstance(error, again)
                ):
                    raise
                if isinstance(error, LOST):
                    lost = True  # a second loss is raised
                    if await self._find_committed(batch):
                        return None
            except Exception as error:
                # Planning failed. It is final only if no cached row can be the reason.
                if batch.sent or (forgotten and attempt > 0):
                    raise
                batch.error = error
                self.forget(batch)
                forgotten = True
        raise StorageCorrupt("a write neither succeeded nor was refused")

    def forget(self, failed: WriteBatch) -> None:
        """Clear the caches, because the failed plan was based on them.

        Log an unexpected error of the plan. `StalePlan` is part of the work of several writers.
        """
        if isinstance(failed.error, StalePlan):
            logger.debug("%s: planning again without cached rows", failed.error)
        elif not failed.sent and not isinstance(failed.error, DatabaseError):
            logger.warning(
                "planning failed, perhaps because of stale cached rows; trying again without them",
                exc_info=failed.error,
            )
        self.caches.forget()

    async def _attempt(
        self,
        batch: WriteBatch,
        parts: Sequence[Part],
        *,
        assume_new: bool,
        locks: bool,
    ) -> None:
        """Plan and write once. No other write may be running.

        A batch that already failed raises its error.
        """
        if batch.error is not None:
            raise batch.error
        with self._in_flight.writing():
            async with (
                self._database.transaction() if locks else self._database.connection() as conn
            ):
                # The locks last until the commit. Other writers of these rooms wait in `write`.
                if locks:
                    await conn.execute(
                        SQL_LOCK_ROOMS,
                        list({event.room_id for _, part in parts for event in part}),
                    )
                await self.extend(batch, parts, partial(load, conn), assume_new=assume_new)
                written = await self._written(conn, batch)
            self.measures.writer_statements += conn.statements
            await self._answered(batch, written)
        absorb(self.caches, batch.change_set)  # for `send`, `Writer._taken` has done this
        self._tell(batch, written)

    async def _written(self, conn: Connection, batch: WriteBatch) -> WriteResult:
        self._check_generation(batch)
        await check_remembered(conn, batch.remembered.values())
        if not batch.change_set.has_changes:
            return WriteResult({}, 0)
        batch.sent = True
        self._in_flight.sent(conn)
        began = time.perf_counter()
        with tracing.commit(
            (request.caller for request in batch.answers), _ids(batch) if tracing.tracer else {}
        ):
            received_ms = arrival_ms(self.measures)
            written = await write(conn, batch.change_set, self._in_flight.author, received_ms)
        self.measures.writes.add(time.perf_counter() - began)
        self.measures.write_events.add(batch.size)
        return written

    async def _answered(self, batch: WriteBatch, written: WriteResult) -> None:
        """Load new writers before the position is published, so that it never passes their ids."""
        await learn_writers(self._database, self._streams, "events", written.writers)
        self._check_generation(batch)
        self._in_flight.answered()

    def _tell(self, batch: WriteBatch, written: WriteResult) -> None:
        """Publish a committed batch and return its results."""
        set_positions(self.caches, batch.change_set, written.positions)
        publish(self._streams, batch.change_set, written)
        batch.done(self.caches, written.positions)

    async def _find_committed(self, batch: WriteBatch) -> bool:
        """Return whether a write committed although its answer was lost.

        If so, return its results to the callers.

        Raise `DatabaseUnavailable` if the database cannot be reached.
        """
        await self._in_flight.settle()
        if not (batch.sent and batch.change_set.events.new_events):
            return False
        nids = list(batch.change_set.events.new_events)
        async with self._database.connection() as conn:
            rows = await conn.fetch(
                SQL_STORED,
                nids,
                [batch.change_set.events.parsed[nid].event_id for nid in nids],
                row=StoredPositionRow,
            )
        if rows:
            batch.done(self.caches, {row.event_nid: row.stream_ordering for row in rows})
        return bool(rows)


def _ids(batch: WriteBatch) -> dict[str, Any]:
    """Return the span attributes of a write."""
    events = [event for request in batch.answers for event in request.incoming]
    ids = {
        "matrix.room_ids": some(event.room_id for event in events),
        "matrix.event_ids": some(
            incoming.event.event_id for incoming in events if isinstance(incoming, IncomingEvent)
        ),
    }
    return {**ids, "storage.events": batch.size}


def _in_steps(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield the events of the appends, at most `EVENTS_PER_LOAD` together."""
    step: list[Part] = []
    left = EVENTS_PER_LOAD
    for request, part in parts:
        rest = part
        while len(rest) >= left:
            yield [*step, (request, rest[:left])]
            step, rest, left = [], rest[left:], EVENTS_PER_LOAD
        if rest:
            step.append((request, rest))
            left -= len(rest)
    if step:
        yield step


async def _planned(
    change_set: ChangeSet,
    part: Sequence[AnyEvent],
    load_needs: Load,
    pending: PendingPrefetch,
    *,
    least: int | None,
) -> list[AppendResult]:
    """Plan a part of an append and return its results.

    If the room turns out to be heavy, stop after ``least`` events. None: plan all of them.
    """
    answers: list[AppendResult] = []
    for event in part:
        if (
            change_set.states.resolving_seconds
            and least is not None
            and len(answers) >= least
            and _is_heavy(change_set, event)
        ):
            break
        if change_set.time_slice.is_used_up:
            await _others(change_set)
        try:
            answers.append(plan_any(change_set, event))
        except MissingData as needs:
            answer = await _decide(
                load_needs, change_set, event, needs, pending, may_leave=least == 0
            )
            if answer is None:
                break
            answers.append(answer)
    return answers


def _is_heavy(change_set: ChangeSet, event: AnyEvent) -> bool:
    return change_set.states.resolving_seconds.get(event.room_id, 0) > HEAVY_SECONDS


async def _decide(
    load_needs: Load,
    change_set: ChangeSet,
    incoming: AnyEvent,
    lacking: MissingData,
    pending: PendingPrefetch,
    *,
    may_leave: bool,
) -> AppendResult | None:
    """Plan one event, loading missing data until it succeeds. The data is usually being prefetched.

    Return None if the event takes too long and is left to the slow rooms.
    """
    loads = 0
    while loads < ROUNDS_MAX:
        if not isinstance(lacking, TimeSliceOver):
            loads += 1
            if not await pending.finished():
                await load_needs(change_set, lacking)
            change_set.time_slice.begin()
        elif may_leave and any(
            work.seconds > HEAVY_SECONDS for work in change_set.states.resolving.values()
        ):
            return None
        else:
            await _others(change_set)
        try:
            return plan_any(change_set, incoming)
        except MissingData as needs:
            lacking = needs
    raise StorageCorrupt(
        f"planning does not terminate: {lacking.kind} lacks {some(map(str, lacking.keys))}",
        room_id=incoming.room_id,
    )


async def _others(change_set: ChangeSet) -> None:
    """Yield the event loop, then start the next time slice."""
    await asyncio.sleep(change_set.time_slice.rest)
    change_set.time_slice.begin()
