"""Archive events, or return them, in processes that are killed at their step number n.

Each line of standard input is a number: a child does the work, and its exit code is written. Steps
are statements, and calls that write, erase or remove a file: before each, and after each.
"""

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from storage import Config
from storage.database import Database
from storage.maintenance.cold_archive import archive_events, pack_rows, return_events, run, sweep


@dataclass
class KilledAt:
    """An observer that kills the process at a step."""

    step: int

    def count(self) -> None:
        self.step -= 1
        if self.step == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, statement: str) -> None:
        """See `storage.database.connection.Observer`."""

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""
        del statement, seconds
        self.count()

    def around(self, module: Any, name: str) -> None:
        """Count calls of a function of a module, before and after."""
        called = getattr(module, name)

        def counted(*args: Any) -> Any:
            self.count()
            result = called(*args)
            self.count()
            return result

        setattr(module, name, counted)


async def main(dsn: str, folder: str, work: str, step: int) -> None:
    killed = KilledAt(step)
    killed.around(run, "write_file")
    killed.around(pack_rows, "remove_file")
    killed.around(sys.modules[sweep.__module__], "erase_ranges")
    async with await Database.open(
        dsn, config=Config(pool_size_max=2), observer=killed
    ) as database:
        if work == "archive":
            await archive_events(
                database, older_than_ms=-1, url=folder, pack_bytes=10_000, grace_s=0.05
            )
        elif work == "back":
            await return_events(database, grace_s=0.05)
        else:
            await sweep(database, grace_s=0.05)


def forked(dsn: str, folder: str, work: str, step: int) -> int:
    """Do the work in a child process; return its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        asyncio.run(main(dsn, folder, work, step))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{forked(sys.argv[1], sys.argv[2], sys.argv[3], int(line))}\n")
        sys.stdout.flush()
