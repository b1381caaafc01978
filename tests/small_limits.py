"""Small values of constants and cache sizes, so that a test reaches a limit with few rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import pytest

from storage.cache_sizes import CacheSizes
from storage.maintenance.purge import job

SMALL_BATCHES: Final = "from storage.maintenance.purge import job; job.BATCH_MAX = {}\n"
"""The first line of a program whose purges take at most so many events at once."""

AS_COMMAND: Final = 'import runpy; runpy.run_module("storage", run_name="__main__", alter_sys=True)'
"""A program that does what `python -m storage` does."""


def purge_batches(patch: pytest.MonkeyPatch, size: int) -> None:
    """Let purges take at most so many events at once."""
    patch.setattr(job, "BATCH_MAX", size)


def purges_in_batches(size: int) -> Callable[..., Iterator[None]]:
    """Return a fixture that does so for all tests of a module."""

    @pytest.fixture(autouse=True)
    def small_batches() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            purge_batches(patch, size)
            yield

    return small_batches


def cached_entries(patch: pytest.MonkeyPatch, **entries: int) -> None:
    """Let the stores that are opened from now on have caches of these sizes."""
    usual = CacheSizes.of

    def small(cache_mb: int) -> CacheSizes:
        return replace(usual(cache_mb), **entries)

    patch.setattr(CacheSizes, "of", small)
