"""Processes of the example and of Synapse, each behind a gate that may drop its transactions."""

import asyncio
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
from aiohttp import web
from signedjson.key import generate_signing_key, write_signing_keys
from yarl import URL

from benchmarks.ports import free_port
from examples.homeserver.__main__ import certificates
from tests.cli.running import ROOT, environment

SECRET: Final = "of a test"
START_S: Final = 60
CLIENT: Final = "/_matrix/client/v3"
SENDS: Final = "/_matrix/federation/v1/send/"
V2: Final = "/_matrix/federation/v2/"
HOP_BY_HOP: Final = frozenset(
    {"Connection", "Content-Length", "Transfer-Encoding", "Date", "Server"}
)


class ErrorResponse(Exception):  # noqa: N818
    """A server returned an error."""


@dataclass
class User:
    """A user that is logged in at a server."""

    session: aiohttp.ClientSession
    url: str
    user_id: str
    token: str
    sent: int = 0

    async def call(
        self, method: str, path: str, body: Any = None, *, api: str = CLIENT, **query: Any
    ) -> Any:
        return await call(self.session, method, self.url + api + path, body, self.token, query)

    async def create_room(self, **given: Any) -> str:
        return str((await self.call("POST", "/createRoom", given))["room_id"])

    async def send(self, room: str, text: str) -> str:
        self.sent += 1
        body = {"msgtype": "m.text", "body": text}
        path = f"/rooms/{room}/send/m.room.message/{time.time_ns()}.{self.sent}"
        return str((await self.call("PUT", path, body))["event_id"])

    async def state(self, room: str, kind: str, content: Any, key: str = "") -> str:
        path = f"/rooms/{room}/state/{kind}/{key}"
        return str((await self.call("PUT", path, content))["event_id"])

    async def join(self, room: str, *via: "User") -> None:
        await self.call("POST", f"/join/{room}", {}, server_name=[one.server for one in via])

    async def act(self, room: str, act: str, other: "User | None" = None) -> None:
        body = {} if other is None else {"user_id": other.user_id}
        await self.call("POST", f"/rooms/{room}/{act}", body)

    @property
    def server(self) -> str:
        return self.user_id.partition(":")[2]


async def call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Any,
    token: str,
    query: dict[str, Any],
) -> Any:
    """Return the JSON of a response; raise `ErrorResponse`."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    pairs = [
        (key, str(one))
        for key, value in query.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    async with session.request(method, url, json=body, params=pairs, headers=headers) as response:
        answer = await response.json(content_type=None)
        if response.status != 200:
            raise ErrorResponse(f"{method} {url}: {response.status} {answer}")
        return answer


class TlsGate:
    """TLS in front of a server. It can drop transactions, as if the network had lost them.

    With `lacks_v2` the server is one of before the second form of invites, joins and leaves.
    """

    def __init__(self, port: int, backend: str) -> None:
        self.port, self._backend = port, backend
        self.drops, self.dropped, self.lacks_v2 = False, 0, False

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator["TlsGate"]:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificates(folder)[1])
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass)
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=tls).start()
                yield self
            finally:
                await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if self.drops and request.raw_path.startswith(SENDS):
            self.dropped += len(json.loads(body)["pdus"])
            return web.json_response({"pdus": {}})
        if self.lacks_v2 and request.raw_path.startswith(V2):
            return web.json_response({"errcode": "M_UNRECOGNIZED"}, status=404)
        url = URL(self._backend + request.raw_path, encoded=True)
        headers = {key: request.headers[key] for key in request.headers if key not in HOP_BY_HOP}
        try:
            async with self._session.request(
                request.method, url, data=body or None, headers=headers, ssl=False
            ) as found:
                passed = {key: found.headers[key] for key in found.headers if key not in HOP_BY_HOP}
                return web.Response(body=await found.read(), status=found.status, headers=passed)
        except aiohttp.ClientError:
            return web.Response(status=502)


@dataclass
class ServerProcess:
    """A server's process. It keeps its data and ports when it is killed and started again."""

    name: str
    url: str
    command: list[str]
    folder: Path
    gate: TlsGate
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, stdout=log, stderr=log, cwd=ROOT, env=environment()
            )
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
            while True:
                assert self.process.returncode is None, self.log()
                try:
                    await call(session, "GET", f"{self.url}/_matrix/client/versions", None, "", {})
                except (aiohttp.ClientError, ErrorResponse, ValueError):
                    await asyncio.sleep(0.05)
                else:
                    return

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", errors="replace")[-6_000:]

    async def user(self, session: aiohttp.ClientSession, name: str) -> User:
        """Register a user."""
        body = {"username": name, "password": SECRET, "auth": {"type": "m.login.dummy"}}
        url = f"{self.url}{CLIENT}/register"
        found = await call(session, "POST", url, body, "", {})
        return User(session, self.url, found["user_id"], found["access_token"])


