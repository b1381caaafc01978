"""A primary and a standby behind one address, and the failover from one to the other.

async with Pair() as pair:
    … open stores on `pair.dsn` …
    await pair.caught_up()          # the standby has all that is committed
    await pair.detach()             # and gets nothing from now on
    await pair.fail_over()          # the primary is gone, the standby serves behind the same
                                    address
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import asyncpg

from storage.config import Config
from storage.database.embedded import Account, EmbeddedPostgres
from storage.database.migrate import migrate
from tests.pausing import pause
from tests.postgres import chosen_binaries, client_programs, with_database
from tests.replication.proxies import Proxy, through, unix_socket_of

CONFIG = Config(embedded_fsync=False, embedded_shared_buffers_mb=16, embedded_connections_max=60)


class ReplicatedPair:
    """Two Postgres servers: the second replicates the first asynchronously.

    It does so until it is detached or promoted.
    """

    def __init__(self, config: Config = CONFIG) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        self._account = Account.for_server()
        self._folder = Path(tempfile.mkdtemp(prefix="storage-failover-"))
        self._folder.chmod(0o755)
        self._stack.callback(shutil.rmtree, self._folder)
        try:
            await self._begin()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _begin(self) -> None:
        self.primary = await self._started("first")
        await ask(
            self.primary.dsn, "CREATE DATABASE rooms TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'"
        )
        await migrate(self.rooms(self.primary))
        await asyncio.to_thread(self._copy)
        self.standby = await self._started("second")
        self.proxies: list[Proxy] = []
        self.dsn = await self.address()

    async def address(self) -> str:
        """The DSN of one more proxy, which leads to the primary."""
        proxy = await self._stack.enter_async_context(Proxy(unix_socket_of(self.primary.dsn)))
        self.proxies.append(proxy)
        return through(self.rooms(self.primary), proxy.port)

    @staticmethod
    def rooms(server: EmbeddedPostgres) -> str:
        """The DSN of the database on one of the servers."""
        return with_database(server.dsn, "rooms")

    async def _started(self, name: str) -> EmbeddedPostgres:
        server = EmbeddedPostgres(
            self._account.make_directory(self._folder / name),
            config=self._config,
            binaries=chosen_binaries(),
        )
        self._stack.push_async_callback(asyncio.to_thread, server.stop)
        await asyncio.to_thread(server.start)
        return server

    def _copy(self) -> None:
        """A base backup of the primary that follows it (-R)."""
        target = self._account.make_directory(self._folder / "second") / "postgresql"
        socket = unix_socket_of(self.primary.dsn).parent
        program = client_programs() / "pg_basebackup"
        command = [
            program,
            "-D",
            target,
            "-h",
            socket,
            "-p",
            "5432",
            "-U",
            "postgres",
            "-X",
            "stream",
            "-c",
            "fast",
            "--no-sync",
            "-R",
        ]
        subprocess.run(
            list(map(str, command)),
            check=True,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        self._own(target)

    def _own(self, target: Path) -> None:
        if self._account.switch:
            for one in (target, *target.rglob("*")):
                os.chown(one, self._account.uid, self._account.gid)
        target.chmod(0o700)

    async def caught_up(self) -> None:
        """Wait until the standby has replayed all that is committed."""
        at = await value(self.primary.dsn, "SELECT pg_current_wal_flush_lsn()::text")
        while not await value(
            self.standby.dsn, "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", at
        ):
            await pause()

    async def detach(self) -> None:
        """Cut the standby off: commits from now on are lost if it is promoted."""
        await ask(
            self.standby.dsn, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()"
        )
        while await value(self.standby.dsn, "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver)"):
            await pause()

    async def stop_primary(self) -> None:
        """The primary is gone, with all its sessions."""
        await asyncio.to_thread(self.primary.stop)

    async def back_to_the_copy(self) -> None:
        """Replace the first server by the second, as a restored backup does.

        The second was never a standby, and nothing was promoted. A second call restores the same
        backup once more.
        """
        await self.stop_primary()
        await asyncio.to_thread(self.standby.stop)
        data, kept = self.standby.directory / "postgresql", self.standby.directory / "kept"
        if kept.exists():
            shutil.rmtree(data)
        else:
            (data / "standby.signal").unlink()
            data.rename(kept)
        shutil.copytree(kept, data)
        self._own(data)
        await asyncio.to_thread(self.standby.start)
        self.point_to_standby()

    def point_to_standby(self) -> None:
        """Lead new connections to the second server."""
        for proxy in self.proxies:
            proxy.target = unix_socket_of(self.standby.dsn)

    async def promote(self) -> None:
        """Make the standby a primary."""
        assert await value(self.standby.dsn, "SELECT pg_promote(true, 60)")

    async def fail_over(self) -> None:
        """The primary is gone, and the standby serves in its place."""
        await self.stop_primary()
        await self.promote()
        self.point_to_standby()


async def ask(dsn: str, *statements: str) -> None:
    """Run statements, each in autocommit."""
    connection = await asyncpg.connect(dsn)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def value(dsn: str, sql: str, *args: Any) -> Any:
    """The first value of a query."""
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(sql, *args)
    finally:
        await connection.close()
