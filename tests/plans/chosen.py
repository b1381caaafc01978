"""Which states of statistics a test goes through.

With its pinned settings, a session plans alike in many states. So by default, writes and
maintenance run in those that differ, and on the oldest Postgres each test runs in one.
`STORAGE_PLAN_STATES=all` chooses all of them; `make soak` sets it.
"""

import os
from collections.abc import Iterable
from typing import Final

import pytest
from _pytest.mark import ParameterSet

DIFFERENT: Final = ("never-analysed", "analysed-small", "alone", "half-purged")
ON_THE_OLDEST: Final = "never-analysed"
ARE_ALL: Final = os.environ.get("STORAGE_PLAN_STATES") == "all"


def states_of(names: Iterable[str]) -> list[ParameterSet]:
    """Return all these states."""
    old = pytest.mark.every_postgres
    return [
        pytest.param(name, marks=old if ARE_ALL or name == ON_THE_OLDEST else ()) for name in names
    ]


def few_states_of(names: Iterable[str]) -> list[ParameterSet]:
    """Return those that differ for the planner."""
    return states_of(name for name in names if ARE_ALL or name in DIFFERENT)
