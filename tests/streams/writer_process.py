"""A writer process for tests that kill it: it sends numbered messages and prints each number.

Arguments: DSN, instance name, URL of a Redis, the first number, and how many (endless if negative).
"""

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack, suppress
from typing import Final

import storage
from storage import Store
from storage.replication import ReplicationPeer
from storage.replication import transport as limits
from storage.replication.redis_transport import RedisTransport
from storage.replication.transport import ReplicationLimits

CONFIG = storage.Config(follow_ms=50, pool_size_max=2)
LIMITS: Final = ReplicationLimits(ping_ms=200, retry_ms_first=1, retry_ms_max=20)

OPENINGS_MAX = 20


async def opened(stack: AsyncExitStack, dsn: str, instance_name: str) -> Store:
    """A store; where the connection breaks while it is opened, it is opened again."""
    for _ in range(OPENINGS_MAX):
        with suppress(storage.DatabaseUnavailable):
            return await stack.enter_async_context(
                storage.open(dsn, server_name="s1.test", instance_name=instance_name, config=CONFIG)
            )
    raise SystemExit(f"the database went away {OPENINGS_MAX} times")


async def main(dsn: str, instance_name: str, redis: str, first: int, count: int) -> None:
    user = storage.UserId(f"@{instance_name}:s1.test")
    transport = RedisTransport(redis, "s1.test")
    async with AsyncExitStack() as stack:
        store = await opened(stack, dsn, instance_name)
        await stack.enter_async_context(ReplicationPeer(store, transport, follows=False))
        for number in itertools.count(first) if count < 0 else range(first, first + count):
            with suppress(storage.DatabaseError):
                await store.to_device.send({user: {"device": {"n": number}}})
                sys.stdout.write(f"{number}\n")
                sys.stdout.flush()
        await transport.connected()


if __name__ == "__main__":
    limits.LIMITS = LIMITS
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])))
