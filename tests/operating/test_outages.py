"""`Outage`: the log of a long outage is short, and has its end."""

import logging

import pytest

from storage.observability.counters import REASONS_MAX, Outage

LOGGER = logging.getLogger("test_outages")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_reason_once_and_the_recovery_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    outage = Outage(LOGGER, "the database", clock)
    outage.recovered()
    for _ in range(2):
        for reason in ["refused"] * 20 + ["starting up", "refused", "starting up"]:
            outage.failed(reason)
            clock.now += 0.5
        outage.recovered()
        outage.recovered()
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "refused"),
        ("WARNING", "starting up"),
        ("WARNING", "the database is back after 11.5 s (23 failed attempts)"),
    ] * 2


def test_reasons_that_all_differ_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(LOGGER, "the database")
    for number in range(1_000):
        outage.failed(f"refused after {number} rows")
    outage.recovered()
    assert len(caplog.records) == REASONS_MAX + 1
