"""`room-storage serve`: serve replication to workers, over TCP, over Redis, or both."""

import asyncio
import ipaddress
import logging
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from ssl import SSLContext
from typing import Annotated, Final

import typer
from prometheus_client import REGISTRY

from storage.cli.common import (
    DsnOption,
    JsonOption,
    ServerNameOption,
    instance_name_option,
    opened_store,
)
from storage.cli.http_endpoints import refused_address, served
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.cli.readiness import Readiness
from storage.database.dsn import has_password
from storage.errors import ExtraMissing, InputError
from storage.observability.prometheus import expose
from storage.replication import ReplicationPeer, Server
from storage.replication.tls import server_context
from storage.store.facade import Store
from storage.version import __version__

logger: logging.Logger = logging.getLogger(__name__)

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
        places: dict[str, object] = {}
        peer: ReplicationPeer | None = None
        if redis is not None:
            peer = await stack.enter_async_context(_over_redis(store, redis))
            places["redis"] = _without_password(redis)
        if listen is not None:
            server = await stack.enter_async_context(await _listening(store, *listen))
            places |= {"host": server.address[0], "port": server.port, "tls": listen[2] is not None}
        if http is not None:
            url = await stack.enter_async_context(_over_http(store, peer, *http))
            places |= {"http": url, "metrics": f"{url}/metrics"}
        _print_places(places, as_json=as_json)
        subject = f"room-storage {__version__} serves the database of {store.server_name}"
        logger.info("%s", subject, extra=places)
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


def _print_places(places: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print_json(places)
        return
    if "port" in places:
        typer.echo(
            f"listening on {places['host']}:{places['port']}{' (TLS)' if places['tls'] else ''}"
        )
    if "redis" in places:
        typer.echo(f"publishing on {places['redis']}")
    if "http" in places:
        typer.echo(f"health and metrics at {places['http']}: /livez, /readyz, /metrics")


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
