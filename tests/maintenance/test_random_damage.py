"""Rows damaged at random are found by verification, or it is explained why not.

`STORAGE_DAMAGES` is the number of damages, and `STORAGE_SEED` that of the random numbers. The share
of each kind that was found is in the output (`pytest -s`).
"""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from random import Random
from typing import Final

import pytest

import storage
from storage.database import Connection, Database
from tests.maintenance.random_damage import (
    EXPLAINED,
    KEPT,
    Column,
    Kind,
    columns,
    damage,
    fill,
    found_in,
    kinds,
)
from tests.maintenance.rooms import SERVER

DAMAGES: Final = int(os.environ.get("STORAGE_DAMAGES", "40"))
SEED: Final = int(os.environ.get("STORAGE_SEED", "1"))


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    await fill(dsn)
    async with await Database.open(dsn) as database:
        yield database


@pytest.mark.timeout(0)
async def test_random_damage_is_found(database: Database) -> None:
    rng = Random(SEED)
    made, found = Counter[str](), Counter[str]()
    missed: list[str] = []
    async with database.connection() as conn:
        known = await columns(conn._driver)
        every = kinds(known)
        assert await anext(found_in(conn, SERVER), None) is None
        for at in range(20 * DAMAGES):
            kind = every[at % len(every)] if len(every) < DAMAGES else rng.choice(every)
            done, is_found = await tried(conn, kind, known, rng)
            if done is None:
                continue
            name = f"{kind.place} {kind.way}"
            made[name] += 1
            found[name] += is_found
            if not is_found and kind.place not in EXPLAINED:
                missed.append(done)
            if made.total() == DAMAGES:
                break
        assert await anext(found_in(conn, SERVER), None) is None, "each damage was rolled back"
    for name, count in sorted(made.items()):
        sys.stdout.write(f"{found[name]} of {count} found: {name}\n")
    sys.stdout.write(f"{found.total()} of {made.total()} found\n")
    assert made.total() == DAMAGES
    assert missed == []


async def tried(
    conn: Connection, kind: Kind, known: list[Column], rng: Random
) -> tuple[str | None, bool]:
    """Damage a row, verify, and roll back; return what was done, and whether it was found."""
    transaction = conn._driver.transaction()
    await transaction.start()
    done: str | None = None
    try:
        done = await damage(conn._driver, kind, known, rng)
        return done, done is not None and await anext(found_in(conn, SERVER), None) is not None
    except storage.StorageError as error:  # verification must not fail: the test reports it
        return f"{done}: {error}", False
    finally:
        await transaction.rollback()


async def test_what_is_explained_exists(database: Database) -> None:
    async with database.connection() as conn:
        places = {kind.place for kind in kinds(await columns(conn._driver))}
    assert (EXPLAINED.keys() | KEPT.keys()) - places == set()
