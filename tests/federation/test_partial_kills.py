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
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

import storage
from tests.conftest import _fresh_database
from tests.federation.partial_process import Killer, play
from tests.federation.partial_worlds import SERVER
from tests.maintenance.rooms import findings
from tests.persist.row_differences import differences
from tests.persist.whole_rows import StoreRows, rows_of

KILLS: Final = int(os.environ.get("STORAGE_EXAMPLES", "1"))
FIRST: Final = int(os.environ.get("STORAGE_SEED", "0"))
KILLS_EACH: Final = 8
DELAYS_MS: Final = (0, 0, 0.5, 2, 8)


async def killed(dsn: str, seed: int, number: int, delay_ms: float) -> bool:
    """Run the script in a process; return whether it was killed before its end."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.federation.partial_process",
        dsn,
        str(seed),
        str(number),
        str(delay_ms),
        cwd=Path(__file__).parents[2],
        stdout=PIPE,
        stderr=STDOUT,
    )
    output, _ = await started.communicate()
    assert started.returncode in (0, -signal.SIGKILL), output.decode()[-3000:]
    return started.returncode != 0


def arrived(rows: StoreRows, moved: Sequence[str]) -> list[str]:
    """The events in the order of their arrival, without those with new positions."""
    return [one for one in rows.order if one not in moved]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST, FIRST - (-KILLS // KILLS_EACH)))
async def test_a_killed_completion_goes_on(
    seed: int,
    dsn: str,
    another_dsn: str,
    server_dsn: str,
    template_name: str,
    worker_id: str,
    record_property: Callable[[str, object], None],
) -> None:
    await play(another_dsn, seed, Killer(), is_partial=False)
    full = await rows_of(another_dsn)
    await play(dsn, seed, counted := Killer())
    chance, kills, compared = random.Random(seed), 0, 0
    for _ in range(min(KILLS, KILLS_EACH)):
        at, delay_ms = chance.randint(1, counted.count), chance.choice(DELAYS_MS)
        async with _fresh_database(server_dsn, template_name, worker_id) as fresh:
            kills += await killed(fresh, seed, at, delay_ms)  # the last ones may come too late
            await play(fresh, seed, Killer())
            completed = await rows_of(fresh)
            moved = completed.moved
            if arrived(full, moved) == arrived(completed, moved):
                compared += 1
                found = differences(full, completed, moved)
                assert not found, (at, delay_ms, "\n".join(found))
            async with storage.open(fresh, server_name=SERVER) as store:
                assert await store.partial_rooms() == []
                assert await findings(store) == []
    assert kills
    record_property("kills", kills)
    record_property("compared", compared)
