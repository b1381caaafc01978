"""How far a long job is. The job reports it; the command line shows it.

    counted = Counted(report, "verify", total=3_500, unit="rooms")
    counted.within(0.5)  # half of the first room
    counted.add(1)

A job has one or more phases, one after the other. Totals are cheap to find: a count by an index, or
an estimate of Postgres.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


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
