"""Planning and writing: one attempt, and what follows when it fails.

Planning is optimistic: nothing is locked while it runs, and a write that was planned on rows that
have changed since is refused, whole. Then it is planned again, this time holding the rooms' locks,
so that it cannot lose twice. Planning itself may go wrong on rows that do not fit each other, some
remembered and others read just now: so what it raises is believed only of a plan made under the
locks, with nothing remembered. Where the answer to a write is lost with the connection, it is
looked up whether it was done: a write is one statement, so one of its events tells for all.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple, Protocol

from storage.database.connection import Connection, Database
from storage.errors import ConstraintViolated, DatabaseConflict, DatabaseError, StorageCorrupt
from storage.observability.opentelemetry import some, tracing
from storage.persist.commit.publish import absorb, place, publish
from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.load.by_kind import load
from storage.persist.load.prefetch import Load, PendingPrefetch, prefetch
from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet, NidBlocks
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.missing_data import MissingData, TimeSliceOver
from storage.persist.model.results import AppendResult
from storage.persist.model.time_slice import (
    HEAVY_SECONDS,
    SLICE_SECONDS,
    SLOW_ROOM_EVENTS_MIN,
    TimeSlice,
)
from storage.persist.plan.event import plan_event
from storage.persist.write.all_tables import WriteResult, write
from storage.streams.in_flight import LOST, InFlight
from storage.streams.position_poller import learn_writers
from storage.streams.registry import Restart, Streams

logger = logging.getLogger(__name__)

SQL_LOCK_ROOMS: Final[LiteralString] = """
SELECT pg_advisory_xact_lock(1919905645, room_nid)
FROM (SELECT room_nid FROM rooms WHERE room_id = ANY($1::text[]) ORDER BY room_nid) AS ordered
"""

SQL_STORED: Final[LiteralString] = """
SELECT e.event_nid, COALESCE(e.stream_ordering, 0) AS stream_ordering
FROM unnest($1::bigint[], $2::text[]) AS w (event_nid, event_id)
-- a database that was restored gives a number to another event
JOIN events e USING (event_nid, event_id)
"""

ROUNDS_MAX: Final = 10_000  # loads for one event; a state resolution takes some dozens

Part = tuple[AppendRequest, Sequence[IncomingEvent]]


class SlowRoomQueue(Protocol):
    """Where appends of heavy rooms are planned."""

    def takes(self, request: AppendRequest, /) -> bool:
        """Whether an append shares a room with one that is there."""

    def add(self, request: AppendRequest, /) -> None:
        """Plan what is left of an append."""


class StoredPositionRow(NamedTuple):
    """An event that is held, and its position; 0 for an outlier."""

    event_nid: int
    stream_ordering: int


class OutcomeUnknown(Exception):  # noqa: N818  # a turn of the plan, not an error
    """An event that was taken for new cannot be stored: look up whether it is held already."""


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
        self._measures = database.measures
        self._streams = streams
        self._server_name = server_name
        self._blocks = NidBlocks()
        streams.on_restart(self._restart)
        self._in_flight = InFlight(database, streams, ("events", "backfill", "caches"), writer_nid)
        self._most = max(
            database.config.transaction_attempts, 3
        )  # in hope; under the locks; and with nothing remembered
        self._extremities_max = max(database.config.forward_extremities_max, 1)

    def plan(self, *, after: WriteBatch | None = None) -> WriteBatch:
        """An empty plan; what ``after`` has found not to be there need not be asked again."""
        change_set = ChangeSet(
            self.caches, self._blocks, self._server_name, extremities_max=self._extremities_max
        )
        if after is not None:
            change_set.principals.update(
                (name, None) for name, nid in after.change_set.principals.items() if nid is None
            )
            change_set.state_keys.update(
                (key, None) for key, nid in after.change_set.state_keys.items() if nid is None
            )
            change_set.types.update(
                (name, None) for name, nid in after.change_set.types.items() if nid is None
            )
        change_set.time_slice = TimeSlice(SLICE_SECONDS)
        return WriteBatch(change_set, era=self._database.era)

    def _restart(self, _: Restart) -> None:
        """The database is another one, whose sequences give these numbers to others."""
        self._blocks = NidBlocks()
        self.caches.forget()
        self.caches.has_past = False

    def _check_era(self, batch: WriteBatch) -> None:
        """`DatabaseReplaced` for what was planned on a database that another one has taken the place of."""
        if batch.era != self._database.era:
            raise self._database.guard.error()

    async def extend(
        self,
        batch: WriteBatch,
        parts: Sequence[Part],
        load_needs: Load,
        *,
        named: Sequence[IncomingEvent],
        assume_new: bool,
        aside: SlowRoomQueue | None = None,
    ) -> None:
        """Plan these events, when what they and others of their batches (``named``) name is loaded.

        ``aside`` takes an append whose room turns out to be heavy, for the events that are not
        planned yet. `OutcomeUnknown`: an assumption needs checking before the answers can be given.
        """
        for request, _ in parts:
            batch.answers.setdefault(request, [])
        try:
            await self._extend(batch, parts, load_needs, aside, named=named, assume_new=assume_new)
        except Exception:
            self._check_era(batch)  # what was remembered may have been forgotten meanwhile
            raise
        self._check_era(batch)

    async def _extend(
        self,
        batch: WriteBatch,
        parts: Sequence[Part],
        load_needs: Load,
        aside: SlowRoomQueue | None,
        *,
        named: Sequence[IncomingEvent],
        assume_new: bool,
    ) -> None:
        ahead = await prefetch(load_needs, batch.change_set, named, assume_new=assume_new)
        batch.change_set.time_slice.begin()
        try:
            for request, part in parts:
                if aside is not None and aside.takes(request):
                    aside.add(request)
                    batch.forget(request)
                    continue
                least = SLOW_ROOM_EVENTS_MIN if batch.is_aside else None if aside is None else 0
                answers = await _planned(batch.change_set, part, load_needs, ahead, least=least)
                if aside is not None and len(answers) < len(part):
                    aside.add(request)
                if ahead.assumed and any(answer.outcome == "missing_parents" for answer in answers):
                    raise OutcomeUnknown
                batch.answers[request] += answers
                batch.size += len(answers)
                batch.forget(request)
        finally:
            await ahead.landed()

    async def send(self, batch: WriteBatch) -> None:
        """Write a plan whose rows are in the caches already."""
        await self._in_flight.ready()
        with self._in_flight.writing():
            async with self._database.connection() as conn:
                written = await self._written(conn, batch)
            self._measures.writer_statements += conn.statements
            await self._answered(batch, written)
        self._tell(batch, written)

    async def serve(
        self, requests: Sequence[AppendRequest], failed: WriteBatch | None = None
    ) -> None:
        """Write what is left of these jobs; ``failed``: a plan of theirs that was not done.

        Once in the hope that all is new and nobody interferes (unless that has failed already);
        then, looking everything up, under the rooms' locks. What goes wrong in the end is raised.
        """
        if failed is None:
            await self._in_flight.ready()
        lost = forgotten = False
        for attempt in range(self._most):
            batch = failed if failed is not None and attempt == 0 else self.plan()
            try:
                return await self._attempt(batch, requests, optimistic=attempt == 0)
            except OutcomeUnknown:
                continue
            except DatabaseError as error:
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
                    lost = True
                    if await self._look_up(batch):
                        return None
            except Exception as error:
                if batch.sent or (forgotten and attempt > 0):
                    raise
                batch.error = error
                self.forget(batch)
                forgotten = True
        raise StorageCorrupt("a write was neither done nor refused")

    def forget(self, failed: WriteBatch) -> None:
        """Forget everything that a plan was made on which was not done.

        One that could not even be made is told in the log.
        """
        if not failed.sent and not isinstance(failed.error, DatabaseError):
            logger.warning(
                "not believed, as it may come of remembered rows that are old; planned again",
                exc_info=failed.error,
            )
        self.caches.forget()

    async def _attempt(
        self, batch: WriteBatch, requests: Sequence[AppendRequest], *, optimistic: bool
    ) -> None:
        """Plan and write once, with nothing else under way; a plan that was not done says why."""
        if batch.error is not None:
            raise batch.error
        with self._in_flight.writing():
            async with (
                self._database.connection() if optimistic else self._database.transaction() as conn
            ):
                parts = [(request, request.rest) for request in requests]
                if not optimistic:
                    await conn.execute(
                        SQL_LOCK_ROOMS,
                        list({one.event.room_id for _, part in parts for one in part}),
                    )
                incoming = [one for _, part in parts for one in part]
                await self.extend(
                    batch, parts, partial(load, conn), named=incoming, assume_new=optimistic
                )
                written = await self._written(conn, batch)
            self._measures.writer_statements += conn.statements
            await self._answered(batch, written)
        absorb(self.caches, batch.change_set)
        self._tell(batch, written)

    async def _written(self, conn: Connection, batch: WriteBatch) -> WriteResult:
        self._check_era(batch)
        if not batch.change_set.has_changes:
            return WriteResult({}, 0)
        batch.sent = True
        self._in_flight.sent(conn)
        began = time.perf_counter()
        with tracing.commit(
            (request.caller for request in batch.answers), _ids(batch) if tracing.tracer else {}
        ):
            written = await write(
                conn, batch.change_set, self._in_flight.author, time.time_ns() // 1_000_000
            )
        self._measures.writes.add(time.perf_counter() - began)
        self._measures.write_events.add(batch.size)
        return written

    async def _answered(self, batch: WriteBatch, written: WriteResult) -> None:
        """The answer is here: know the other writers before the position is told."""
        await learn_writers(self._database, self._streams, "events", written.writers)
        self._check_era(batch)
        self._in_flight.answered()

    def _tell(self, batch: WriteBatch, written: WriteResult) -> None:
        """It is committed: let it be known."""
        place(self.caches, batch.change_set, written.positions)
        publish(self._streams, batch.change_set, written)
        batch.done(self.caches, written.positions)

    async def _look_up(self, batch: WriteBatch) -> bool:
        """Whether a write whose answer was lost was done; then its answers are given.

        `DatabaseUnavailable` if there is nobody to ask.
        """
        await self._in_flight.settle()
        if not (batch.sent and batch.change_set.new_events):
            return False
        nids = list(batch.change_set.new_events)
        async with self._database.connection() as conn:
            rows = await conn.fetch(
                SQL_STORED,
                nids,
                [batch.change_set.events[nid].event_id for nid in nids],
                row=StoredPositionRow,
            )
        if rows:
            batch.done(self.caches, {row.event_nid: row.stream_ordering for row in rows})
        return bool(rows)


def _ids(batch: WriteBatch) -> dict[str, Any]:
    """What is told of a write where somebody traces."""
    events = [one.event for request in batch.answers for one in request.incoming]
    ids = {
        "matrix.room_ids": some(one.room_id for one in events),
        "matrix.event_ids": some(one.event_id for one in events),
    }
    return {**ids, "storage.events": batch.size}


async def _planned(
    change_set: ChangeSet,
    part: Sequence[IncomingEvent],
    load_needs: Load,
    ahead: PendingPrefetch,
    *,
    least: int | None,
) -> list[AppendResult]:
    """The answers of a part of an append; fewer if its room turns out to be heavy, but ``least``.

    None: all of them.
    """
    answers: list[AppendResult] = []
    for one in part:
        if (
            change_set.resolving_seconds
            and least is not None
            and len(answers) >= least
            and _is_heavy(change_set, one)
        ):
            break
        if change_set.time_slice.is_over:
            await _others(change_set)
        try:
            answers.append(plan_event(change_set, one))
        except MissingData as needs:
            answer = await _decide(load_needs, change_set, one, needs, ahead, may_leave=least == 0)
            if answer is None:
                break
            answers.append(answer)
    return answers


def _is_heavy(change_set: ChangeSet, one: IncomingEvent) -> bool:
    return change_set.resolving_seconds.get(one.event.room_id, 0) > HEAVY_SECONDS


async def _decide(
    load_needs: Load,
    change_set: ChangeSet,
    incoming: IncomingEvent,
    lacking: MissingData,
    ahead: PendingPrefetch,
    *,
    may_leave: bool,
) -> AppendResult | None:
    """Plan one event, loading what it lacks; most likely that is on its way.

    None: it takes too long, and is left.
    """
    loads = 0
    while loads < ROUNDS_MAX:
        if not isinstance(lacking, TimeSliceOver):
            loads += 1
            if not await ahead.landed():
                await load_needs(change_set, lacking)
            change_set.time_slice.begin()
        elif may_leave and any(
            work.seconds > HEAVY_SECONDS for work in change_set.resolving.values()
        ):
            return None
        else:
            await _others(change_set)
        try:
            return plan_event(change_set, incoming)
        except MissingData as needs:
            lacking = needs
    raise StorageCorrupt(
        f"planning does not come to an end: {lacking.kind} lacks {some(map(str, lacking.keys))}",
        event_id=incoming.event.event_id,
    )


async def _others(change_set: ChangeSet) -> None:
    """Others have their turn."""
    await asyncio.sleep(change_set.time_slice.rest)
    change_set.time_slice.begin()
