"""Small values of constants, so that a test reaches a limit with few rows."""

from collections.abc import Callable, Iterator
from typing import Final

import pytest

from storage.maintenance.purge import throttle

SMALL_BATCHES: Final = "from storage.maintenance.purge import throttle; throttle.BATCH_MAX = {}\n"
"""The first line of a program whose purges take at most so many events at once."""

AS_COMMAND: Final = 'import runpy; runpy.run_module("storage", run_name="__main__", alter_sys=True)'
"""A program that does what `python -m storage` does."""


def purge_batches(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let purges take at most so many events at once."""
    patch.setattr(throttle, "BATCH_MAX", size)


def purges_in_batches(size: int) -> Callable[..., Iterator[None]]:
    """Return a fixture that does so for all tests of a module."""

    @pytest.fixture(autouse=True)
    def small_batches() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            purge_batches(patch, size)
            yield

    return small_batches
