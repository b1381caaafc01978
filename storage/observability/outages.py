"""Outages in the log: the first failure, each further reason once, and the recovery.

    outage = Outage(logger, "the database")
    outage.failed("no connection")  # WARNING, the first time
    outage.recovered()  # WARNING: "the database is back after 12.3 s (48 failed attempts)"

A loop that tries again four times a second reports both outcomes of every attempt here. So an
outage of any length takes a few lines of the log.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

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
