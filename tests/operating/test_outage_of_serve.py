"""`serve` through an outage of Postgres: a few lines of JSON; `/readyz` is 503, then 200 again."""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import storage
from tests.cli.running import started
from tests.cli.test_http_endpoints import SERVER, get, until
from tests.mortal import Mortal, mortal_postgres

OUTAGE_S = 12.0
LINES_MAX = 10


@pytest.fixture
def mortal() -> Iterator[Mortal]:
    with mortal_postgres() as server:
        yield server


@contextmanager
def serving(dsn: str) -> "Iterator[subprocess.Popen[bytes]]":
    arguments = ["--log-format", "json", "serve", "--port", "0", "--http-port", "0", "--json"]
    with started(*arguments, STORAGE_DSN=dsn, STORAGE_SERVER_NAME=SERVER) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
async def test_an_outage_of_postgres(mortal: Mortal) -> None:
    dsn = await asyncio.to_thread(mortal.start)
    async with storage.open(dsn, server_name=SERVER, migrate=True):
        pass
    with serving(dsn) as process:
        assert process.stdout is not None
        url = json.loads(await asyncio.to_thread(process.stdout.readline))["http"]
        await until(url, 200)
        began = time.monotonic()
        await asyncio.to_thread(mortal.stop)
        await until(url, 503)
        await asyncio.sleep(OUTAGE_S)
        later = (await get(url, "/readyz")).json
        assert isinstance(later, dict)
        assert sorted(later["not_ready"]) == ["database", "streams"]
        assert later["not_ready"]["database"] == "DatabaseUnavailable"
        assert (await get(url, "/livez")).status == 200
        await asyncio.to_thread(mortal.start)
        await until(url, 200)
        lasted = time.monotonic() - began
        process.terminate()
        _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0
    told: list[dict[str, Any]] = [json.loads(line) for line in errors.decode().splitlines()]
    assert 2 <= len(told) < LINES_MAX, told
    assert {"time", "level", "logger", "message"} <= set.intersection(*map(set, told))
    assert next(one["level"] for one in told if one["logger"] != "storage.cli.serve") == "warning"
    back = [one["message"] for one in told if " is back after " in one["message"]]
    assert len(back) == 1, told
    assert back[0].startswith("the database is back after ")
    assert OUTAGE_S / 2 < float(back[0].split()[5]) < lasted + 1
