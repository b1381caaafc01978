"""A store for the maintenance tests.

A file that needs other settings has its own fixture ``config``.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import storage
from storage import Config, Store
from tests.maintenance.archived import PATIENT, wait_for_snapshots
from tests.maintenance.rooms import SERVER


@pytest.fixture
def config() -> Config:
    return Config()


@pytest.fixture
async def store(dsn: str, config: Config) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, config=config) as opened:
        yield opened


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The folder of the archive; its name needs quotes in a URL."""
    path = tmp_path / "old events #1"
    path.mkdir()
    return str(path)


@pytest.fixture(autouse=True)
def patient_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_snapshots(monkeypatch, PATIENT)
