"""A process that joins with the members omitted, receives, completes, and is killed on the way.

It kills itself a moment after it begins its n-th statement: at once, or some milliseconds later.
"""

import asyncio
import os
import signal
import sys
import threading

import storage
from storage.config import Config
from storage.testing import signing_key
from tests.federation.partial_worlds import SERVER, PartialWorld, Replica, Script


class Killer:
    """An observer that counts statements, and kills its process after the n-th; 0: never."""

    def __init__(self, last: int = 0, delay_ms: float = 0) -> None:
        self.count = 0
        self.last = last
        self.delay_ms = delay_ms

    def before(self, _: str) -> None:
        self.count += 1
        if self.count == self.last and self.delay_ms:
            threading.Timer(self.delay_ms / 1000, kill).start()
        elif self.count == self.last:
            kill()

    def after(self, _: str, __: float) -> None:
        """Nothing."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def play(dsn: str, seed: int, killer: Killer, *, is_partial: bool = True) -> None:
    script = Script(PartialWorld(seed))
    async with storage.open(
        dsn,
        server_name=SERVER,
        signing_key=signing_key(SERVER),
        observer=killer,
        config=Config(pool_size_max=3),
    ) as store:
        await script.play(Replica.of(store, script.world.remote), is_partial=is_partial)


if __name__ == "__main__":
    name, chosen, n, delay = sys.argv[1:]
    asyncio.run(play(name, int(chosen), Killer(int(n), float(delay))))
