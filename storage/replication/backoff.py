"""Pauses between attempts, which double with each failure.

They are random, so that the clients of a lost server do not return at the same moment.
"""

import random
from dataclasses import dataclass, field
from typing import Self

from storage.replication.limits import ReplicationLimits


@dataclass(slots=True)
class Backoff:
    """Pauses of at most ``first`` seconds, doubled each time up to ``largest``.

    A pause is at least half of its bound.
    """

    first: float
    largest: float
    _failures: int = field(default=0, init=False)

    @classmethod
    def of(cls, limits: ReplicationLimits) -> Self:
        """Use the pauses of these limits."""
        return cls(limits.retry_ms_first / 1000, limits.retry_ms_max / 1000)

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        bound = min(self.first * float(2 ** min(self._failures, 32)), self.largest)
        self._failures += 1
        return bound * random.uniform(0.5, 1)  # noqa: S311  # not secret

    def reset(self) -> None:
        """Reset after a success: the next pause is a short one."""
        self._failures = 0
