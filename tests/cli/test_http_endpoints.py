"""`/livez`, `/readyz` and `/metrics`: which parts are ready, and what each request gets."""

import asyncio
import http.client
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import storage
from storage import Config, Store
from storage.cli import serve
from storage.cli.serve import Readiness, served
from storage.database import Database
from storage.observability.prometheus import expose
from storage.replication import ReplicationPeer
from storage.replication.redis_transport import RedisTransport
from tests.operating.exposition import samples
from tests.pausing import pause
from tests.replication.proxies import Proxy, through, unix_socket_of
from tests.replication.redis_server import RedisServer

SERVER = "s1.test"
CONFIG = Config(follow_ms=20, connect_timeout_ms=1_000)


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> object:
        return json.loads(self.body)


def fetch(url: str, path: str, method: str = "GET") -> Response:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return Response(answer.status, dict(answer.headers), answer.read())
    finally:
        connection.close()


async def get(url: str, path: str, method: str = "GET") -> Response:
    return await asyncio.to_thread(fetch, url, path, method)


async def until(url: str, status: int) -> Response:
    """The first answer of `/readyz` with that status."""
    async with asyncio.timeout(30):
        while (answer := await get(url, "/readyz")).status != status:
            await pause()
    return answer


@asynccontextmanager
async def exposed(store: Store, ready: Readiness | None = None) -> AsyncIterator[str]:
    registry = CollectorRegistry()
    expose(store, registry)
    async with served("127.0.0.1", 0, ready or Readiness(store), registry) as url:
        yield url


@pytest.fixture(autouse=True)
def a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the parts more time than a load balancer would: other tests run meanwhile."""
    monkeypatch.setattr(serve, "PROBE_SECONDS", 20)
    monkeypatch.setattr(serve, "STREAM_SECONDS", 30)
    monkeypatch.setattr(serve, "LOOP_SECONDS", 25)


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER, config=CONFIG) as opened:
        yield opened


async def test_each_path_has_its_answer(store: Store) -> None:
    async with exposed(store) as url:
        livez, readyz, metrics = [
            await get(url, f"/{path}") for path in ("livez", "readyz", "metrics")
        ]
        assert (livez.status, livez.json) == (200, {"alive": True})
        assert (readyz.status, readyz.json) == (
            200,
            {"ready": True, "parts": ["database", "streams"]},
        )
        assert readyz.headers["Content-Type"] == "application/json"
        assert metrics.status == 200
        assert metrics.headers["Content-Type"].startswith("text/plain")
        assert samples(metrics.body.decode())["room_storage_pool_connections"] >= 1
        for path in ("/", "/healthz", "/readyz/", "/metrics/x", "/favicon.ico"):
            unknown = await get(url, path)
            assert (unknown.status, unknown.json) == (
                404,
                {"paths": ["/livez", "/readyz", "/metrics"]},
            )


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
async def test_only_get_and_head(store: Store, path: str) -> None:
    async with exposed(store) as url:
        head = await get(url, path, "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["Content-Length"]) > 10
        assert "Allow" not in head.headers
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            refused = await get(url, path, method)
            assert (refused.status, refused.headers["Allow"]) == (405, "GET, HEAD")


async def test_a_database_that_goes_away_and_comes_back(dsn: str) -> None:
    async with (
        Proxy(unix_socket_of(dsn)) as postgres,
        storage.open(through(dsn, postgres.port), server_name=SERVER, config=CONFIG) as store,
        exposed(store) as url,
    ):
        assert (await get(url, "/readyz")).status == 200
        postgres.open = False
        postgres.cut()
        away = await until(url, 503)
        assert away.json == {"ready": False, "not_ready": {"database": "DatabaseUnavailable"}}
        assert (await get(url, "/livez")).status == 200
        assert (await get(url, "/metrics")).status == 200
        postgres.open = True
        assert (await until(url, 200)).json == {"ready": True, "parts": ["database", "streams"]}


async def test_a_database_that_is_silent(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PROBE_SECONDS", 0.3)
    async with (
        Proxy(unix_socket_of(dsn)) as postgres,
        storage.open(through(dsn, postgres.port), server_name=SERVER, config=CONFIG) as store,
    ):
        ready = Readiness(store)
        async with exposed(store, ready) as url:
            postgres.flows.clear()
            silent = await until(url, 503)
            assert silent.json == {
                "ready": False,
                "not_ready": {"database": "no answer within 0.3 s"},
            }
            assert [probe for probe in ready._probes if not probe.cancelling()] == []
            postgres.flows.set()
            await until(url, 200)


async def test_streams_that_cannot_be_followed(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database answers on open sessions, but a lock on the table of positions stops polls."""
    monkeypatch.setattr(serve, "STREAM_SECONDS", 0.2)
    # one for the poll, one for the sizes of the tables, one for the probe
    config = replace(CONFIG, pool_size_min=3, prepare_ahead=False)
    async with (
        storage.open(dsn, server_name=SERVER, config=config) as store,
        exposed(store) as url,
    ):
        async with await Database.open(dsn) as other, other.transaction() as conn:
            await conn.execute("LOCK TABLE stream_positions IN ACCESS EXCLUSIVE MODE")
            stuck = (await until(url, 503)).json
        assert isinstance(stuck, dict)
        assert list(stuck["not_ready"]) == ["streams"]
        assert re.fullmatch(r"positions last read \d\.\d s ago", stuck["not_ready"]["streams"])
        await until(url, 200)


