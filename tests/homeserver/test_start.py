"""How the example starts and ends."""

import asyncio
import signal
import socket
from pathlib import Path

import pytest

from tests.homeserver.processes import example, running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("homeserver")]


async def test_a_taken_port_is_an_error_without_a_traceback(dsn: str, tmp_path: Path) -> None:
    server = example(tmp_path / "ours", dsn)
    port = int(server.command[server.command.index("--client-port") + 1])
    with socket.create_server(("127.0.0.1", port)):
        process = await asyncio.create_subprocess_exec(
            *server.command, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await process.communicate()
    assert process.returncode == 1
    [line] = stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert str(port) in line


async def test_sigterm_stops_the_embedded_postgres(tmp_path: Path) -> None:
    server = example(tmp_path / "ours", "")
    at = server.command.index("--dsn")
    del server.command[at : at + 2]
    async with running(server):
        assert server.process is not None
        assert list(tmp_path.rglob("postmaster.pid"))
        server.process.send_signal(signal.SIGTERM)
        assert await server.process.wait() == 0, server.log()
        assert not list(tmp_path.rglob("postmaster.pid"))
        assert "Traceback" not in server.log()
