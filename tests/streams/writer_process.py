"""A writer in a process of its own, to be killed: sends messages until it dies, a line on standard output per commit."""

import asyncio
import itertools
import sys
from contextlib import suppress

import storage

QUIET = storage.Config(follow_ms=50, pool_size_max=2)


async def main(dsn: str, instance_name: str, first: int) -> None:
    async with storage.open(dsn, server_name="s1.test", instance_name=instance_name, config=QUIET) as store:
        for number in itertools.count(first):
            with suppress(storage.DatabaseError):
                await store.to_device.send({storage.UserId(f"@{instance_name}:s1.test"): {"device": {"n": number}}})
                sys.stdout.write(f"{number}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
