"""Sliding sync beside the oracle: random sequences of requests on rooms that change in between.

`STORAGE_EXAMPLES` says how many sequences; the default is for every day. `STORAGE_SEED` says which
is the first.
"""

import os
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import pytest

import storage
from storage import Store
from tests.oracle.sliding_sequence import SlidingSequence, SlidingStep, run_or_shorten, steps_of
from tests.oracle.sliding_subject import MISTAKES, OracleSliding, StoreSliding

EXAMPLES: Final = int(os.environ.get("STORAGE_EXAMPLES", "30"))
FIRST: Final = int(os.environ.get("STORAGE_SEED", "0"))
SERVER: Final = "s2.test"


@pytest.mark.timeout(0)
async def test_random_sequences(dsn: str) -> None:
    """Two stores on one database answer in turn."""
    config = storage.Config(pool_size_max=2)
    async with AsyncExitStack() as stack:
        stores = [
            await stack.enter_async_context(
                storage.open(dsn, server_name=SERVER, instance_name=name, config=config)
            )
            for name in ("main", "other")
        ]
        for number in range(EXAMPLES):
            await _run(stores, FIRST + number)


async def _run(stores: Sequence[Store], seed: int) -> None:
    """Run a sequence. If it fails, fail with the shortest part of it that still does."""

    async def attempt(number: int, steps: Sequence[SlidingStep]) -> None:
        sequence = SlidingSequence(number, seed)
        subject = StoreSliding(
            stores[: 1 + seed % 2], sequence.oracle, random.Random(seed), sequence.personal
        )
        await sequence.run(subject, steps)

    await run_or_shorten(attempt, seed)


@pytest.mark.parametrize("mistaken", MISTAKES)
async def test_the_checks_notice(mistaken: type[OracleSliding]) -> None:
    async def attempt(number: int, steps: Sequence[SlidingStep]) -> None:
        sequence = SlidingSequence(number, number)
        await sequence.run(mistaken(sequence.oracle, sequence.personal), steps)

    with pytest.raises(AssertionError):
        for seed in range(200):
            await attempt(seed, steps_of(seed))


async def test_the_oracle_agrees_with_itself() -> None:
    async def attempt(number: int, steps: Sequence[SlidingStep]) -> None:
        sequence = SlidingSequence(number, number)
        await sequence.run(OracleSliding(sequence.oracle, sequence.personal), steps)

    for seed in range(20):
        await run_or_shorten(attempt, seed)
