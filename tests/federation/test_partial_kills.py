"""A process is killed at a random moment of a join with the members omitted, or of its completion.

A new process makes the same calls again. Then all tables equal those of a join with the whole
answer (tests/persist/whole_rows.py). A repeated transaction may store an event that had waited for
its parents before the kill, and two processes may store the branches of a gap in another order.
Then the order of arrival is another one, and the store is only verified. `STORAGE_EXAMPLES` is the
number of kills, and `STORAGE_SEED` the first of their rooms.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pytest

import storage
from tests.conftest import _fresh_database
from tests.federation.partial_process import Forks, Killer, forks, play
from tests.federation.partial_worlds import SERVER
from tests.maintenance.rooms import findings
from tests.persist.row_differences import differences
from tests.persist.whole_rows import StoreRows, rows_of

KILLS: Final = int(os.environ.get("STORAGE_EXAMPLES", "1"))
FIRST: Final = int(os.environ.get("STORAGE_SEED", "0"))
KILLS_EACH: Final = 8
AT_ONCE: Final = 2  # one is killed while another one is compared
DELAYS_MS: Final = (0, 0, 0.5, 2, 8)


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks() as started:
        yield started


async def killed(processes: Forks, dsn: str, seed: int, number: int, delay_ms: float) -> bool:
    """Run the script in a process; return whether it was killed before its end."""
    code = await asyncio.to_thread(processes.run, dsn, seed, number, delay_ms)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def arrived(rows: StoreRows, moved: Sequence[str]) -> list[str]:
    """The events in the order of their arrival, without those with new positions."""
    return [one for one in rows.order if one not in moved]


@dataclass
class Room:
    """A script, and the rows that it leads to without a kill."""

    seed: int
    full: StoreRows
    processes: Forks
    kills: int = 0
    compared: int = 0

    async def kill(self, dsn: str, at: int, delay_ms: float) -> None:
        """Kill a process, and let this one go on."""
        was_killed = await killed(self.processes, dsn, self.seed, at, delay_ms)
        self.kills += was_killed  # a late one may have ended before
        await play(dsn, self.seed, Killer())
        completed = await rows_of(dsn)
        moved = completed.moved
        if arrived(self.full, moved) == arrived(completed, moved):
            self.compared += 1
            found = differences(self.full, completed, moved)
            assert not found, (at, delay_ms, "\n".join(found))
        async with storage.open(dsn, server_name=SERVER) as store:
            assert await store.partial_rooms() == []
            assert await findings(store) == [], (at, delay_ms)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST, FIRST - (-KILLS // KILLS_EACH)))
async def test_a_killed_completion_goes_on(
    seed: int,
    dsn: str,
    another_dsn: str,
    processes: Forks,
    server_dsn: str,
    template_name: str,
    worker_id: str,
    record_property: Callable[[str, object], None],
) -> None:
    counted = Killer()
    await asyncio.gather(
        play(another_dsn, seed, Killer(), is_partial=False), play(dsn, seed, counted)
    )
    room = Room(seed, await rows_of(another_dsn), processes)
    chance, turns = random.Random(seed), asyncio.Semaphore(AT_ONCE)

    async def kill(at: int, delay_ms: float) -> None:
        async with turns, _fresh_database(server_dsn, template_name, worker_id) as fresh:
            await room.kill(fresh, at, delay_ms)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(KILLS, KILLS_EACH)):
            at, delay_ms = chance.randint(1, counted.count), chance.choice(DELAYS_MS)
            tasks.create_task(kill(at, delay_ms))
    assert room.kills
    record_property("kills", room.kills)
    record_property("compared", room.compared)
