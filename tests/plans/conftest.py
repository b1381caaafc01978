"""Databases in which statistics mislead the planner, made once for a worker."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from benchmarks.statistics_states import StatesServer
from tests.plans.recording import PlanRecorder


@pytest.fixture(scope="session")
def states(server_dsn: str, template_name: str, worker_id: str) -> Iterator[StatesServer]:
    server = StatesServer(server_dsn, template_name, f"states_{worker_id}_{time.monotonic_ns()}")
    yield server
    asyncio.run(server.close())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> PlanRecorder:
    found = PlanRecorder()
    found.install(monkeypatch)
    return found
