"""Passes over the tables of a mirror: once, or until stopped.

A round takes the events first, and `rooms` last. Events and state changes are mostly appended, so
they are read in every round. A pass over the others rewrites files, so they wait some seconds.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import SparkSession

from storage.config import Config
from storage.database.arrow_results import ArrowConnection, arrow_snapshot
from storage.errors import ResyncNeeded
from storage.pipeline.lake.bulk import MirrorTasks
from storage.pipeline.lake.delta_table import LakeTable, MirrorState
from storage.pipeline.lake.event_pass import EventPass, RoomPass, erased_digest
from storage.pipeline.lake.tables import (
    EVENTS,
    ROOMS,
    STATE_CHANGES,
    chosen_tables,
    current_position,
)
from storage.pipeline.source.token_bounds import deployment_of, position_of, token_of
from storage.streams import SyncToken

OFTEN: Final = (EVENTS.name, STATE_CHANGES.name)


@dataclass(frozen=True, slots=True)
class MirrorPass:
    """A commit: the rows that were read, and those that were deleted or replaced.

    ``replaced`` counts events, or rooms of the other tables. ``version`` is the table's.
    """

    table: str
    version: int
    rows: int
    replaced: int
    seconds: float


@dataclass(slots=True)
class Mirroring:
    """A mirror that runs: the tables that are open, and how to read."""

    dsn: str = field(repr=False)  # it may contain a password
    tables: dict[str, LakeTable]
    bulk: MirrorTasks
    config: Config
    batch: int
    keep_hours: int
    report: Callable[[MirrorPass], None]
    compare: bool

    def round(self, *, whole: bool) -> bool:
        """Make a pass over each table; return whether more events wait.

        ``whole``: over all tables, not only those that are read often. Then `rooms` is read in a
        snapshot from before the other passes, and committed last (`storage.pipeline.lake.bulk`).
        """
        if not whole:
            return self._passes([name for name in OFTEN if name in self.tables])
        with arrow_snapshot(self.dsn, config=self.config) as early:
            current_position(early)  # the first statement takes the snapshot
            more = self._passes([name for name in self.tables if name != ROOMS.name])
            self._pass_in(early, self.tables[ROOMS.name])
        return more

    def _passes(self, names: list[str]) -> bool:
        more = False
        for name in names:
            more = self._pass(self.tables[name]) or more
        return more

    def tidy(self, *, always: bool) -> None:
        """Merge small files where there are many; with ``always`` also delete old ones."""
        for lake in self.tables.values():
            lake.compact(self.bulk.merged, always=always)
            if always:
                lake.vacuum(self.keep_hours)

    def _pass(self, lake: LakeTable) -> bool:
        with arrow_snapshot(self.dsn, config=self.config) as conn:
            return self._pass_in(conn, lake)

    def _pass_in(self, conn: ArrowConnection, lake: LakeTable) -> bool:
        """Make the next commit of a table, if there is news; return whether events wait."""
        began = time.monotonic()
        state = lake.state()
        now = current_position(conn)
        start = self._start(conn, state, now, deployment_of(conn))
        is_current = start is not None and self._is_current(conn, lake, state, start, now)
        if is_current and not self.compare:
            return False
        more, numbers = self._commit(conn, lake, state, start, now)
        lake.compact(self.bulk.merged)
        self.report(MirrorPass(lake.table.name, lake.version, *numbers, time.monotonic() - began))
        return more

    def _start(
        self, conn: ArrowConnection, state: MirrorState | None, now: SyncToken, deployment: str
    ) -> SyncToken | None:
        """Return the position of the table; None before its first pass."""
        if state is None:
            return None
        if self.compare:
            return now
        try:
            return token_of(conn, state.position, deployment)
        except ResyncNeeded as error:
            raise ResyncNeeded(
                state.position,
                "the mirror has events that a restore of the database removed: mirror once with"
                " --compare, which makes the tables equal to the store again",
            ) from error

    def _is_current(
        self,
        conn: ArrowConnection,
        lake: LakeTable,
        state: MirrorState | None,
        start: SyncToken,
        now: SyncToken,
    ) -> bool:
        if not now <= start:
            return False
        return lake.table is not EVENTS or state is None or state.erased == erased_digest(conn)

    def _commit(
        self,
        conn: ArrowConnection,
        lake: LakeTable,
        state: MirrorState | None,
        start: SyncToken | None,
        now: SyncToken,
    ) -> tuple[bool, tuple[int, int]]:
        """Make the commit; return whether events wait, and the numbers of rows."""
        deployment = deployment_of(conn)
        rooms = self.tables[ROOMS.name]
        compare = self.compare and start is not None
        if lake.table is not EVENTS:
            room_pass = RoomPass(conn, lake, start, now)
            return False, room_pass.commit(rooms, now.print(deployment), self.bulk, compare=compare)
        begin = start or SyncToken.of({"caches": position_of(now, "caches")})
        erased = erased_digest(conn) if state is None else state.erased
        made = EventPass.of(conn, lake, begin, now, erased, batch=self.batch)
        changes = made.changes(rooms, compare=compare)
        return made.more, made.commit(changes, made.end.print(deployment), self.bulk)


def run(
    spark: SparkSession | None,
    dsn: str,
    path: str,
    tables: tuple[str, ...],
    *,
    once: bool,
    compare: bool,
    every_s: float,
    rooms_every_s: float,
    keep_hours: int,
    batch: int,
    tasks: int,
    stop: threading.Event,
    report: Callable[[MirrorPass], None],
) -> None:
    """Run a mirror; see `storage.pipeline.mirror`."""
    config = Config.from_env()
    with arrow_snapshot(dsn, config=config) as conn:
        deployment = deployment_of(conn)
    opened = {
        table.name: LakeTable.open(path, table, deployment, keep_hours)
        for table in chosen_tables(tables)
    }
    bulk = MirrorTasks(spark, dsn, tasks, config)
    running = Mirroring(dsn, opened, bulk, config, batch, keep_hours, report, compare)
    if once or compare:
        while running.round(whole=True) and not stop.is_set():
            pass
        running.compare = False
        running.tidy(always=True)
    if not once:
        _follow(running, stop, every_s, rooms_every_s)


def _follow(
    running: Mirroring, stop: threading.Event, every_s: float, rooms_every_s: float
) -> None:
    """Make rounds until stopped; wait between them unless events wait."""
    rooms_due = tidy_due = 0.0
    while not stop.is_set():
        began = time.monotonic()
        whole = began >= rooms_due
        more = running.round(whole=whole)
        if whole:
            rooms_due = began + rooms_every_s
        if began >= tidy_due:
            running.tidy(always=tidy_due > 0)
            tidy_due = began + TIDY_S
        if not more:
            stop.wait(max(every_s - (time.monotonic() - began), 0))


TIDY_S: Final = 3_600.0
"""Seconds between two times that old files are deleted."""
