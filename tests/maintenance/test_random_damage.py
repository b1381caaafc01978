"""Rows damaged at random are found by verification; the share is printed for each column."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest

import storage
from storage import UserId
from storage.database import Database
from storage.testing import ODD_SOME, SHAPES, Odd, RoomBuilder, build_room, deliver_late, deliver_with_gap
from tests.maintenance.random_damage import Kind, columns, damage, first_finding, kinds
from tests.maintenance.rooms import LIVELY, SERVER, deliver

import traceback
LOG = open(os.environ.get("STORAGE_DAMAGE_LOG", "/dev/null") + ".missed", "w")
DAMAGES = int(os.environ.get("STORAGE_DAMAGES", "40"))
SEED = int(os.environ.get("STORAGE_SEED", "1"))


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    """Rooms in which every derived table has rows."""
    lively = build_room(LIVELY.replaced(odd=Odd(rejected=0.03, early_redaction=0.03)), 90, seed=11, sign=False)
    late = build_room(SHAPES["fork_heavy"].replaced(odd=ODD_SOME), 40, seed=5, version="1", sign=False)
    restless = RoomBuilder("11", seed=3, sign=False)
    restless.start(restless.user(1))
    users = [UserId(f"@user{n}:s1.test") for n in (1, 2)]
    for _ in range(20):
        restless.join(restless.user(2)); restless.message(restless.user(2)); restless.leave(restless.user(2)); restless.message(restless.user(1))
    async with storage.open(dsn, server_name=SERVER) as store:
        await deliver(store, deliver_with_gap(lively, 30, 38), batch=40)
        await deliver(store, deliver_late(late, 3), batch=9)
        await store.append(restless.pdus)
        request = storage.SlidingSyncRequest(lists={"all": storage.SlidingList()})
        await store.sliding_sync(users[0], request, device_id="DEVICE")
    async with await Database.open(dsn) as database:
        yield database


async def test_random_damage_is_found(database: Database) -> None:
    rng = Random(SEED)
    made, found, refused = Counter[str](), Counter[str](), Counter[str]()
    missed: list[str] = []
    async with database.connection() as conn:
        driver = conn._driver
        of = await columns(driver)
        every = kinds(of)
        rooms = [row[0] for row in await driver.fetch("SELECT room_id FROM rooms ORDER BY 1")]
        transaction = driver.transaction(); await transaction.start()
        assert await first_finding(conn, rooms, SERVER) is None
        await transaction.rollback()
        at = 0
        while sum(made.values()) < DAMAGES and at < DAMAGES * 2:
            kind = every[at % len(every)] if DAMAGES >= len(every) else rng.choice(every)
            at += 1
            transaction = driver.transaction(); await transaction.start()
            try:
                done = await damage(driver, kind, of, rng)
                if done is None:
                    refused[str(kind)] += 1
                    continue
                made[str(kind)] += 1
                done, first = done
                try:
                    seen = await first_finding(conn, first, SERVER)
                except Exception as error:
                    print(f"{kind} RAISED {traceback.format_exc()} {done}", file=LOG, flush=True); missed.append(f"{kind} RAISED {error!r} {done}")
                    continue
                if seen:
                    found[str(kind)] += 1
                else:
                    missed.append(f"{kind} {done}"); print(missed[-1], file=LOG, flush=True)
            finally:
                await transaction.rollback()
    with open(os.environ.get("STORAGE_DAMAGE_LOG", "/dev/null"), "w") as log:
        for kind in sorted({str(k) for k in every}):
            print(f"{found[kind]}/{made[kind]} (refused {refused[kind]}) {kind}", file=log)
        print("\n".join(missed), file=log)
    print(f"{sum(found.values())} of {sum(made.values())} found")
