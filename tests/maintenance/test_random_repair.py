"""Rows damaged at random, committed and repaired: nothing is found afterwards, or it is said why.

`STORAGE_DAMAGES` is the number of damages, and `STORAGE_SEED` that of the random numbers. The share
of each kind that was mended is in the output (`pytest -s`).
"""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Final

import asyncpg
import pytest

from storage.database import Database
from storage.errors import StorageError
from storage.rebuild import repair
from tests.maintenance.random_damage import (
    EXPLAINED,
    KEPT,
    columns,
    damage,
    fill,
    found_in,
    kinds,
)
from tests.maintenance.rooms import SERVER
from tests.persist.tables import logical_tables
from tests.postgres import with_database

DAMAGES: Final = int(os.environ.get("STORAGE_DAMAGES", "40"))
SEED: Final = int(os.environ.get("STORAGE_SEED", "1"))

GIVEN: Final = "the state before an event"
"""The beginning of a refusal: a caller gave that state, and nothing else says it."""


@pytest.mark.timeout(0)
async def test_random_damage_is_mended(
    dsn: str, server_dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tables are those of before; but for flags that nothing else says."""
    await fill(dsn)
    rng = Random(SEED)
    made, mended = Counter[str](), Counter[str]()
    missed: list[str] = []
    async with await Database.open(dsn) as database, database.connection() as conn:
        known = await columns(conn._driver)
        sound = await logical_tables(database)
    every = kinds(known)
    template = dsn.rpartition("/")[2].partition("?")[0]
    for at in range(20 * DAMAGES):
        kind = every[at % len(every)] if len(every) < DAMAGES else rng.choice(every)
        async with copied(server_dsn, template) as copy, await Database.open(copy) as database:
            async with database.connection() as conn:
                done = await damage(conn._driver, kind, known, rng)
            if done is None:
                continue
            caplog.clear()
            left = await repaired(database)
            is_given = any(GIVEN in record.getMessage() for record in caplog.records)
            if not left and await logical_tables(database) != sound:
                left = [] if kind.place in EXPLAINED else ["other rows than before"]
        name = f"{kind.place} {kind.way}"
        made[name] += 1
        mended[name] += not left
        if left:
            sys.stdout.write(f"not mended: {done[:300]}\n")
            sys.stdout.writelines(f"    {one[:300]}\n" for one in left[:20])
        if left and kind.place not in KEPT and not is_given:
            missed.append(done)
        if made.total() == DAMAGES:
            break
    for name, number in sorted(made.items()):
        sys.stdout.write(f"{mended[name]} of {number} mended: {name}\n")
    sys.stdout.write(f"{mended.total()} of {made.total()} mended\n")
    assert made.total() == DAMAGES
    assert missed == []


@asynccontextmanager
async def copied(server_dsn: str, template: str) -> AsyncIterator[str]:
    """A copy of a database that nobody is connected to."""
    name = f"{template}_copy"
    connection = await asyncpg.connect(server_dsn)
    try:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        try:
            yield with_database(server_dsn, name)
        finally:
            await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


async def repaired(database: Database) -> list[str]:
    """Repair as `verify --repair` does; return what is left."""
    async with database.connection() as conn:
        found = [finding async for finding in found_in(conn, SERVER)]
    errors: list[str] = []
    try:
        await repair(database, found, server_name=SERVER)
    except StorageError as error:  # it must not fail: the test reports it
        errors.append(f"{type(error).__name__}: {error}")
    async with database.connection() as conn:
        return errors + [str(finding) async for finding in found_in(conn, SERVER)]
