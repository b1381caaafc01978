"""`room-storage serve`: serve replication to workers, over TCP, over Redis, or both."""

import asyncio
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from ssl import SSLContext
from typing import Annotated, Any, ClassVar, Final, LiteralString
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import typer
from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from storage.cli.common import (
    DsnOption,
    JsonOption,
    ServerNameOption,
    instance_name_option,
    opened_store,
)
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.database.dsn import has_password
from storage.errors import ExtraMissing, InputError, StorageError
from storage.observability.prometheus import expose
from storage.replication import ReplicationPeer, Server
from storage.replication.server import server_context
from storage.store.facade import Store
from storage.version import __version__

# --------------------------------------------------------------------------------------------------
# Whether `serve` is ready: it reaches the database, follows the streams and has its transport.
#
# A load balancer, systemd or Kubernetes asks for it at `/readyz`. A part that is not ready has a
# short reason without addresses, because the port of `/readyz` may be open to others. The log has
# the whole error.

PROBE_SECONDS: Final = 2.0
"""Longest wait for the database; probes of load balancers usually wait longer."""

STREAM_SECONDS: Final = 5.0
"""A stream counts as unavailable this long after the poll that should have read its position."""

SQL_PROBE: Final[LiteralString] = "SELECT 1"


class Readiness:
    """The checks of one process.

    ``redis`` is its part in replication over Redis, if there is one. `parts` lists the checked
    parts.
    """

    def __init__(
        self,
        store: Store,
        redis: ReplicationPeer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._redis = redis
        self._clock = clock
        self._probes: set[asyncio.Task[None]] = set()
        self.parts: list[str] = ["database", "streams", *(["redis"] if redis is not None else [])]

    async def not_ready(self) -> dict[str, str]:
        """Return the parts that are not ready, each with the reason."""
        reasons = {
            "database": await self._database(),
            "streams": self._streams(),
            "redis": self._over_redis(),
        }
        return {part: reason for part, reason in reasons.items() if reason is not None}

    async def _database(self) -> str | None:
        """Send a statement over the pool that all calls use."""
        probe = asyncio.create_task(self._probe(), name="readiness-probe")
        self._probes.add(probe)
        probe.add_done_callback(self._probes.discard)
        await asyncio.wait([probe], timeout=PROBE_SECONDS)
        if not probe.done():
            probe.cancel()  # not awaited: its connection waits for the end of the statement
            return f"no answer within {PROBE_SECONDS:g} s"
        error = probe.exception()
        if error is not None and not isinstance(error, StorageError):
            raise error
        return None if error is None else type(error).__name__

    async def _probe(self) -> None:
        async with self._store.database.connection() as conn:
            await conn.execute(SQL_PROBE)

    async def close(self) -> None:
        """Wait for the end of abandoned probes."""
        if self._probes:
            await asyncio.wait(self._probes)

    def _streams(self) -> str | None:
        """Compare the age of the last poll of all positions with the interval of the polls."""
        age = self._clock() - self._store.measures.streams_polled_at
        allowed = self._store.database.config.follow_ms / 1000 + STREAM_SECONDS
        return None if age <= allowed else f"positions last read {age:.1f} s ago"

    def _over_redis(self) -> str | None:
        if self._redis is None or self._redis.transport.links:
            return None
        return "no connection"


# --------------------------------------------------------------------------------------------------
# The HTTP endpoints of `serve`: `/livez`, `/readyz` and `/metrics`, for GET and HEAD.
#
# Each request has a thread; what needs the store runs in the event loop. So `/livez` also shows
# that the event loop is not stuck. wsgiref and prometheus_client serve, because three small
# documents need no framework.

logger: logging.Logger = logging.getLogger(__name__)

LOOP_SECONDS: Final = 5.0
"""Longest wait for the event loop; after it the process counts as stuck."""

CLIENT_SECONDS: Final = 10.0
"""Longest wait for the request of a client."""

METHODS: Final = ("GET", "HEAD")

NOT_READY: Final = {"ready": False, "not_ready": {"process": "the event loop is stuck"}}
"""The answer of `/readyz` where the event loop cannot give one."""

Document = tuple[HTTPStatus, object]


class HttpServer(ThreadingWSGIServer):
    """A thread for each request, and failures in the log."""

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        """Log a request that failed, for instance because the client was silent."""
        logger.info("an HTTP request failed: %r", sys.exc_info()[1])


class HttpHandler(WSGIRequestHandler):
    """Reads a request, with a limit of time, and logs none."""

    timeout: ClassVar[float | None] = CLIENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name of the base
        """Log nothing: probes and scrapes come all the time."""


@asynccontextmanager
async def served(
    host: str, port: int, readiness: Readiness, registry: CollectorRegistry
) -> AsyncIterator[str]:
    """Serve the endpoints during the block; yield their common URL."""
    loop = asyncio.get_running_loop()
    routes: dict[str, WSGIApplication] = {
        "/livez": document(lambda: in_loop(loop, alive, {"alive": False})),
        "/readyz": document(lambda: in_loop(loop, lambda: ready(readiness), NOT_READY)),
        "/metrics": make_wsgi_app(registry),
    }
    server = listening(host, port, router(routes))
    thread = threading.Thread(target=server.serve_forever, name="http", daemon=True)
    thread.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
        await readiness.close()


def listening(host: str, port: int, application: WSGIApplication) -> HttpServer:
    """Bind the address. Raise `InputError` if that is impossible."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server_class: type[HttpServer] = type(
            "HttpServer", (HttpServer,), {"address_family": family}
        )
        return make_server(str(address[0]), port, application, server_class, HttpHandler)
    except OSError as error:
        raise InputError(refused_address(host, port, error)) from None


def refused_address(host: str, port: int, error: OSError) -> str:
    """Return the sentence for an address that cannot be bound."""
    has_number = error.errno is not None and error.errno > 0  # those of getaddrinfo are negative
    reason = os.strerror(error.errno or 0).lower() if has_number else error.strerror or str(error)
    return f"cannot listen on {host}:{port}: {reason}"


def router(routes: Mapping[str, WSGIApplication]) -> WSGIApplication:
    """Return an application that gives each path to its own, and refuses other paths."""

    def route(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        application = routes.get(environ["PATH_INFO"])
        if application is None:
            application = document(lambda: (HTTPStatus.NOT_FOUND, {"paths": list(routes)}))
        elif method not in METHODS:
            application = refused
        status, headers, body = answer(application, {**environ, "REQUEST_METHOD": "GET"})
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [b"" if method == "HEAD" else body]

    return route


def refused(_: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """Refuse another method."""
    status = HTTPStatus.METHOD_NOT_ALLOWED
    headers = [("Content-Type", "application/json"), ("Allow", ", ".join(METHODS))]
    start_response(f"{status.value} {status.phrase}", headers)
    return [json.dumps({"methods": METHODS}).encode() + b"\n"]


def answer(
    application: WSGIApplication, environ: WSGIEnvironment
) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return status, headers and body. An exception is logged, and is a 500."""
    responses: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
        responses.append((status, headers))
        return lambda _: None

    try:
        body = b"".join(application(environ, start))
    except Exception:
        logger.exception("the answer to %s failed", environ["PATH_INFO"])
        failed = document(lambda: (HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the log"}))
        body = b"".join(failed(environ, start))
    return *responses[-1], body


def document(make: Callable[[], Document]) -> WSGIApplication:
    """Return an application that answers with a status and a JSON document."""

    def application(_: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, value = make()
        headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
        start_response(f"{status.value} {status.phrase}", headers)
        return [json.dumps(value).encode() + b"\n"]

    return application


async def alive() -> Document:
    """Return the answer of a process whose event loop runs."""
    return HTTPStatus.OK, {"alive": True}


async def ready(readiness: Readiness) -> Document:
    """Return the answer of `/readyz`, which names the parts that are not ready."""
    not_ready = await readiness.not_ready()
    if not_ready:
        return HTTPStatus.SERVICE_UNAVAILABLE, {"ready": False, "not_ready": not_ready}
    return HTTPStatus.OK, {"ready": True, "parts": readiness.parts}


def in_loop(
    loop: asyncio.AbstractEventLoop,
    work: Callable[[], Coroutine[Any, Any, Document]],
    stuck: object,
) -> Document:
    """Run a coroutine in the event loop, from another thread.

    If the loop does not run it in time, the answer is 503 and ``stuck``.
    """
    future = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        return future.result(LOOP_SECONDS)
    except TimeoutError:
        future.cancel()
        return HTTPStatus.SERVICE_UNAVAILABLE, stuck


DEFAULT_PORT = 9092

REDIS_IN_PROCESS_LIST: Final = (
    "the process list shows the password of --redis to other users of this machine: "
    "use STORAGE_REDIS"
)


def _checked_redis(context: typer.Context, url: str | None) -> str | None:
    """Warn of a password on the command line."""
    source = context.get_parameter_source("redis")
    if source is not None and source.name == "COMMANDLINE" and has_password(url or ""):
        logger.warning(REDIS_IN_PROCESS_LIST)
    return url


PathOption = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM.", show_default=False)]


def command(
    *,
    server_name: ServerNameOption = None,
    dsn: DsnOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = DEFAULT_PORT,
    tcp: Annotated[bool, typer.Option("--tcp/--no-tcp", help="Listen for connections.")] = True,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="STORAGE_REDIS",  # the process list does not show the environment
            help="Replicate over Redis, too: redis://…",
            callback=_checked_redis,
            show_default=False,
        ),
    ] = None,
    tls_certificate: PathOption = None,
    tls_key: PathOption = None,
    tls_client_authorities: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM: accept only client certificates signed by one of these.",
            show_default=False,
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port",
            "--metrics-port",
            help=(
                "Serve /livez, /readyz and /metrics on this port of the same address."
                " 0: any free one."
            ),
            min=0,
            max=65535,
            show_default=False,
        ),
    ] = None,
    instance_name: Annotated[str, instance_name_option()] = "serve",
    as_json: JsonOption = False,
) -> None:
    """Publish commits to workers, and serve health and metrics, until interrupted."""
    if not tcp and redis is None:
        raise InputError("nothing to do: --no-tcp without --redis")
    context = _tls(tls_certificate, tls_key, tls_client_authorities)
    if context is None and not is_loopback(host):
        logger.warning(
            "on %s rows are sent unencrypted, and anybody may connect: see --tls-certificate", host
        )
    http = None if http_port is None else (host, http_port)
    run(
        _serve(
            dsn,
            server_name,
            instance_name,
            (host, port, context) if tcp else None,
            redis,
            http=http,
            as_json=as_json,
        )
    )


