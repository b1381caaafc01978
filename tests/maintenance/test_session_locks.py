"""The locks of a session that keep purges of a room, and changes of the archive, apart."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from storage import Config
from storage.database import Database
from storage.maintenance.cold_archive import pack_rows
from storage.maintenance.purge import job
from tests.homeserver.agreement import until
from tests.proxy import CommitEater

ANSWER = b"D\x00\x00\x00\x0b\x00\x01\x00\x00\x00\x01\x01"
"""A row with one boolean that is true."""

SQL_LOCKS = """
SELECT count(*)
FROM pg_locks l
JOIN pg_database d ON d.oid = l.database
WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
"""

Lock = Callable[[Database], AbstractAsyncContextManager[None]]


def purging(database: Database) -> AbstractAsyncContextManager[None]:
    return job.alone(database, "!pantry:s1.test", 7)


class Between(CommitEater):
    """Stands between a process and Postgres.

    It cancels a task when a lock is granted, before the process has the answer.
    """

    victim: asyncio.Task[None] | None = None
    is_locking = False

    def before(self, statement: str) -> None:
        self.is_locking = statement in (job.SQL_LOCK, pack_rows.SQL_LOCK)

    def after(self, _: str, __: object) -> None:
        pass

    async def answered(self, data: bytes) -> None:
        if self.is_locking and ANSWER in data and self.victim is not None:
            self.victim.cancel()
            await asyncio.sleep(0)


@pytest.mark.parametrize("lock", [purging, pack_rows.alone], ids=["purge", "archive"])
async def test_a_lock_is_released_that_was_cancelled_when_it_was_granted(
    dsn: str, lock: Lock
) -> None:
    async with (
        Between(dsn) as between,
        await Database.open(between.dsn, observer=between) as database,
    ):

        async def enter() -> None:
            async with lock(database):
                pytest.fail("the answer came first")

        async def is_free() -> bool:
            async with database.connection() as conn:
                return not await conn.fetchval(SQL_LOCKS)

        between.victim = asyncio.create_task(enter())
        await asyncio.wait([between.victim])
        assert between.victim.cancelled()
        await until(is_free)
        between.victim = None
        async with lock(database):
            assert not await is_free()
        assert await is_free()


async def test_many_locks_leave_the_pool_to_others(dsn: str) -> None:
    config = Config(pool_size_min=1, pool_size_max=2, pool_acquire_timeout_ms=60_000)
    async with await Database.open(dsn, config=config) as database, AsyncExitStack() as stack:
        for room_nid in range(3):
            await stack.enter_async_context(job.alone(database, "!pantry:s1.test", room_nid))
        assert await job.running(database) == {0, 1, 2}
