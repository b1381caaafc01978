"""What a process counts and times of itself: plain numbers, added up where the work is done, read when somebody asks.

`storage.observability.prometheus` gives them to Prometheus. They are always kept, as keeping them costs less than asking whether to: a distribution takes a
fifth of a microsecond for a value. One event loop adds to them; other threads may read them at any time, and may find that a value is in the
counts and not in the sum yet.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final

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
SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)


class Distribution:
    """How many values there were up to each of ``bounds`` (and above the one before), how many beyond the last, and their ``total``."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def __len__(self) -> int:
        return sum(self.counts)

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Measures:
    """The numbers of one `Database` and of what works on it."""

    def __init__(self) -> None:
        self.calls: dict[str, Distribution] = {}
        """Seconds that calls of the store took, by name; of sync without the waiting."""
        self.call_errors: Counter[tuple[str, str]] = Counter()
        """What they raised: (call, class of the error)."""
        self.append_events = Distribution(SIZES)
        """Events given to an append."""
        self.outcomes: Counter[str] = Counter()
        """What became of them."""
        self.writes = Distribution()
        """Seconds that a write of the writer took: one statement, committed by itself unless rooms had to be locked."""
        self.write_events = Distribution(SIZES)
        """Events in a write."""
        self.writer_statements = 0
        """Statements of the writer: what it loads, and what it writes."""
        self.statements = 0
        """Statements of everybody."""
        self.pool_waits = Distribution()
        """Seconds until the pool gave out a connection, where none was at hand; opening one counts.
        """
        self.database_errors: Counter[str] = Counter()
        """What came of Postgres in place of an answer, by class, also where it was done again then.
        """

    def call(self, name: str) -> Distribution:
        """The seconds of a call."""
        if name not in self.calls:
            self.calls[name] = Distribution()
        return self.calls[name]