async def _serve(
    dsn: str | None,
    server_name: str | None,
    instance_name: str,
    listen: tuple[str, int, SSLContext | None] | None,
    redis: str | None,
    *,
    http: tuple[str, int] | None,
    as_json: bool,
) -> None:
    stopped = stopped_by_signal()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            opened_store(dsn, server_name=server_name, instance_name=instance_name)
        )
        addresses: dict[str, object] = {}
        peer: ReplicationPeer | None = None
        if redis is not None:
            peer = await stack.enter_async_context(_over_redis(store, redis))
            addresses["redis"] = _without_password(redis)
        if listen is not None:
            server = await stack.enter_async_context(await _listening(store, *listen))
            addresses |= {
                "host": server.address[0],
                "port": server.port,
                "tls": listen[2] is not None,
            }
        if http is not None:
            url = await stack.enter_async_context(_over_http(store, peer, *http))
            addresses |= {"http": url, "metrics": f"{url}/metrics"}
        _print_addresses(addresses, as_json=as_json)
        subject = f"room-storage {__version__} serves the database of {store.server_name}"
        logger.info("%s", subject, extra=addresses)
        await stopped.wait()
        logger.info("a signal has ended serve")


async def _listening(store: Store, host: str, port: int, context: SSLContext | None) -> Server:
    try:
        return await Server(store).serve(host, port, context)
    except OSError as error:
        raise InputError(refused_address(host, port, error)) from None


