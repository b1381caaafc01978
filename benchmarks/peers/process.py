"""The peer's process and its database on the benchmark's server: commands are lines of JSON."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import asyncpg
from signedjson.key import encode_signing_key_base64

from benchmarks.harness import with_database
from benchmarks.peers.environment import interpreter
from storage.testing import signing_key

DRIVER: Final = Path(__file__).with_name("synapse_driver.py")
LINE_MAX: Final = 64 << 20
Batches = Sequence[Sequence[bytes]]


@dataclass(slots=True)
class SynapseProcess:
    """A running peer."""

    process: asyncio.subprocess.Process
    dsn: str
    folder: Path

    async def ask(self, do: str, **given: Any) -> dict[str, Any]:
        """Return the result of a command of the driver."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | given).encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """Return the next line."""
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer has ended:\n{self.errors()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the peer failed:\n{answer['error']}\n{self.errors()}")
        return answer

    def errors(self) -> str:
        """Return the end of what it printed."""
        return (self.folder / "errors").read_text(encoding="utf-8", errors="replace")[-4_000:]

    async def load(self, clients: Iterable[Batches]) -> None:
        """Send the batches of each client that the next "persist" stores."""
        path = self.folder / "batches.ndjson"
        with path.open("w", encoding="utf-8") as file:
            for number, batches in enumerate(clients):
                for batch in batches:
                    file.write(
                        json.dumps({"client": number, "pdus": [pdu.decode() for pdu in batch]})
                        + "\n"
                    )
        await self.ask("load", path=str(path))


@asynccontextmanager
async def synapse(dsn: str, server_name: str, **more: Any) -> AsyncIterator[SynapseProcess]:
    """Run a peer on a new database of the server of `dsn`; remove both at the end.

    ``more`` is for its driver: `client_port`.
    """
    python = interpreter()
    name = f"peer_{time.monotonic_ns()}"
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'"
        )
        with tempfile.TemporaryDirectory(
            prefix="room-storage-peer-", ignore_cleanup_errors=True
        ) as folder:
            peer = await _launch(python, with_database(dsn, name), Path(folder), server_name, more)
            try:
                await peer.answer()
                yield peer
            finally:
                await _end(peer)
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


@asynccontextmanager
async def synapse_on_sqlite(
    python: Path, folder: Path, server_name: str
) -> AsyncIterator[SynapseProcess]:
    """Run a peer on SQLite in a folder: for tests, which compare and do not measure."""
    peer = await _launch(python, None, folder, server_name, {})
    try:
        await peer.answer()
        yield peer
    finally:
        await _end(peer)


async def _launch(
    python: Path, dsn: str | None, folder: Path, server_name: str, more: dict[str, Any]
) -> SynapseProcess:
    key = signing_key(server_name)
    given = {
        "server_name": server_name,
        "signing_key": f"ed25519 {key.version} {encode_signing_key_base64(key)}",
        "folder": str(folder),
        **({} if dsn is None else _place_of(dsn)),
        **more,
    }
    with (folder / "errors").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            python,
            DRIVER,
            json.dumps(given),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            limit=LINE_MAX,
        )
    return SynapseProcess(process, dsn or "", folder)


def _place_of(dsn: str) -> dict[str, str]:
    """Return the parts of a DSN that the driver takes."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    return {
        "host": query.get("host", [parts.hostname or "localhost"])[0],
        "port": query.get("port", [str(parts.port or 5432)])[0],
        "user": parts.username or query.get("user", ["postgres"])[0],
        "database": parts.path.lstrip("/"),
    }


async def _end(peer: SynapseProcess) -> None:
    """Close its input, so that it ends by itself, or kill it."""
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    try:
        await asyncio.wait_for(peer.process.wait(), timeout=20)
    except TimeoutError:
        peer.process.kill()
        await peer.process.wait()
