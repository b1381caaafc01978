"""TLS, with certificates made for the test by the program openssl."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from storage.errors import InputError
from storage.replication import Client, Server
from storage.replication.server import client_context, server_context
from tests.replication.processes import Process


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority, server and client certificates that it signed, and a self-signed one."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")
    new = (
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    )
    openssl(
        folder, *new, "-subj", "/CN=authority", "-keyout", "authority.key", "-out", "authority.pem"
    )
    openssl(
        folder, *new, "-subj", "/CN=stranger", "-keyout", "stranger.key", "-out", "stranger.pem"
    )
    for name in ("server", "client"):
        signed = (
            "-CA",
            "authority.pem",
            "-CAkey",
            "authority.key",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        )
        openssl(
            folder,
            *new,
            "-subj",
            f"/CN={name}",
            *signed,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
        )
    return folder


def server_tls(folder: Path, *, clients: bool = False) -> ssl.SSLContext:
    return server_context(
        folder / "server.pem",
        folder / "server.key",
        client_authorities=folder / "authority.pem" if clients else None,
    )


async def test_rows_travel_over_tls(main: Process, worker: Process, certificates: Path) -> None:
    client_tls = client_context(
        certificates / "authority.pem",
        certificate=certificates / "client.pem",
        key=certificates / "client.key",
    )
    async with (
        await Server(main).serve(ssl=server_tls(certificates, clients=True)) as server,
        Client(worker, "127.0.0.1", server.port, ssl=client_tls) as client,
    ):
        await client.connected()
        await main.write(3)
        await worker.seen.reached("main", main.position)
        assert worker.seen.ids("main") == await main.written()


async def test_a_client_without_a_certificate_is_not_let_in(
    main: Process, certificates: Path
) -> None:
    for show in (None, ("stranger.pem", "stranger.key")):
        context = client_context(certificates / "authority.pem")
        if show:
            context.load_cert_chain(certificates / show[0], certificates / show[1])
        async with await Server(main).serve(ssl=server_tls(certificates, clients=True)) as server:
            with pytest.raises(OSError, match=r"certificate|unknown ca|reset|closed"):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=context
                )
                writer.write(b"REPLICATE\n")
                try:
                    assert b"SERVER" not in await reader.read()
                    raise OSError("closed")
                finally:
                    writer.transport.abort()
            assert server.connections == []


async def test_a_server_that_nobody_vouches_for_is_not_trusted(
    main: Process, worker: Process, certificates: Path
) -> None:
    context = client_context(certificates / "stranger.pem")
    async with (
        await Server(main).serve(ssl=server_tls(certificates)) as server,
        Client(worker, "127.0.0.1", server.port, ssl=context) as client,
    ):
        async with asyncio.timeout(30):
            while client.last_error is None:
                await client.attempted()
        assert isinstance(client.last_error, ssl.SSLError)


def test_files_that_do_not_fit_are_refused(certificates: Path) -> None:
    with pytest.raises(InputError, match=r"client\.key"):
        server_context(certificates / "server.pem", certificates / "client.key")
    with pytest.raises(InputError, match=r"nowhere\.pem"):
        client_context(certificates / "nowhere.pem")
