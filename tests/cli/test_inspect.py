"""`room-storage inspect`, as a process."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, Request, build_opener

import asyncpg
import pytest

import storage
from storage.testing import RoomBuilder
from tests.cli.running import NOBODY, room_storage, started

ALICE = "@alice:example.com"


@contextmanager
def inspecting(*arguments: str, **environ: str) -> "Iterator[subprocess.Popen[bytes]]":
    with started("inspect", "--port", "0", "--json", *arguments, **environ) as process:
        try:
            yield process
        finally:
            process.kill()


def url_of(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    url = json.loads(line)["url"]
    assert isinstance(url, str)
    assert url.startswith("http://127.0.0.1:")
    return url


async def furnished(dsn: str) -> RoomBuilder:
    room = RoomBuilder("11", seed=1)
    room.start(ALICE)
    async with storage.open(dsn, server_name="example.com") as store:
        await store.append(room.pdus)
    return room


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
async def test_it_serves_a_reader_until_a_signal(dsn: str, how: signal.Signals) -> None:
    room = await furnished(dsn)
    with inspecting(STORAGE_DSN=dsn) as process:
        url = url_of(process)
        browser = build_opener(HTTPCookieProcessor())
        with pytest.raises(HTTPError, match="403"):
            browser.open(url.partition("?")[0])
        with browser.open(url) as answer:
            page = answer.read().decode()
            assert "token=" not in answer.url
        assert room.room_id in page
        assert "read-only" in page
        with pytest.raises(HTTPError, match="405"):
            browser.open(Request(url.partition("?")[0], data=b"a=b"))
        driver = await asyncpg.connect(dsn)  # Postgres refuses its writes, and it is no writer
        try:
            assert await driver.fetchval("SELECT count(*) FROM writers") == 1
            assert await driver.fetchval(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'room-storage inspect'"
            )
        finally:
            await driver.close()
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "a signal has ended inspect" in errors.decode()
    assert "storage.inspector.rendering: token looks at /" in errors.decode()


async def test_with_read_write_it_offers_actions(dsn: str) -> None:
    await furnished(dsn)
    with inspecting("--read-write", STORAGE_DSN=dsn) as process:
        browser = build_opener(HTTPCookieProcessor())
        with browser.open(url_of(process)) as answer:
            assert "/actions" in answer.read().decode()


def test_errors_are_one_sentence(dsn: str) -> None:
    nobody = room_storage("inspect", "--port", "0", STORAGE_DSN=NOBODY)
    assert nobody.returncode == 3
    assert len(nobody.stderr.splitlines()) == 1
    empty = room_storage("inspect", "--port", "0", STORAGE_DSN=dsn)
    assert empty.returncode == 2
    assert "no store was opened in this database yet" in empty.stderr
    taken = room_storage("inspect", "--host", "192.0.2.1", "--port", "0", STORAGE_DSN=dsn)
    assert taken.returncode == 2
    assert "on 192.0.2.1 pages are sent unencrypted" in taken.stderr
    assert "cannot listen on 192.0.2.1" in taken.stderr