@asynccontextmanager
async def running(server: ServerProcess) -> AsyncIterator[ServerProcess]:
    async with server.gate.opened(server.folder):
        try:
            await server.start()
            yield server
        finally:
            await server.kill()


def example(folder: Path, dsn: str, *trusted: Path) -> ServerProcess:
    """The example, on a database."""
    folder.mkdir(exist_ok=True)
    clients, inner, outer = free_port(), free_port(), free_port()
    command = [sys.executable, "-m", "examples.homeserver", "--folder", str(folder)]
    command += ["--dsn", dsn, "--name", f"localhost:{outer}"]
    command += ["--client-port", str(clients), "--federation-port", str(inner)]
    for path in trusted:
        command += ["--trust", str(path)]
    gate = TlsGate(outer, f"https://127.0.0.1:{inner}")
    return ServerProcess(f"localhost:{outer}", f"http://127.0.0.1:{clients}", command, folder, gate)


def synapse(folder: Path, python: Path) -> ServerProcess:
    """Synapse on SQLite, as published; its limits of rates are raised."""
    folder.mkdir(exist_ok=True)
    inner, outer = free_port(), free_port()
    with (folder / "signing.key").open("w", encoding="ascii") as file:
        write_signing_keys(file, [generate_signing_key("s1")])
    (folder / "log.yaml").write_text(LOGGING, "utf-8")
    config = synapse_config(folder, f"localhost:{outer}", inner)
    (folder / "synapse.yaml").write_text(json.dumps(config), "utf-8")
    command = [str(python), "-m", "synapse.app.homeserver", "-c", str(folder / "synapse.yaml")]
    url = f"http://127.0.0.1:{inner}"
    return ServerProcess(f"localhost:{outer}", url, command, folder, TlsGate(outer, url))


LOGGING: Final = """
version: 1
disable_existing_loggers: false
formatters: {plain: {format: "%(asctime)s %(levelname)s %(name)s %(message)s"}}
handlers: {console: {class: logging.StreamHandler, formatter: plain}}
root: {level: WARNING, handlers: [console]}
"""


def synapse_config(folder: Path, name: str, port: int) -> dict[str, Any]:
    often = {"per_second": 10_000, "burst_count": 10_000}
    resources = [{"names": ["client", "federation"], "compress": False}]
    listener = {"port": port, "type": "http", "bind_addresses": ["127.0.0.1"]}
    return {
        "server_name": name,
        "listeners": [{**listener, "resources": resources}],
        "database": {"name": "sqlite3", "args": {"database": str(folder / "synapse.db")}},
        "log_config": str(folder / "log.yaml"),
        "signing_key_path": str(folder / "signing.key"),
        "media_store_path": str(folder / "media"),
        "registration_shared_secret": SECRET,
        "macaroon_secret_key": SECRET,
        "form_secret": SECRET,
        "enable_registration": True,
        "enable_registration_without_verification": True,
        "report_stats": False,
        "enable_media_repo": False,
        "trusted_key_servers": [],
        "federation_verify_certificates": False,
        "ip_range_blacklist": [],
        "federation_ip_range_blacklist": [],
        "presence": {"enabled": False},
        "stats": {"enabled": False},
        "user_directory": {"enabled": False},
        "federation": {
            "destination_min_retry_interval": 100,
            "destination_max_retry_interval": 200,
        },
        "rc_message": often,
        "rc_registration": often,
        "rc_login": dict.fromkeys(("address", "account", "failed_attempts"), often),
        "rc_joins": dict.fromkeys(("local", "remote"), often),
        "rc_joins_per_room": often,
        "rc_invites": dict.fromkeys(("per_room", "per_user", "per_issuer"), often),
        "rc_federation": {"sleep_limit": 10_000, "reject_limit": 10_000, "concurrent": 10},
        "rc_room_creation": often,
        "bcrypt_rounds": 4,
        "caches": {"sync_response_cache_duration": "0s"},
    }