async def test_the_allowed_age_counts_from_the_due_poll(dsn: str) -> None:
    config = Config(follow_ms=60_000)
    async with storage.open(dsn, server_name=SERVER, config=config) as store:
        polled = store.measures.streams_polled_at
        assert await Readiness(store, clock=lambda: polled + 89.9).not_ready() == {}
        assert list(await Readiness(store, clock=lambda: polled + 90.1).not_ready()) == ["streams"]
        assert store.measures.streams_polled_at == polled


async def test_redis_that_goes_away_and_comes_back(store: Store) -> None:
    async with RedisServer() as redis:
        transport = RedisTransport(redis.url, SERVER)
        async with (
            ReplicationPeer(store, transport) as peer,
            exposed(store, Readiness(store, peer)) as url,
        ):
            ready = await until(url, 200)
            assert ready.json == {"ready": True, "parts": ["database", "streams", "redis"]}
            await redis.stop()
            away = await until(url, 503)
            assert away.json == {"ready": False, "not_ready": {"redis": "no connection"}}
            await redis.start()
            await until(url, 200)


async def test_an_event_loop_that_is_stuck(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LOOP_SECONDS", 0.2)
    found: list[Response] = []
    async with exposed(store) as url:
        thread = threading.Thread(
            target=lambda: found.extend(
                fetch(url, path) for path in ("/livez", "/readyz", "/metrics")
            )
        )
        thread.start()
        thread.join()  # this event loop does nothing else meanwhile
        monkeypatch.setattr(serve, "LOOP_SECONDS", 25)
        assert [answer.status for answer in found] == [503, 503, 200]
        assert [answer.json for answer in found[:2]] == [
            {"alive": False},
            {"ready": False, "not_ready": {"process": "the event loop is stuck"}},
        ]
        assert (await get(url, "/livez")).status == 200


class Broken(Collector):
    """Metrics that fail at every scrape."""

    def collect(self) -> Iterator[Metric]:
        raise RuntimeError("no metrics")

    def describe(self) -> Iterator[Metric]:
        return iter(())


async def test_a_failure_is_logged_and_is_a_500(
    store: Store, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    registry = CollectorRegistry()
    registry.register(Broken())
    async with served("127.0.0.1", 0, Readiness(store), registry) as url:
        with caplog.at_level(logging.ERROR):
            answer = await get(url, "/metrics")
        assert (answer.status, answer.json) == (500, {"error": "see the log"})
        assert [record.getMessage() for record in caplog.records] == [
            "the answer to /metrics failed"
        ]
        assert (await get(url, "/readyz")).status == 200
    assert capfd.readouterr() == ("", ""), "a traceback went past the log"


async def test_other_addresses(store: Store) -> None:
    async with served("::1", 0, Readiness(store), CollectorRegistry()) as url:
        assert url.startswith("http://[::1]:")
        assert (await get(url, "/livez")).status == 200
        port = int(url.rpartition(":")[2])
        with pytest.raises(storage.InputError, match=rf"cannot listen on ::1:{port}: "):
            async with served("::1", port, Readiness(store), CollectorRegistry()):
                pass
