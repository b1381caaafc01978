"""Start the homeserver: clients over HTTP, other servers over TLS, both on loopback.

    python -m examples.homeserver --folder build/homeserver

`--dsn` or STORAGE_DSN names a database; without one, the embedded Postgres runs in the folder.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import ssl
import sys
from pathlib import Path

import trustme
from aiohttp import web
from signedjson.key import generate_signing_key, read_signing_keys, write_signing_keys
from signedjson.types import SigningKey

import storage
from storage.federation import HttpRemote

from .accounts import Accounts
from .client import Client, Doors
from .federation import Federation
from .remote import HttpClient
from .server import Homeserver


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
    return read_signing_keys(path.read_text("ascii").splitlines())[0]


def certificates(folder: Path) -> tuple[Path, Path]:
    """Return the file of the authority to trust, and that of the certificate with its key."""
    authority, own = folder / "certificate.pem", folder / "server.pem"
    if not own.exists():
        made = trustme.CA()
        made.cert_pem.write_to_path(str(authority))
        own.touch(0o600)
        issued = made.issue_cert("localhost", "127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(own))
    return authority, own


async def serve(given: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. Then the embedded Postgres stops, too."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    given.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("STORAGE_DATA_DIR", str(given.folder.resolve() / "postgres"))
    name = given.name or f"localhost:{given.federation_port}"
    key = signing_key(given.folder / "signing.key")
    authority, own = certificates(given.folder)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(own)
    theirs = ssl.create_default_context()
    for path in (authority, *given.trust):
        theirs.load_verify_locations(path)
    async with storage.open(given.dsn, server_name=name, signing_key=key, migrate=True) as store:
        client = HttpClient(theirs)
        remote = HttpRemote(name, key, client.request, omit_members=True)
        home = Homeserver(store, Accounts(given.folder / "accounts.json", name), remote)
        app = web.Application(client_max_size=50_000_000)
        for api in (Client, Federation, Doors):
            app.add_routes(api(home).routes())
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", given.client_port).start()
            await web.TCPSite(runner, "127.0.0.1", given.federation_port, ssl_context=ours).start()
            print(f"{name}: clients at http://127.0.0.1:{given.client_port}", flush=True)
            await asyncio.gather(home.sender.run(), home.receiver.run())
        finally:
            await runner.cleanup()
            await client.session.close()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        try:
            asyncio.run(serve(options()))
        except (OSError, storage.StorageError) as error:  # such as a port that is taken
            sys.exit(f"error: {error}")
