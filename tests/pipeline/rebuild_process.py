"""A rebuild in a process of its own, which kills itself before its n-th statement.

Tells how many there were, where it came to its end.
"""

import asyncio
import os
import signal
import sys

from storage.config import Config
from storage.database import Database
from storage.rebuild import Rebuilder
from storage.rebuild.shadow_tables import ShadowTables


class Deadly:
    """An observer of statements."""

    def __init__(self, last: int) -> None:
        self.count = 0
        self.last = last

    def before(self, _: str) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, _: str, __: float) -> None:
        """Nothing."""


async def main(dsn: str, room_id: str, last: str) -> None:
    deadly = Deadly(int(last))
    config = Config(pool_size_max=2)
    async with (
        await Database.open(dsn, config=config, observer=deadly) as database,
        database.connection() as conn,
    ):
        await Rebuilder(database, await ShadowTables.of(conn), "s1.test").rebuild(room_id)
    sys.stdout.write(f"{deadly.count}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
