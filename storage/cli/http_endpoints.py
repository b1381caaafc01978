"""The HTTP endpoints of `serve`: `/livez`, `/readyz` and `/metrics`, for GET and HEAD.

Each request has a thread; what needs the store runs in the event loop. So `/livez` also shows that
the event loop is not stuck. wsgiref and prometheus_client serve, because three small documents need
no framework.
"""

import asyncio
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, ClassVar, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from storage.cli.readiness import Readiness
from storage.errors import InputError

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
    known = error.errno is not None and error.errno > 0  # those of getaddrinfo are negative
    reason = os.strerror(error.errno or 0).lower() if known else error.strerror or str(error)
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
    given: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
        given.append((status, headers))
        return lambda _: None

    try:
        body = b"".join(application(environ, start))
    except Exception:
        logger.exception("the answer to %s failed", environ["PATH_INFO"])
        failed = document(lambda: (HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "see the log"}))
        body = b"".join(failed(environ, start))
    return *given[-1], body


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
