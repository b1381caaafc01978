"""Pauses between attempts: random, so that those who lost the same server do not come back in the same moment, and longer each time."""

import random
from dataclasses import dataclass, field
from typing import Self

from storage.config import Config


@dataclass(slots=True)
class Backoff:
    """Pauses of at most ``first`` seconds, then twice as much, up to ``largest``; at least half of that bound."""

    first: float
    largest: float
    _failures: int = field(default=0, init=False)

    @classmethod
    def of(cls, config: Config) -> Self:
        """As the configuration has it."""
        return cls(config.replication_retry_ms_first / 1000, config.replication_retry_ms_max / 1000)

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        bound = min(self.first * float(2 ** min(self._failures, 32)), self.largest)
        self._failures += 1
        return bound * random.uniform(0.5, 1)  # noqa: S311  # no secret

    def reset(self) -> None:
        """It worked: the next pause is a short one."""
        self._failures = 0
