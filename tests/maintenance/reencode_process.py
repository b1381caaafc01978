"""The job that encodes events, in a process that is killed after its statement number n."""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass

from storage import Config
from storage.database import Database
from storage.database.background import run_jobs
from storage.maintenance.reencode import ENCODE_EVENTS, JOB_NAME


@dataclass
class KilledAfter:
    """An observer that kills the process after so many statements of the job."""

    statements: int

    def before(self, statement: str) -> None:
        """See `storage.database.connection.Observer`."""

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""
        del statement, seconds
        self.statements -= 1
        if self.statements == 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def main(dsn: str, statements: int) -> None:
    observer = KilledAfter(statements)
    config = Config(pool_size_max=1)
    async with await Database.open(dsn, config=config, observer=observer) as database:
        async for _ in run_jobs(database, {JOB_NAME: ENCODE_EVENTS}, pause=0):
            pass


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
