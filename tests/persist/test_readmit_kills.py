"""A process is killed at random moments of its readmissions; another one goes on.

In between nothing contradicts anything else, and in the end all tables equal those of a store whose
process was not killed (whole_rows.py). `STORAGE_EXAMPLES` is the number of kills.
"""

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path
from typing import Final

import pytest

import storage
from storage.maintenance.verify import Finding
from tests.federation.partial_process import Killer
from tests.maintenance.rooms import findings
from tests.persist.planning import SERVER
from tests.persist.readmit_process import fill, readmit, room_of
from tests.persist.row_differences import differences
from tests.persist.whole_rows import rows_of

KILLS: Final = int(os.environ.get("STORAGE_EXAMPLES", "2"))
KILLS_EACH: Final = 4
DELAYS_MS: Final = (0, 0, 0.5, 2)


async def killed(dsn: str, seed: int, number: int, delay_ms: float) -> bool:
    """Readmit in a process; return whether it was killed before its end."""
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.persist.readmit_process",
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


async def refused(dsn: str, seed: int) -> tuple[int, list[Finding]]:
    """How many events are refused, and what is wrong with the store."""
    async with storage.open(dsn, server_name=SERVER) as store:
        events = await store.events(room_of(seed)[1])
        left = sum(event.refused is not None for event in events.values())
        return left, await findings(store)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(-(-KILLS // KILLS_EACH)))
async def test_a_killed_readmission_is_done_or_not_done(
    seed: int, dsn: str, another_dsn: str
) -> None:
    for one in (dsn, another_dsn):
        async with storage.open(one, server_name=SERVER) as store:
            await fill(store, seed)
    left, _ = await refused(dsn, seed)
    assert left > 5
    await readmit(another_dsn, seed, counted := Killer())
    chance, kills = random.Random(seed), 0
    for _ in range(min(KILLS, KILLS_EACH)):
        at, delay_ms = chance.randint(1, counted.count // 2), chance.choice(DELAYS_MS)
        kills += await killed(dsn, seed, at, delay_ms)  # the last ones may come too late
        now, wrong = await refused(dsn, seed)
        assert (now <= left, wrong) == (True, [])
        left = now
    await readmit(dsn, seed, Killer())
    assert kills
    assert await refused(dsn, seed) == (0, [])
    found = differences(await rows_of(another_dsn), await rows_of(dsn))
    assert not found, "\n".join(found)
