"""Joins of the soak (benchmarks/soak.py): `python -m benchmarks.soak_joiner DSN FIRST`.

A local user joins one room after another, with the members omitted from the answer. Transactions
arrive before and after the members are known. The soak kills this process, and starts it again at
the room whose number it printed last.
"""

import asyncio
import itertools
import sys
from typing import Final

import storage
from benchmarks.soak_rooms import SERVER
from benchmarks.soak_writer import CONFIG, PAUSE_SECONDS, quiet
from storage.testing import signing_key
from tests.federation.partial_worlds import PartialWorld, Replica, Script

OTHERS: Final = ("p1.test", "p2.test", "p3.test")
FIRST_SEED: Final = 10_000_000
"""Seeds of the other rooms of the soak are smaller."""


async def join(dsn: str, number: int) -> None:
    """Play the script of one room, from its start where the database was away."""
    script = await asyncio.to_thread(
        lambda: Script(PartialWorld(FIRST_SEED + number, server=SERVER, others=OTHERS))
    )
    while True:
        try:
            async with storage.open(
                dsn,
                server_name=SERVER,
                instance_name="joiner",
                signing_key=signing_key(SERVER),
                config=CONFIG,
            ) as store:
                await script.play(Replica.of(store, script.world.remote), is_partial=True)
                return
        except storage.DatabaseError:
            await asyncio.sleep(PAUSE_SECONDS)


async def main(dsn: str, first: int) -> None:
    """Join rooms until killed."""
    for number in itertools.count(first):
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        await join(dsn, number)


if __name__ == "__main__":
    quiet()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
