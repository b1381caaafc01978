"""Counters and timings of a process: numbers, added where the work is done, read on demand.

`storage.observability.prometheus` exports them to Prometheus. They are always kept, because keeping
them costs less than a check: a distribution takes a fifth of a microsecond for a value. One event
loop adds to them. Other threads may read them at any time, and may find a value in the counts but
not yet in the sum.
"""

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SECONDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
READ_OUTCOMES: Final = ("standby", "behind", "cancelled", "failed", "resting")
"""Outcomes of reads of a store with a standby (`storage.streams.reads`)."""
FAILURES: Final = (
    "StorageCorrupt",
    "CommitUnknown",
    "DatabaseFull",
    "ConstraintViolated",
    "KeyError",
    "IndexError",
    "TypeError",
)
"""Classes of errors that no caller of the store causes: docs/alerts.yml has an alert for them."""
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)


class Distribution:
    """Counts of values up to each of ``bounds`` (and above the one before), and their ``total``.

    The last count is that of values above all bounds.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds: Sequence[float] = bounds
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def __len__(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Measures:
    """The numbers of one `Database` and of all work on it."""

    def __init__(self) -> None:
        self.calls: dict[str, Distribution] = {}
        """Seconds that calls of the store took, by name; of sync without the waiting."""
        self.call_errors: Counter[tuple[str, str]] = Counter()
        """Exceptions of calls: (call, class of the error)."""
        self.append_events: Distribution = Distribution(SIZES)
        """Events given to an append."""
        self.outcomes: Counter[str] = Counter()
        """Outcomes of the events."""
        self.unwritable_events: int = 0
        """Events that are invalid because a constraint refuses them."""
        self.writes: Distribution = Distribution()
        """Seconds of one write of the writer.

        It is one statement, committed by itself unless rooms had to be locked.
        """
        self.write_events: Distribution = Distribution(SIZES)
        """Events in a write."""
        self.writer_statements = 0
        """Statements of the writer: loads and writes."""
        self.statements = 0
        """All statements."""
        self.last_received_ms = 0
        """When events were last written, by this process or one before it, by the clock of then."""
        self.clock_steps_back = 0
        """How often the clock had gone back when events were written."""
        self.pool_waits: Distribution = Distribution()
        """Seconds until the pool lent out a connection, if none was idle; opening one counts."""
        self.database_errors: Counter[str] = Counter()
        """Errors of Postgres, by class, including those that were retried."""
        self.replica_reads: Counter[str] = Counter()
        """Reads of a store with a standby, by outcome (`storage.streams.reads`)."""
        self.replica_waits: Distribution = Distribution()
        """Seconds that reads waited for the standby to replay what they need."""
        self.streams_polled_at: float = time.monotonic()
        """When the positions of all writers were last read, on the monotonic clock."""

    def call(self, name: str) -> Distribution:
        if name not in self.calls:
            self.calls[name] = Distribution()
        return self.calls[name]


# --------------------------------------------------------------------------------------------------
# How far a long job is. The job reports it; the command line shows it.
#
#     counted = Counted(report, "verify", total=3_500, unit="rooms")
#     counted.within(0.5)  # half of the first room
#     counted.add(1)
#
# A job has one or more phases, one after the other. Totals are cheap to find: a count by an index,
# or an estimate of Postgres.


class Progress(NamedTuple):
    """``done`` of ``total`` units in a phase; ``total`` None: unknown."""

    phase: str
    done: float
    total: float | None
    unit: str
    is_estimate: bool = False
    """The total is an estimate; more may be done in the end."""

    @property
    def share(self) -> float:
        """Return the part that is done, from 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0


Report = Callable[[Progress], None]
"""Called after each part of a job. It must return soon."""


def silent(_: Progress) -> None:
    """Report nothing."""


@dataclass(slots=True)
class Counted:
    """Counts what is done in one phase, and reports it from the beginning."""

    report: Report
    phase: str
    total: float | None
    unit: str
    is_estimate: bool = False
    done: float = 0

    def __post_init__(self) -> None:
        self.within(0)

    def add(self, more: float = 1) -> None:
        """Report that so many units more are done."""
        self.done += more
        self.within(0)

    def within(self, part: float) -> None:
        """Report a part of the next unit, or units, which `add` has not counted yet."""
        self.report(Progress(self.phase, self.done + part, self.total, self.unit, self.is_estimate))


# --------------------------------------------------------------------------------------------------
# Outages in the log: the first failure, each further reason once, and the recovery.
#
#     outage = Outage(logger, "the database")
#     outage.failed("no connection")  # WARNING, the first time
#     outage.recovered()  # WARNING: "the database is back after 12.3 s (48 failed attempts)"
#
# A loop that tries again four times a second reports both outcomes of every attempt here. So an
# outage of any length takes a few lines of the log.

REASONS_MAX: Final = 5
"""Most reasons that are logged in one outage: a reason may contain a number that changes."""


class Outage:
    """The outages of one thing, of which at most one is current."""

    def __init__(
        self, logger: logging.Logger, name: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._name = name
        self._clock = clock
        self._began = 0.0
        self._failures = 0
        self._reasons: set[str] = set()

    def failed(self, reason: str) -> None:
        """Count a failure; log its reason if this outage did not have it before."""
        if not self._failures:
            self._began = self._clock()
        self._failures += 1
        if reason not in self._reasons and len(self._reasons) < REASONS_MAX:
            self._reasons.add(reason)
            self._logger.warning("%s", reason)

    def recovered(self) -> None:
        """Log the end of the outage, if there was one."""
        if not self._failures:
            return
        self._logger.warning(
            "%s is back after %.1f s (%d failed attempts)",
            self._name,
            self._clock() - self._began,
            self._failures,
        )
        self._failures = 0
        self._reasons.clear()
