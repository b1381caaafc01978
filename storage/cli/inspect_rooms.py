"""`room-storage inspect`: serve the inspector on this machine, until interrupted."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Annotated, Final

import typer

from storage.cli.common import (
    DsnOption,
    JsonOption,
    ServerNameOption,
    database_dsn,
    instance_name_option,
    opened_store,
)
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.cli.serve import is_loopback, stopped_by_signal
from storage.config import Config
from storage.errors import ExtraMissing
from storage.store.facade import Store
from storage.store.open import open_store

logger: logging.Logger = logging.getLogger(__name__)

DEFAULT_PORT: Final = 9093
STATEMENT_TIMEOUT_MS: Final = 20_000
"""A page that takes longer is an error, and leaves the database alone."""

POOL_SIZE: Final = 5


def command(
    *,
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535)] = DEFAULT_PORT,
    read_write: Annotated[
        bool,
        typer.Option(
            "--read-write", help="Offer actions: readmit an event, verify a room, and others."
        ),
    ] = False,
    instance_name: Annotated[str, instance_name_option()] = "inspect",
    as_json: JsonOption = False,
) -> None:
    """Show the rooms in a browser: print an address with a token, and serve until interrupted.

    Without --read-write, Postgres refuses every write of its sessions, and a standby will do.
    The content of events is hidden. Each request to show it is logged.
    """
    if not is_loopback(host):
        logger.warning("on %s pages are sent unencrypted: put a proxy with TLS before it", host)
    run(
        _inspect(
            dsn,
            server_name,
            instance_name,
            (host, port),
            read_write=read_write,
            as_json=as_json,
        )
    )


async def _inspect(
    dsn: str | None,
    server_name: str | None,
    instance_name: str,
    listen: tuple[str, int],
    *,
    read_write: bool,
    as_json: bool,
) -> None:
    try:
        # starlette, uvicorn and jinja2 are an extra
        from storage.inspector.access import TokenAccess, Viewer  # noqa: PLC0415
        from storage.inspector.application import (  # noqa: PLC0415
            application,
            bound,
            hosts_of,
            serving,
        )
    except ImportError:
        raise ExtraMissing("the inspector", "inspector") from None
    listening = bound(*listen)
    stopped = stopped_by_signal()
    async with AsyncExitStack() as stack:
        stack.callback(listening.close)
        opening = (
            opened_store(dsn, server_name=server_name, instance_name=instance_name)
            if read_write
            else _reading_store(dsn, server_name, instance_name)
        )
        store = await stack.enter_async_context(opening)
        port = listening.getsockname()[1]
        hosts = hosts_of(listen[0], port) if is_loopback(listen[0]) else frozenset[str]()
        access = TokenAccess(Viewer("token", write=read_write), port=port, hosts=hosts)
        inspector = application(store, access=access, read_write=read_write)
        await stack.enter_async_context(serving(inspector, listening))
        shown = f"[{listen[0]}]" if ":" in listen[0] else listen[0]
        _print_address(f"http://{shown}:{port}/?token={access.token}", as_json=as_json)
        await stopped.wait()
        logger.info("a signal has ended inspect")


@asynccontextmanager
async def _reading_store(
    dsn: str | None, server_name: str | None, instance_name: str
) -> AsyncIterator[Store]:
    """Open a store that can only read, also of the embedded Postgres."""
    config = replace(
        Config.from_env(), statement_timeout_ms=STATEMENT_TIMEOUT_MS, pool_size_max=POOL_SIZE
    )
    async with (
        database_dsn(dsn, config) as target,
        open_store(
            target,
            server_name=server_name,
            instance_name=instance_name,
            config=config,
            read_only=True,
        ) as store,
    ):
        yield store


def _print_address(url: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"url": url})
        return
    typer.echo(f"open {url}")
