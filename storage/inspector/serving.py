"""Serve one application on a port of this machine, until told to stop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import uvicorn

from storage.errors import InputError
from storage.inspector.application import Inspector

LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
CLOSE_SECONDS: Final = 2


class QuietServer(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """Listen on an address. `InputError` if that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return made


def hosts_of(host: str, port: int) -> frozenset[str]:
    """Return the values of the header Host that lead to a loopback address."""
    return frozenset(f"{name}:{port}" for name in {*LOOPBACK, host})


@asynccontextmanager
async def serving(inspector: Inspector, listening: socket.socket) -> AsyncIterator[None]:
    """Serve an application during the block."""
    config = uvicorn.Config(
        inspector,
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=30,
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="inspector")
    try:
        yield
    finally:
        await inspector.close()
        server.should_exit = True
        await task
