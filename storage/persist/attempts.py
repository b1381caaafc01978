"""Planning and writing: one attempt, and what follows when it fails.

Planning is optimistic: nothing is locked while it runs, and a write that was planned on rows that have changed since is refused, whole.
Then it is planned again, this time holding the rooms' locks, so that it cannot lose twice. Planning itself may go wrong on rows that do
not fit each other, some remembered and others read just now: so what it raises is believed only of a plan made under the locks, with
nothing remembered. Where the answer to a write is lost with the connection, it is looked up whether it was done: a write is one
statement, so one of its events tells for all.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, LiteralString, NamedTuple, Protocol

from storage.database.connection import Connection, Database
from storage.errors import ConstraintViolated, DatabaseConflict, DatabaseError, StorageCorrupt
from storage.persist.commit import absorb, place, tell
from storage.persist.context import Caches, Needs, Pause
from storage.persist.draft import Blocks, Draft
from storage.persist.jobs import Job, Plan
from storage.persist.load import load
from storage.persist.plan import Incoming, plan_event
from storage.persist.prefetch import Ahead, Load, prefetch
from storage.persist.results import AppendResult
from storage.persist.turns import HEAVY_SECONDS, LEAST_ASIDE, TURN_SECONDS, Turn
from storage.persist.write import Written, write
from storage.streams.following import learn_writers
from storage.streams.in_flight import LOST, InFlight
from storage.streams.registry import Restart, Streams
from storage.tracing import some, tracing

logger = logging.getLogger(__name__)

SQL_LOCK_ROOMS: Final[LiteralString] = """
SELECT pg_advisory_xact_lock(1919905645, room_nid)
FROM (SELECT room_nid FROM rooms WHERE room_id = ANY($1::text[]) ORDER BY room_nid) AS ordered
"""

SQL_STORED: Final[LiteralString] = """
SELECT e.event_nid, COALESCE(e.stream_ordering, 0) AS stream_ordering
FROM unnest($1::bigint[], $2::text[]) AS w (event_nid, event_id)
JOIN events e USING (event_nid, event_id)  -- a database that was restored gives a number to another event
"""

ROUNDS_MAX: Final = 10_000  # loads for one event; a state resolution takes some dozens

Part = tuple[Job, Sequence[Incoming]]


class Aside(Protocol):
    """Where appends of heavy rooms are planned."""

    def takes(self, job: Job, /) -> bool:
        """Whether an append shares a room with one that is there."""

    def add(self, job: Job, /) -> None:
        """Plan what is left of an append."""


class StoredRow(NamedTuple):
    """An event that is held, and its position; 0 for an outlier."""

    event_nid: int
    stream_ordering: int


class Unsure(Exception):  # noqa: N818  # a turn of the plan, not an error
    """An event that was taken for new cannot be stored: look up whether it is held already."""


class Attempts:
    """Plans and writes for one store. It makes one write at a time."""

    def __init__(self, database: Database, streams: Streams, caches: Caches, *, server_name: str, writer_nid: int) -> None:
        self.caches = caches
        self._database = database
        self._measures = database.measures
        self._streams = streams
        self._server_name = server_name
        self._blocks = Blocks()
        streams.on_restart(self._restart)
        self._in_flight = InFlight(database, streams, ("events", "backfill", "caches"), writer_nid)
        self._most = max(database.config.transaction_attempts, 3)  # in hope; under the locks; and with nothing remembered
        self._extremities_max = max(database.config.forward_extremities_max, 1)

    def plan(self, *, after: Plan | None = None) -> Plan:
        """An empty plan; what ``after`` has found not to be there need not be asked again."""
        draft = Draft(self.caches, self._blocks, self._server_name, extremities_max=self._extremities_max)
        if after is not None:
            draft.principals.update((name, None) for name, nid in after.draft.principals.items() if nid is None)
            draft.state_keys.update((key, None) for key, nid in after.draft.state_keys.items() if nid is None)
            draft.types.update((name, None) for name, nid in after.draft.types.items() if nid is None)
        draft.turn = Turn(TURN_SECONDS)
        return Plan(draft, era=self._database.era)

    def _restart(self, _: Restart) -> None:
        """The database is another one, whose sequences give these numbers to others."""
        self._blocks = Blocks()
        self.caches.forget()
        self.caches.has_past = False

    def _check_era(self, plan: Plan) -> None:
        """`DatabaseReplaced` for what was planned on a database that another one has taken the place of."""
        if plan.era != self._database.era:
            raise self._database.guard.error()

    async def extend(
        self,
        plan: Plan,
        parts: Sequence[Part],
        load_needs: Load,
        *,
        named: Sequence[Incoming],
        assume_new: bool,
        aside: Aside | None = None,
    ) -> None:
        """Plan these events, when what they and others of their batches (``named``) name is loaded.

        ``aside`` takes an append whose room turns out to be heavy, for the events that are not planned yet. `Unsure`: an assumption needs
        checking before the answers can be given.
        """
        for job, _ in parts:
            plan.answers.setdefault(job, [])
        try:
            await self._extend(plan, parts, load_needs, aside, named=named, assume_new=assume_new)
        except Exception:
            self._check_era(plan)  # what was remembered may have been forgotten meanwhile
            raise
        self._check_era(plan)

    async def _extend(
        self, plan: Plan, parts: Sequence[Part], load_needs: Load, aside: Aside | None, *, named: Sequence[Incoming], assume_new: bool
    ) -> None:
        ahead = await prefetch(load_needs, plan.draft, named, assume_new=assume_new)
        plan.draft.turn.begin()
        try:
            for job, part in parts:
                if aside is not None and aside.takes(job):
                    aside.add(job)
                    plan.forget(job)
                    continue
                least = LEAST_ASIDE if plan.is_aside else None if aside is None else 0
                answers = await _planned(plan.draft, part, load_needs, ahead, least=least)
                if aside is not None and len(answers) < len(part):
                    aside.add(job)
                if ahead.assumed and any(answer.outcome == "missing_parents" for answer in answers):
                    raise Unsure
                plan.answers[job] += answers
                plan.size += len(answers)
                plan.forget(job)
        finally:
            await ahead.landed()

    async def send(self, plan: Plan) -> None:
        """Write a plan whose rows are in the caches already."""
        await self._in_flight.ready()
        with self._in_flight.writing():
            async with self._database.connection() as conn:
                written = await self._written(conn, plan)
            self._measures.writer_statements += conn.statements
            await self._answered(plan, written)
        self._tell(plan, written)

    async def serve(self, jobs: Sequence[Job], failed: Plan | None = None) -> None:
        """Write what is left of these jobs; ``failed``: a plan of theirs that was not done.

        Once in the hope that all is new and nobody interferes (unless that has failed already); then, looking everything up, under the
        rooms' locks. What goes wrong in the end is raised.
        """
        if failed is None:
            await self._in_flight.ready()
        lost = forgotten = False
        for attempt in range(self._most):
            plan = failed if failed is not None and attempt == 0 else self.plan()
            try:
                return await self._attempt(plan, jobs, optimistic=attempt == 0)
            except Unsure:
                continue
            except DatabaseError as error:
                again = (DatabaseConflict, *LOST) if forgotten and attempt > 0 else (DatabaseConflict, ConstraintViolated, *LOST)
                self.caches.forget()
                forgotten = True
                if attempt + 1 == self._most or (lost and isinstance(error, LOST)) or not isinstance(error, again):
                    raise
                if isinstance(error, LOST):
                    lost = True
                    if await self._look_up(plan):
                        return None
            except Exception as error:
                if plan.sent or (forgotten and attempt > 0):
                    raise
                plan.error = error
                self.forget(plan)
                forgotten = True
        raise StorageCorrupt("a write was neither done nor refused")

    def forget(self, failed: Plan) -> None:
        """Forget everything that a plan was made on which was not done. One that could not even be made is told in the log."""
        if not failed.sent and not isinstance(failed.error, DatabaseError):
            logger.warning("not believed, as it may come of remembered rows that are old; planned again", exc_info=failed.error)
        self.caches.forget()

    async def _attempt(self, plan: Plan, jobs: Sequence[Job], *, optimistic: bool) -> None:
        """Plan and write once, with nothing else under way; a plan that was not done says why."""
        if plan.error is not None:
            raise plan.error
        with self._in_flight.writing():
            async with self._database.connection() if optimistic else self._database.transaction() as conn:
                parts = [(job, job.rest) for job in jobs]
                if not optimistic:
                    await conn.execute(SQL_LOCK_ROOMS, list({one.event.room_id for _, part in parts for one in part}))
                incoming = [one for _, part in parts for one in part]
                await self.extend(plan, parts, partial(load, conn), named=incoming, assume_new=optimistic)
                written = await self._written(conn, plan)
            self._measures.writer_statements += conn.statements
            await self._answered(plan, written)
        absorb(self.caches, plan.draft)
        self._tell(plan, written)

    async def _written(self, conn: Connection, plan: Plan) -> Written:
        self._check_era(plan)
        if not plan.draft.has_changes:
            return Written({}, 0)
        plan.sent = True
        self._in_flight.sent(conn)
        began = time.perf_counter()
        with tracing.commit((job.caller for job in plan.answers), _ids(plan) if tracing.tracer else {}):
            written = await write(conn, plan.draft, self._in_flight.author, time.time_ns() // 1_000_000)
        self._measures.writes.add(time.perf_counter() - began)
        self._measures.write_events.add(plan.size)
        return written

    async def _answered(self, plan: Plan, written: Written) -> None:
        """The answer is here: know the other writers before the position is told."""
        await learn_writers(self._database, self._streams, "events", written.writers)
        self._check_era(plan)
        self._in_flight.answered()

    def _tell(self, plan: Plan, written: Written) -> None:
        """It is committed: let it be known."""
        place(self.caches, plan.draft, written.positions)
        tell(self._streams, plan.draft, written)
        plan.done(self.caches, written.positions)

    async def _look_up(self, plan: Plan) -> bool:
        """Whether a write whose answer was lost was done; then its answers are given. `DatabaseUnavailable` if there is nobody to ask."""
        await self._in_flight.settle()
        if not (plan.sent and plan.draft.new_events):
            return False
        nids = list(plan.draft.new_events)
        async with self._database.connection() as conn:
            rows = await conn.fetch(SQL_STORED, nids, [plan.draft.events[nid].event_id for nid in nids], row=StoredRow)
        if rows:
            plan.done(self.caches, {row.event_nid: row.stream_ordering for row in rows})
        return bool(rows)


def _ids(plan: Plan) -> dict[str, Any]:
    """What is told of a write where somebody traces."""
    events = [one.event for job in plan.answers for one in job.incoming]
    ids = {"matrix.room_ids": some(one.room_id for one in events), "matrix.event_ids": some(one.event_id for one in events)}
    return {**ids, "storage.events": plan.size}


async def _planned(draft: Draft, part: Sequence[Incoming], load_needs: Load, ahead: Ahead, *, least: int | None) -> list[AppendResult]:
    """The answers of a part of an append; fewer if its room turns out to be heavy, but ``least``. None: all of them."""
    answers: list[AppendResult] = []
    for one in part:
        if draft.resolving_seconds and least is not None and len(answers) >= least and _is_heavy(draft, one):
            break
        if draft.turn.is_over:
            await _others(draft)
        try:
            answers.append(plan_event(draft, one))
        except Needs as needs:
            answer = await _decide(load_needs, draft, one, needs, ahead, may_leave=least == 0)
            if answer is None:
                break
            answers.append(answer)
    return answers


def _is_heavy(draft: Draft, one: Incoming) -> bool:
    return draft.resolving_seconds.get(one.event.room_id, 0) > HEAVY_SECONDS


async def _decide(
    load_needs: Load, draft: Draft, incoming: Incoming, lacking: Needs, ahead: Ahead, *, may_leave: bool
) -> AppendResult | None:
    """Plan one event, loading what it lacks; most likely that is on its way. None: it takes too long, and is left."""
    loads = 0
    while loads < ROUNDS_MAX:
        if not isinstance(lacking, Pause):
            loads += 1
            if not await ahead.landed():
                await load_needs(draft, lacking)
            draft.turn.begin()
        elif may_leave and any(work.seconds > HEAVY_SECONDS for work in draft.resolving.values()):
            return None
        else:
            await _others(draft)
        try:
            return plan_event(draft, incoming)
        except Needs as needs:
            lacking = needs
    raise StorageCorrupt(
        f"planning does not come to an end: {lacking.kind} lacks {some(map(str, lacking.keys))}", event_id=incoming.event.event_id
    )


async def _others(draft: Draft) -> None:
    """Others have their turn."""
    await asyncio.sleep(draft.turn.rest)
    draft.turn.begin()
