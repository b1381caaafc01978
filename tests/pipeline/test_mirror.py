"""A mirror equals its store after whatever happens to the store; both anti-joins are empty."""

import asyncio
import random
import signal
import sys
from asyncio.subprocess import PIPE
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import storage
from storage import Config, Store
from storage.errors import PurgeRefused
from storage.ids import UserId
from storage.maintenance.censor import censor
from storage.maintenance.purge import purge_history, purge_room
from storage.pipeline import mirror
from storage.pipeline.lake import bulk, delta_table, event_pass
from storage.testing import GeneratedRoom, build_room, deliver_late, deliver_with_gap
from tests.long_run import long_run
from tests.maintenance.rooms import LIVELY, SERVER, deliver
from tests.maintenance.test_purge_random import ODD
from tests.pipeline.mirrored import differences, versions
from tests.small_limits import purges_in_batches

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

CONFIG = Config(purge_pause_ms=0)
small_batches = purges_in_batches(7)


def rooms_of(seed: int, number: int, events: int) -> list[GeneratedRoom]:
    made = []
    for at in range(number):
        shape = LIVELY.replaced(fork_rate=0.2, fork_depth=4.0, odd=ODD)
        room = build_room(
            shape, events, seed=seed * 100 + at, version=str(1 + (seed + at) % 12), sign=False
        )
        made.append(deliver_late(room, seed) if at % 2 else deliver_with_gap(room, 20, events // 2))
    return made


async def change(store: Store, rooms: list[GeneratedRoom], rng: random.Random) -> str:
    """Something that maintenance or a user does."""
    room = rng.choice(rooms)
    async with store.database.connection() as conn:
        ids = await conn.fetchvals(
            "SELECT event_id FROM events JOIN rooms USING (room_nid) WHERE room_id = $1::text "
            "AND NOT outlier ORDER BY topological_ordering",
            room.room_id,
        )
        users = await conn.fetchvals("SELECT name FROM principals WHERE name LIKE '@%'")
    user = UserId(rng.choice(sorted(users)))
    match rng.randrange(5 if ids else 3):
        case 0:
            await censor(store.database, older_than_ms=0)
            return "censored"
        case 1:
            await store.erase_user(user)
            return f"erased {user}"
        case 2:
            await store.restore_user(user)
            return f"restored {user}"
        case 3:
            if rng.random() < 0.3:
                await purge_room(store.database, room.room_id, server_name=SERVER, force=True)
                return f"purged {room.room_id}"
            return "nothing"
        case _:
            before = ids[rng.randrange(len(ids))]
            with suppress(PurgeRefused):  # an event that is not accepted
                await purge_history(
                    store.database,
                    room.room_id,
                    server_name=SERVER,
                    before_event_id=before,
                    local=rng.random() < 0.5,
                )
            return f"purged before {before}"


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=long_run) for n in range(1, 20))])
async def test_a_mirror_equals_its_store(
    spark: SparkSession, dsn: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "SWEPT_PIECE", 1 + seed % 4)
    monkeypatch.setattr(bulk, "PIECE", 5 + seed)
    monkeypatch.setattr(event_pass, "MANY_ROOMS", seed % 3)
    monkeypatch.setattr(event_pass, "TOGETHER", 1 + seed % 2)
    monkeypatch.setattr(delta_table, "PART_ROWS", 10 + seed)
    rng = random.Random(seed)
    rooms = rooms_of(seed, 3, 90 if seed else 60)
    folder = tmp_path / "mirror"
    done: list[str] = []
    async with storage.open(dsn, server_name=SERVER, config=CONFIG) as store:
        for part in range(4):
            for room in rooms:
                size = -(-len(room.events) // 4)
                some = room.events[part * size : (part + 1) * size]
                if some:
                    await deliver(store, replace(room, events=some), batch=rng.choice([1, 5, 50]))
            done += [await change(store, rooms, rng) for _ in range(rng.randrange(4))]
            mirror(spark, dsn, str(folder), once=True, batch=rng.choice([25, 200_000]))
            assert await differences(dsn, folder) == {}, done
    mirror(spark, dsn, str(folder), once=True)  # closing the store has moved a position
    assert await differences(dsn, folder) == {}
    before = versions(folder)
    mirror(spark, dsn, str(folder), once=True)
    assert versions(folder) == before


async def killed(dsn: str, folder: Path, call: int) -> bool:
    """Run a mirror that dies at so many calls; whether it did."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.pipeline.mirror_process",
        dsn,
        str(folder),
        str(call),
        cwd=Path(__file__).parents[2],
        stderr=PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode in {0, -signal.SIGKILL}, errors.decode()
    return process.returncode != 0


@pytest.mark.parametrize("kills", [1, pytest.param(60, marks=long_run)])
@pytest.mark.timeout(3_000)
async def test_a_killed_mirror_goes_on(dsn: str, tmp_path: Path, kills: int) -> None:
    """It dies at random calls: before, between and after the files and commits of its tables."""
    rng = random.Random(kills)
    rooms = rooms_of(7, 3, 40 + 2 * kills)
    folder = tmp_path / "mirror"
    died = 0
    async with storage.open(dsn, server_name=SERVER, config=CONFIG) as store:
        for part in range(kills):
            for room in rooms:
                size = -(-len(room.events) // kills)
                some = replace(room, events=room.events[part * size : (part + 1) * size])
                await deliver(store, some, batch=10)
            await change(store, rooms, rng)
            died += await killed(dsn, folder, rng.randrange(50, 1_500))
    mirror(None, dsn, str(folder), once=True)
    assert await differences(dsn, folder) == {}
    assert died >= kills * 0.3
