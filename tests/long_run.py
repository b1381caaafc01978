"""Tests that take long, and run in `make soak` only.

Most have a line in tests/long_tests.txt.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

RAISED: Final = (
    "STORAGE_EXAMPLES",
    "STORAGE_FUZZ",
    "STORAGE_DAMAGES",
    "STORAGE_PLAN_EVENTS",
)
"""Variables that raise a number: who sets one wants the long tests."""

long_run: Final = pytest.mark.skipif(
    not any(name in os.environ for name in RAISED),
    reason="a long test: `make soak`, or STORAGE_EXAMPLES",
)


def listed() -> dict[str, int]:
    """Return the lines of long_tests.txt: of each test, how many parameters run every day."""
    lines = Path(__file__).with_name("long_tests.txt").read_text("utf-8").splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name or rest: int(rest) if name else 0 for name, _, rest in pairs}


def long_ones(node_ids: Iterable[str]) -> Iterator[str]:
    """Yield those of these tests that do not run every day, if all of a test are among them."""
    every_day, groups = listed(), defaultdict[str, list[str]](list)
    for node_id in node_ids:
        name = node_id.rpartition("@")[0] or node_id  # without the group of xdist
        for key in (name, name.partition("[")[0]):
            if key in every_day:
                groups[key].append(node_id)
                break
    for key, group in groups.items():
        count = every_day[key]
        kept = {number * len(group) // count for number in range(count)}
        yield from (node_id for place, node_id in enumerate(group) if place not in kept)
