"""The pace of long work: how long it pauses, and when it ends."""

from itertools import count

import pytest

from storage.database.pace import Pace, in_batches
from storage.errors import StorageCorrupt


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause; none is waited for."""
    seconds: list[float] = []

    async def sleep(delay: float) -> None:
        seconds.append(delay)

    monkeypatch.setattr("storage.database.pace.asyncio.sleep", sleep)
    return seconds


async def test_a_pause_is_as_long_as_the_batch_or_fixed(pauses: list[float]) -> None:
    ticks = count()
    for pace in (Pace(clock=lambda: next(ticks) * 3.0), Pace(0.5)):
        with pace.batch():
            pass
        await pace.rest()
        await pace.rest(least_s=7)
    assert pauses == [3, 7, 0.5, 7]


async def test_what_a_batch_waited_for_does_not_count() -> None:
    ticks = iter((0, 10, 11))
    pace = Pace(clock=lambda: next(ticks))
    with pace.batch():
        pace.restart()
    assert pace.took_s == 1


async def test_batches_end_with_none_and_only_those_that_did_something_pause(
    pauses: list[float],
) -> None:
    counts = iter((2, 0, 3, None, 9))

    async def step() -> int | None:
        return next(counts)

    assert await in_batches(step, Pace(0.1)) == 5
    assert pauses == [0.1, 0.1]
    assert next(counts) == 9


async def test_a_batch_that_fails_ends_the_work(pauses: list[float]) -> None:
    async def step() -> int | None:
        raise StorageCorrupt("a table")

    with pytest.raises(StorageCorrupt):
        await in_batches(step, Pace(0.1))
    assert pauses == []