@asynccontextmanager
async def _over_http(
    store: Store, redis: ReplicationPeer | None, host: str, port: int
) -> AsyncIterator[str]:
    """Serve health and metrics of the store and of this process; yield the URL."""
    collector = expose(store, REGISTRY)
    try:
        async with served(host, port, Readiness(store, redis), REGISTRY) as url:
            yield url
    finally:
        REGISTRY.unregister(collector)


def _over_redis(store: Store, url: str) -> ReplicationPeer:
    try:
        # redis-py is an extra
        from storage.replication.redis_transport import RedisTransport  # noqa: PLC0415
    except ImportError:
        raise ExtraMissing("--redis", "redis") from None
    transport = RedisTransport(url, store.server_name)
    return ReplicationPeer(store, transport, announces="all")


def stopped_by_signal() -> asyncio.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def _print_addresses(addresses: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print_json(addresses)
        return
    if "port" in addresses:
        typer.echo(
            f"listening on {addresses['host']}:{addresses['port']}"
            f"{' (TLS)' if addresses['tls'] else ''}"
        )
    if "redis" in addresses:
        typer.echo(f"publishing on {addresses['redis']}")
    if "http" in addresses:
        typer.echo(f"health and metrics at {addresses['http']}: /livez, /readyz, /metrics")


def _tls(certificate: Path | None, key: Path | None, authorities: Path | None) -> SSLContext | None:
    if certificate is None and key is None and authorities is None:
        return None
    if certificate is None or key is None:
        raise InputError("TLS needs both --tls-certificate and --tls-key")
    return server_context(certificate, key, client_authorities=authorities)


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//", url)
