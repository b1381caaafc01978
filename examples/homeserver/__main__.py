"""Start the homeserver: clients over HTTP, other servers over TLS, both on loopback.

    python -m examples.homeserver --folder build/homeserver

`--dsn` or STORAGE_DSN names a database; without one, the embedded Postgres runs in the folder.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import ipaddress
import os
import ssl
from pathlib import Path

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from signedjson.key import generate_signing_key, read_signing_keys, write_signing_keys
from signedjson.types import SigningKey

import storage

from .accounts import Accounts
from .client import Client, Doors
from .federation import Federation
from .remote import Remote
from .server import Homeserver

BODY_BYTES_MAX = 50_000_000


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="homeserver", description="a small Matrix homeserver")
    parser.add_argument("--folder", type=Path, default=Path("build/homeserver"))
    parser.add_argument("--dsn", default=os.environ.get("STORAGE_DSN"))
    parser.add_argument("--client-port", type=int, default=8008)
    parser.add_argument("--federation-port", type=int, default=8448)
    parser.add_argument("--name", help="the server name; by default localhost and the port")
    parser.add_argument("--trust", type=Path, action="append", default=[], metavar="CERTIFICATE")
    return parser.parse_args()


def signing_key(path: Path) -> SigningKey:
    """Return the key in a file; make one at the first start."""
    if not path.exists():
        with path.open("w", encoding="ascii") as file:
            path.chmod(0o600)
            write_signing_keys(file, [generate_signing_key("a1")])
    [key] = read_signing_keys(path.read_text("ascii").splitlines())
    return key


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate and its private key; make them if they are missing."""
    certificate, private = folder / "certificate.pem", folder / "private.pem"
    if certificate.exists():
        return certificate, private
    key, serial = ec.generate_private_key(ec.SECP256R1()), x509.random_serial_number()
    # two trusted certificates must not have one name
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"localhost {serial:x}")])
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), serial)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.touch(0o600)
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    certificate.write_bytes(made.public_bytes(pem))
    return certificate, private


async def serve(given: argparse.Namespace) -> None:
    """Serve until it is cancelled."""
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("STORAGE_DATA_DIR", str(given.folder.resolve() / "postgres"))
    name = given.name or f"localhost:{given.federation_port}"
    key = signing_key(given.folder / "signing.key")
    certificate, private = self_signed(given.folder)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate, private)
    theirs = ssl.create_default_context()
    for path in (certificate, *given.trust):
        theirs.load_verify_locations(path)
    async with storage.open(given.dsn, server_name=name, signing_key=key, migrate=True) as store:
        remote = Remote(name, key, theirs)
        home = Homeserver(store, Accounts(given.folder / "accounts.json", name), remote)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        for api in (Client, Federation, Doors):
            app.add_routes(api(home).routes())
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", given.client_port).start()
        await web.TCPSite(runner, "127.0.0.1", given.federation_port, ssl_context=ours).start()
        print(f"{name}: clients at http://127.0.0.1:{given.client_port}", flush=True)
        try:
            await home.outgoing.run()
        finally:
            await runner.cleanup()
            await remote.session.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options()))
