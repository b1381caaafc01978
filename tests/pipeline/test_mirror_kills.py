"""A continuous mirror on a cluster, while its driver, its executors and Postgres are killed."""

import asyncio
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil
import pytest

import storage
from storage.database.migrate import migrate
from storage.errors import StorageError
from storage.pipeline import mirror
from storage.testing import GeneratedRoom
from tests.long_run import long_run
from tests.maintenance.rooms import SERVER, deliver
from tests.mortal import Mortal, mortal_postgres
from tests.pipeline.cluster import cluster, end_all, executors, family_of
from tests.pipeline.mirrored import differences, versions
from tests.pipeline.test_mirror import CONFIG, change, rooms_of

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(7_200)]

KILLS: Final = 50
VICTIMS: Final = ("driver", "executor", "executor", "worker", "worker", "postgres", "postgres")


@dataclass
class MirrorService:
    """The mirror as a service that is started again whenever it has ended."""

    dsn: str
    folder: Path
    master: str
    commits: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    process: Process | None = None
    log: list[str] = field(default_factory=list)
    starts: int = 0

    async def ensure(self) -> Process:
        """Start it unless it runs; return once it has made its first commit or ended."""
        if self.process is None or self.process.returncode is not None:
            self.starts += 1
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.pipeline.mirror_service",
                self.dsn,
                str(self.folder),
                self.master,
                cwd=Path(__file__).parents[2],
                stdout=PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            self._reading = asyncio.create_task(self._read(self.process))
        return self.process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.log.append(line.decode())
            if line.split()[0:1] and line.split()[0].decode() in NAMES:
                self.commits.put_nowait(line.decode())
        self.commits.put_nowait("ended")

    async def end(self) -> None:
        """Kill the driver with its JVM and its workers."""
        if self.process is not None and self.process.returncode is None:
            with suppress(psutil.NoSuchProcess):  # it has ended, and nobody has waited for it yet
                local = psutil.Process(self.process.pid)
                end_all([local, *family_of(local)], kill=True)
        if self.process is not None:
            await self.process.wait()
            await self._reading
        while not self.commits.empty():
            self.commits.get_nowait()


NAMES: Final = {"events", "state_changes", "memberships", "visibility", "rooms"}


@dataclass
class Killing:
    """What is killed, and how often."""

    service: MirrorService
    server: Mortal
    workers: list[psutil.Process]
    rng: random.Random
    killed: Counter[str] = field(default_factory=Counter)

    async def kill(self, victim: str) -> None:
        process = await self.service.ensure()
        at_work = executors(self.workers)
        python = [
            one for executor in at_work for one in family_of(executor) if "python" in name_of(one)
        ]
        choices: dict[str, Callable[[], list[psutil.Process]]] = {
            "executor": lambda: [self.rng.choice(at_work)],
            "worker": lambda: [self.rng.choice(python)],
        }
        if victim == "postgres":
            self.server.kill()
            self.server.start()
        elif (victim == "executor" and at_work) or (victim == "worker" and python):
            end_all(choices[victim](), kill=True)
        else:
            victim = "driver"
            await self.service.end()
        self.killed[victim] += 1
        if process.returncode is not None:
            await self.service.end()


def name_of(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


async def live(dsn: str, rooms: list[GeneratedRoom], rng: random.Random, part: int) -> None:
    """Some events and history, and what maintenance does; the server may die meanwhile."""
    with suppress(StorageError, OSError):
        async with storage.open(dsn, server_name=SERVER, config=CONFIG) as store:
            for room in rooms:
                size = -(-len(room.events) // KILLS)
                some = room.events[max(part - 2, 0) * size : (part + 1) * size]
                if some:
                    await deliver(store, replace(room, events=some), batch=10)
            for _ in range(rng.randrange(3)):
                await change(store, rooms, rng)


async def check(dsn: str, folder: Path) -> None:
    """Both anti-joins are empty after a last pass, and another one changes nothing."""
    mirror(None, dsn, str(folder), once=True)
    assert await differences(dsn, folder) == {}
    before = versions(folder)
    mirror(None, dsn, str(folder), once=True)
    assert versions(folder) == before


@long_run
async def test_a_continuous_mirror_outlives_kills(tmp_path: Path) -> None:
    rng = random.Random(int(os.environ.get("STORAGE_SEED", "5")))
    rooms = rooms_of(7, 3, 40 + 4 * KILLS)
    folder = tmp_path / "mirror"
    with mortal_postgres() as server, cluster(tmp_path / "cluster") as (master, workers):
        dsn = server.start()
        await migrate(dsn)
        service = MirrorService(dsn, folder, master)
        killing = Killing(service, server, workers, rng)
        for part in range(KILLS):
            await service.ensure()
            living = asyncio.create_task(live(dsn, rooms, rng, part))
            with suppress(TimeoutError):  # a service that starts, then one at work
                await asyncio.wait_for(service.commits.get(), 150)
            with suppress(TimeoutError):  # killed at a commit, or between two
                await asyncio.wait_for(service.commits.get(), rng.uniform(0.1, 3))
            await killing.kill(rng.choice(VICTIMS))
            await living
            sys.stderr.write(f"{part + 1} {dict(killing.killed)} {service.starts} starts\n")
            if part % 10 == 9:
                await service.end()
                await check(dsn, folder)
        await service.end()
        await check(dsn, folder)
        assert sum(killing.killed.values()) == KILLS
        assert {*VICTIMS} <= {*killing.killed}
